"""Trainings of sharded models in many settings, by groups, for one, two or four processes.

With the same global batch the processes must find the losses, norms and weights of one.
"""

import copy
import functools
import os

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import distributed_c10d

from hftrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from tests.support.parity import build
from tests.support.small_models import MODELS, make_t5, t5_data, without_dropout

#: Samples in a step of all processes; 40 of them make five steps an epoch, or two with accumulation.
GLOBAL_BATCH = 8
FIRST, SHARDED = {"version": 1}, {"state_dict_type": "SHARDED_STATE_DICT"}
#: Name → arguments, for runs without checkpoints.
STRATEGIES = {
    "ddp": {},
    "fsdp1 full_shard": {"fsdp": "full_shard auto_wrap", "fsdp_config": FIRST},
    "fsdp1 by size": {"fsdp": "full_shard", "fsdp_config": {**FIRST, "min_num_params": 100}},
    "fsdp2": {"fsdp": True},
    "fsdp2 shard_grad_op": {"fsdp": "shard_grad_op"},
    "fsdp2 by size": {"fsdp": True, "fsdp_config": {"min_num_params": 100}},
}
SETTINGS = {
    "bert": {"average_tokens_across_devices": False},  # which would double the loss of BERT, as in transformers
    "llama": {"gradient_accumulation_steps": 3},
}
#: Model and strategy of runs compared with one process, beside those of `SAVED`.
COMPARED = [
    *(("llama", name) for name in STRATEGIES if name != "fsdp2"),
    *((model, name) for model in ("plain", "bert") for name in ("ddp", "fsdp1 full_shard", "fsdp2")),
]
#: Name → arguments, for runs with checkpoints.
SAVED = {
    "ddp": {},
    "fsdp1 full": {"fsdp": True, "fsdp_config": FIRST},
    "fsdp1 sharded": {"fsdp": True, "fsdp_config": {**FIRST, **SHARDED}},
    "fsdp1 flat": {"fsdp": True, "fsdp_config": {"fsdp_use_orig_params": False, "backward_prefetch": "backward_pre"}},
    "fsdp1 shard_grad_op sharded": {"fsdp": "shard_grad_op", "fsdp_config": {**FIRST, **SHARDED}},
    "fsdp1 no_shard full": {"fsdp": "no_shard"},
    "fsdp1 hybrid sharded": {"fsdp": "hybrid_shard", "fsdp_config": SHARDED},
    "fsdp1 hybrid_shard_zero2 full": {"fsdp": "hybrid_shard_zero2"},
    "fsdp1 recomputed": {"fsdp": True, "fsdp_config": {**FIRST, "activation_checkpointing": True}},
    "fsdp2 full": {"fsdp": True},
    "fsdp2 sharded": {"fsdp": True, "fsdp_config": SHARDED},
    "fsdp2 offload": {"fsdp": "full_shard offload"},
    "fsdp2 recomputed": {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
}
#: Kinds of checkpoints. Two processes write each, and one, two and four resume from it.
KINDS = ("ddp", "fsdp1 full", "fsdp1 sharded", "fsdp2 full", "fsdp2 sharded")
#: Strategies that train differently; "full" and "sharded" differ only in checkpoints.
WAYS = ("ddp", "fsdp1 full", "fsdp2 full")
#: Processes → reader → writers; one process has no launcher, and so no FSDP. Of two, each way of training reads all.
READERS = {
    1: {"ddp": KINDS},
    2: {
        "ddp": KINDS[1:],
        "fsdp1 full": ("ddp", "fsdp1 sharded", "fsdp2 sharded"),
        "fsdp1 sharded": ("fsdp1 full", "fsdp2 full"),
        "fsdp2 full": ("ddp", "fsdp1 full", "fsdp2 sharded"),
        "fsdp2 sharded": ("fsdp1 sharded", "fsdp2 full"),
    },
    4: {"fsdp1 sharded": ("ddp", "fsdp1 sharded", "fsdp2 sharded"), "fsdp2 full": ("fsdp1 sharded", "fsdp2 full")},
}
#: Group and processes → those whose checkpoints they read. Tests run in any order.
READ_FROM = {("exchange", count): ("save", 2) for count in READERS}
READ_FROM |= {("change_sizes", 1): ("save_by_lightning", 2), ("change_sizes", 4): ("change_sizes", 1)}
#: Strategies with which Lightning's own checkpoints are written.
LIGHTNING = ("ddp", "fsdp1 full", "fsdp2 sharded")
EVALUATED = ("ddp", "fsdp1 full", "fsdp1 sharded", "fsdp2 sharded")
HALF = [f"{name} {precision}" for name in WAYS for precision in ("bf16", "fp16")]


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def result_of(trainer):
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return {"logs": trainer.state.log_history, "weights": {name: value.clone() for name, value in weights.items()}}


def run(model, strategy, folder, resume=None, **settings):
    size = {"per_device_train_batch_size": GLOBAL_BATCH // world_size(), "logging_steps": 1}
    settings = {**size, **SETTINGS.get(model, {}), **copy.deepcopy(strategy), **settings}
    trainer, _ = build("hftrainer", model, folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return result_of(trainer)


def compare(folder):
    """Each strategy with one model, and each model; alone only without a strategy."""
    for model, strategy in COMPARED:
        if world_size() > 1 or strategy == "ddp":
            yield (model, strategy), run(model, STRATEGIES[strategy], folder / f"{model}-{strategy}")


def save(folder):
    for name, strategy in SAVED.items():
        where = folder / "saved" / name
        yield (name, "undisturbed"), run("llama", strategy, where, save_strategy="steps", save_steps=3)
        yield (name, "resumed"), run("llama", strategy, folder / "resumed", where / "checkpoint-3")


def exchange(folder):
    """Checkpoints of two processes, read by these with another strategy, by one and by four."""
    for reader, writers in READERS[world_size()].items():
        for writer in writers:
            checkpoint = folder / "saved" / writer / "checkpoint-3"
            yield (writer, reader), run("llama", SAVED[reader], folder / "exchanged", checkpoint)


def save_by_lightning(folder):
    for name in LIGHTNING:
        where = folder / "lightning" / name
        kept = ModelCheckpoint(dirpath=where, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        best = ModelCheckpoint(dirpath=where / "best", monitor="eval_loss")  # saves when an evaluation has just ended
        saving = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 4}
        yield name, run("plain", SAVED[name], where, **saving, trainer={"callbacks": [kept, best]})


def change_sizes(folder):
    """A run begun by two processes, continued by one, which saves, and then by four."""
    if world_size() == 1:
        for name in LIGHTNING:
            yield name, run("plain", {}, folder / "resumed", folder / "lightning" / name / "step=5.ckpt")
        begun = folder / "lightning" / "fsdp2 sharded" / "checkpoint-4"
        yield "alone", run("plain", {}, folder / "chained", begun, save_strategy="steps", save_steps=4)
    else:
        for reader in READERS[world_size()]:
            yield reader, run("plain", SAVED[reader], folder / "resumed", folder / "chained" / "checkpoint-8")


def evaluate(folder):
    for name in EVALUATED:
        where, strategy = folder / "evaluated" / name, copy.deepcopy(SAVED[name])
        best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        settings = {**best, "load_best_model_at_end": True, "save_total_limit": 1, **strategy}
        trainer, _ = build("hftrainer", "llama", where, **settings)
        before = trainer.evaluate()
        trainer.train()
        trainer.save_model(str(where / "final"))
        after = trainer.predict(trainer.eval_dataset)
        tokens = {"use_cpu": True, "predict_with_generate": True, "report_to": "none"}
        seq2seq = Seq2SeqTrainer(make_t5(), Seq2SeqTrainingArguments(str(where / "tokens"), **tokens, **strategy))
        predictions = seq2seq.predict(t5_data(5), max_length=9, num_beams=2).predictions
        yield name, {**result_of(trainer), "before": before, "after": after, "tokens": predictions}


def train_in_half_precision(folder):
    for name in HALF:
        strategy, precision = name.rsplit(" ", 1)
        settings = {precision: True, "save_strategy": "steps", "save_steps": 4}
        yield name, run("llama", SAVED[strategy], folder / "half" / name, **settings)


def train_adapters(folder):
    for name in ("ddp", "fsdp1 full", "fsdp2 full", "fsdp2 sharded"):
        where = folder / "peft" / name
        yield (
            (name, "undisturbed"),
            run("peft", SAVED[name], where, save_strategy="steps", save_steps=4, num_train_epochs=1),
        )
        checkpoint = where / "checkpoint-4"
        yield (name, "resumed"), run("peft", SAVED[name], folder / "resumed", checkpoint, num_train_epochs=1)


class Odd(torch.nn.Module):
    """With running statistics, two names for one parameter, and a layer that no step uses."""

    def __init__(self):
        super().__init__()
        self.first, self.same = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.same.weight = self.first.weight
        self.norm, self.last, self.unused = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3), torch.nn.Linear(4, 4)

    def forward(self, x, labels=None):
        logits = self.last(self.norm(self.same(self.first(x).relu())))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_odd():
    torch.manual_seed(3)
    return Odd()


def make_vit():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3, hidden_dropout_prob=0.0)
    return ViTForImageClassification(config)


def image_data(count=40):
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": i % 3} for i in range(count)]


class OwnLoader(Trainer):
    """Its loader does not ask for the model's columns before it is sharded."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=4))


def rerun_regressions(folder):
    own = {"trainer_class": lambda library: OwnLoader, "eval_strategy": "epoch", "num_train_epochs": 1}
    for name in WAYS:
        strategy = SAVED[name]
        settings = {"fp16": True, "max_steps": 20, "logging_steps": 1, **copy.deepcopy(strategy)}
        trainer, _ = build("hftrainer", "llama", folder / "overflow", **settings)
        trainer.accelerator.scaler._init_scale = 2.0**30  # all processes find infinite gradients at first
        trainer.train()
        yield ("overflow", name), result_of(trainer)
        smooth = {"label_smoothing_factor": 0.1, "max_steps": 3}
        yield ("label smoothing", name), run("llama", strategy, folder / "smooth", **smooth)
        yield ("own loader", name), run("plain", strategy, folder / "own", **own)


SCHEDULE_FREE = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "warmup_steps": 0}
#: Model → settings, and the kinds of checkpoints: all, or each way of training and each kind of file.
ODD_MODELS = {
    "odd": ({}, KINDS),
    "vit": ({}, ("ddp", "fsdp1 full", "fsdp2 sharded")),
    "plain": (SCHEDULE_FREE, ("ddp", "fsdp1 sharded", "fsdp2 full")),
}


def odd_models(folder):
    """Unused, tied and buffered modules; weights that transformers renames; an optimizer with modes."""
    MODELS["odd"], MODELS["vit"] = (make_odd, MODELS["plain"][1]), (make_vit, image_data)
    for model, (settings, kinds) in ODD_MODELS.items():
        for name in kinds:
            where = folder / "odd" / f"{model} {name}"
            go = functools.partial(run, model, SAVED[name], num_train_epochs=1, **settings)
            yield (model, name, "undisturbed"), go(where, save_strategy="steps", save_steps=3)
            yield (model, name, "resumed"), go(folder / "resumed", where / "checkpoint-3")
            if model == "vit" and name != "ddp":
                yield (model, name, "from ddp"), go(folder / "resumed", folder / "odd" / "vit ddp" / "checkpoint-3")


def count_groups(folder):
    for number, ends in enumerate((False, True, True)):
        for kind in ("full_shard", "hybrid_shard"):
            trainer, _ = build("hftrainer", "plain", folder / "groups", max_steps=1, fsdp=kind)
            trainer.train()
            yield (number, kind), len(distributed_c10d._world.pg_map)
        if ends:
            trainer.accelerator.end_training()


def run_group(group, folder):
    MODELS["peft"] = (without_dropout(MODELS["peft"][0]), MODELS["peft"][1])
    for name in ("plain", "bert", "llama"):
        make_model, make_data = MODELS[name]
        MODELS[name] = (without_dropout(make_model), functools.partial(make_data, 40))
    return dict(globals()[group](folder))

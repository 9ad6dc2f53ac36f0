"""What DeepSpeed does besides training alike: run by two processes under torchrun, or by one.

python feature_cases.py FOLDER [CASE ...]
"""

import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

import hftrainer
from hftrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from hftrainer.errors import UnsupportedArgument
from tests.adapters.deepspeed.training_cases import OF_CONFIGURATION, STAGES, offloaded, without_compiler
from tests.support.parity import build
from tests.support.rank_messages import error_of
from tests.support.small_models import language_data, make_llama, make_plain, make_t5, plain_data, t5_data

RANK = int(os.environ.get("RANK", "0"))
SHARDED = {**STAGES[3], "zero_optimization": {"stage": 3}}


def arguments(folder, kind=TrainingArguments, **settings):
    defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    defaults |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    return kind(str(folder), **{**defaults, **settings})


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def load_pretrained(folder):
    """`from_pretrained` partitions while it loads, as long as the arguments live; training is as without it."""
    from transformers import LlamaForCausalLM

    if RANK == 0:
        make_llama().save_pretrained(folder / "model")
    found = {}
    for name in ("full", "partitioned"):
        full = make_llama() if name == "full" else None
        args = arguments(folder / name, deepspeed=STAGES[3])
        torch.distributed.barrier()
        model = LlamaForCausalLM.from_pretrained(folder / "model") if full is None else full
        found[name] = {
            "is_partitioned": all(hasattr(each, "ds_id") for each in model.parameters()),
            "count": sum(each.numel() for each in model.parameters()),
        }
        trainer = Trainer(model, args, train_dataset=language_data())
        trainer.train()
        found[name]["losses"] = losses(trainer)
        trainer.save_model(str(folder / name / "final"))
        torch.distributed.barrier()
        found[name]["files"] = sorted(os.listdir(folder / name / "final"))
    del args, trainer
    found["is_full_again"] = not any(hasattr(each, "ds_id") for each in make_llama().parameters())
    return found


def save_shards(folder):
    """Weights that are not to be gathered stay in shards, and DeepSpeed's script makes one file of them."""
    args = arguments(folder, deepspeed=SHARDED, save_strategy="steps", save_steps=2)
    trainer = Trainer(make_llama(), args, train_dataset=language_data())
    trainer.train()
    trainer.save_model(str(folder / "final"))
    torch.distributed.barrier()
    holder = trainer._hftrainer.strategy.holder
    gathered = holder.gather_full_weights(trainer.model)
    found = {name: sorted(os.listdir(folder / name)) for name in ("final", "checkpoint-2")}
    if RANK == 0:
        command = [sys.executable, "zero_to_fp32.py", ".", "joined"]
        subprocess.run(command, cwd=folder / "final", check=True, capture_output=True, env={**os.environ, "RANK": "0"})
        joined = torch.load(folder / "final" / "joined" / "pytorch_model.bin")
        found["same"] = all(torch.equal(joined[name], value) for name, value in gathered.items())
    return found


def evaluate_and_train(folder):
    found = {}
    for name, config in (("none", None), ("stage_2", STAGES[2]), ("stage_3", STAGES[3])):
        args = arguments(folder / name, deepspeed=config)
        trainer = Trainer(make_llama(), args, train_dataset=language_data(), eval_dataset=language_data(9))
        found[name] = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            found[name] += [*losses(trainer), trainer.evaluate()["eval_loss"]]
        found[name].append(trainer.predict(language_data(9)).predictions.sum().item())
    return found


def arguments_to_generate(folder, **settings):
    """For partitioned models that generate up to 8 tokens, a sample at a time."""
    defaults = {"predict_with_generate": True, "generation_max_length": 8, "per_device_eval_batch_size": 1}
    return arguments(folder, Seq2SeqTrainingArguments, deepspeed=STAGES[3], **defaults, **settings)


def generate(folder):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    data = [{"input_ids": torch.arange(3 + n % 3, 9), "labels": torch.arange(5, 9 + n % 2)} for n in range(8)]
    args = arguments_to_generate(folder, per_device_train_batch_size=1)
    trainer = Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    predictions = trainer.predict(data).predictions
    trainer.save_model()
    torch.distributed.barrier()
    trainer.args.hf_deepspeed_config = None  # models are built unsharded again
    full = T5ForConditionalGeneration.from_pretrained(folder).eval()
    return {
        "partitioned": predictions.tolist(),
        "full": [full.generate(each["input_ids"][None], max_length=8)[0].tolist() for each in data],
    }


def generate_unequal_lengths(folder):
    """The second process has generated all its tokens first: it takes part until the first has, too."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Ends(LogitsProcessor):
        def __call__(self, input_ids, scores):
            ends = RANK == 1 and input_ids.shape[1] == 3
            scores[:, :2] = -1e4
            if ends:
                scores[:, 1] = 1e4
            return scores

    args = arguments_to_generate(folder, ddp_timeout=60)
    trainer = Seq2SeqTrainer(make_t5(), args)
    predictions = trainer.predict(t5_data(4), logits_processor=LogitsProcessorList([Ends()])).predictions
    return [int((line > 1).sum()) for line in predictions]


def fill_one_disk(folder):
    """The second process alone cannot write one checkpoint: nothing hangs, and the next is complete."""

    class Full(hftrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if RANK == 1:
                low = 512 if state.global_step == 2 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (low, resource.RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    args = arguments(folder, deepspeed=STAGES[2], save_strategy="steps", save_steps=1, max_steps=4)
    trainer = Trainer(make_plain(), args, train_dataset=plain_data(), callbacks=[Full()])
    trainer.train()
    torch.distributed.barrier()
    return {"folders": sorted(os.listdir(folder)), "steps": trainer.state.global_step}


def use_deepspeed_names(folder):
    class Own(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    args = arguments(folder, deepspeed=STAGES[2])
    trainer = Own(model, args, train_dataset=plain_data(), optimizers=(optimizer, None))
    trainer.train()
    logged, accelerator = losses(trainer), trainer.accelerator
    return {
        "losses": logged,
        "enabled": trainer.is_deepspeed_enabled,
        "type": accelerator.distributed_type,
        "stage": accelerator.state.deepspeed_plugin.zero_stage,
        "clipping": accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"],
        "unwrapped": accelerator.unwrap_model(trainer.model_wrapped) is trainer.model is model,
        "engine": type(trainer.deepspeed).__name__,
        "strategy": isinstance(trainer.lightning_trainer.strategy, DeepSpeedStrategy),
        "shown": trainer.lightning_trainer.strategy.deepspeed_engine is trainer.deepspeed,
        "refused": error_of(UnsupportedArgument, trainer.train),
    }


def propagate_arguments(folder):
    """Batches of another size, once by arguments that were changed and propagated."""
    found = {}
    for name, size in (("made", 2), ("changed", 4)):
        args = arguments(folder / name, deepspeed=STAGES[2], per_device_train_batch_size=size)
        trainer = Trainer(make_plain(), args, train_dataset=plain_data())
        if name == "changed":
            args.per_device_train_batch_size = 2
            trainer.propagate_args_to_deepspeed()
        trainer.train()
        found[name] = [*losses(trainer), trainer.deepspeed.train_micro_batch_size_per_gpu()]
    refused = error_of(UnsupportedArgument, trainer.propagate_args_to_deepspeed, auto_find_batch_size=True)
    return {**found, "refused": refused}


def use_given_objects(folder):
    """What scripts give besides: schedules, Lightning's callbacks, types, and saving before training."""
    from lightning.pytorch.callbacks import LearningRateMonitor
    from transformers import LlamaForCausalLM

    found = {}
    for name, stage in (("stage_2", STAGES[2]), ("stage_0", STAGES[0])):
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        args = arguments(folder / name, deepspeed=stage)
        trainer = Trainer(model, args, train_dataset=plain_data(), optimizers=(optimizer, schedule))
        trainer.train()
        found[f"learning_rates_{name}"] = [
            line["learning_rate"] for line in trainer.state.log_history if "loss" in line
        ]
    monitor = LearningRateMonitor()
    args = arguments(folder / "monitor", deepspeed=STAGES[2])
    Trainer(make_plain(), args, train_dataset=plain_data(), callbacks=[monitor]).train()
    found["monitor"] = sorted(monitor.lrs)
    args = arguments(folder / "types", deepspeed=STAGES[2], bf16=True, bf16_full_eval=True)
    trainer = Trainer(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data(9))
    found["types"] = [trainer.evaluate()["eval_loss"]]
    trainer.train()
    found["types"].append(trainer.evaluate()["eval_loss"])
    for name, config in (("gathered", STAGES[3]), ("sharded", SHARDED)):
        if RANK == 0:
            make_llama().save_pretrained(folder / "model")
        args = arguments(folder / name, deepspeed=config)
        torch.distributed.barrier()
        trainer = Trainer(LlamaForCausalLM.from_pretrained(folder / "model"), args, train_dataset=language_data())
        trainer.save_model()
        torch.distributed.barrier()
        args.hf_deepspeed_config = None  # models are built unsharded again
        found[name] = sum(each.numel() for each in LlamaForCausalLM.from_pretrained(folder / name).parameters())
    return {**found, **check_callbacks(folder), "another_stage": another_stage(folder)}


def another_stage(folder):
    """The error of a run that is to go on from what another stage wrote."""
    args = arguments(folder / "saved", deepspeed=STAGES[2], save_strategy="steps", save_steps=2)
    Trainer(make_plain(), args, train_dataset=plain_data()).train()
    trainer = Trainer(make_plain(), arguments(folder / "other", deepspeed=STAGES[3]), train_dataset=plain_data())
    return error_of(ValueError, trainer.train, resume_from_checkpoint=str(folder / "saved" / "checkpoint-2"))


def check_callbacks(folder):
    """Name → the error of a Trainer that cannot be had."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    class Own(torch.optim.Adam):
        pass

    tried = {
        "own_adam": lambda own: (offloaded(2, "optimizer"), {"optimizers": (own, None)}),
        "two_optimizers": lambda own: (OF_CONFIGURATION, {"optimizers": (own, None)}),
        "wrong_key": lambda own: ({"zero_optimization": {"stage": 2, "stge": 3}}, {}),
        "accumulation": lambda own: (STAGES[2], {"callbacks": [GradientAccumulationScheduler({0: 2})]}),
    }
    found = {}
    for name, make in tried.items():
        model = make_plain()
        config, settings = make(Own(model.parameters()))
        try:
            args = arguments(folder / "refused", deepspeed=config)
            Trainer(model, args, train_dataset=plain_data(), **settings).train()
        except ValueError as error:
            found[name] = str(error)
    return found


def resume_alone(folder):
    """One process, without a launcher, goes on from two processes' checkpoint, once it is a universal one."""
    written = folder / "hftrainer" / "stage 2" / "checkpoint-4"
    found = {}
    universal = {**STAGES[2], "checkpoint": {"load_universal": True}}
    for name, config, steps in (("shards", STAGES[2], 10), ("loaded", universal, 4), ("universal", universal, 10)):
        settings = {"deepspeed": config, "logging_steps": 1, "per_device_train_batch_size": 8, "max_steps": steps}
        trainer, _ = build("hftrainer", "plain", folder / "one" / name, **settings)
        try:
            trainer.train(resume_from_checkpoint=str(written))
            found[name] = trainer.state.log_history
            found[f"{name}_weights"] = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if name == "shards":
            tag = written / "global_step4"
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
            command += ["--num_merge_workers", "1", "--input_folder", str(tag), "--output_folder", f"{tag}_universal"]
            subprocess.run(command, check=True, capture_output=True)
    return found


def search_configurations(folder):
    """A search over stages and what else is nested in the configuration, and the same trainings each by itself."""
    configs = [{**STAGES[stage], "gradient_clipping": limit} for stage, limit in ((2, 0.5), (3, 1.0), (0, 0.5))]
    found = {"trials": [], "stages": [], "alone": []}

    def space(trial):
        return {"deepspeed": configs[trial.suggest_int("config", trial.number, trial.number)]}

    def settings(name, config):
        return arguments(folder / name, deepspeed=config, eval_strategy="steps", eval_steps=1)

    data = {"train_dataset": language_data(), "eval_dataset": language_data(9)}
    trainer = Trainer(model_init=lambda: make_llama(), args=settings("search", STAGES[2]), **data)

    class Notes(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            found["stages"].append(trainer.deepspeed.zero_optimization_stage())

        def on_train_end(self, args, state, control, **kwargs):
            found["trials"].append([line.get("loss", line.get("eval_loss")) for line in state.log_history])

    trainer.add_callback(Notes())
    trainer.hyperparameter_search(space, n_trials=len(configs))
    for number, config in enumerate(configs):
        alone = Trainer(model_init=lambda: make_llama(), args=settings(f"alone-{number}", config), **data)
        alone.train()
        found["alone"].append([line.get("loss", line.get("eval_loss")) for line in alone.state.log_history])
    return found


CASES = (
    *(load_pretrained, save_shards, evaluate_and_train, generate, generate_unequal_lengths, fill_one_disk),
    *(use_deepspeed_names, propagate_arguments, use_given_objects),
)


def main(folder, chosen):
    without_compiler()
    torch.set_num_threads(1)
    for case in [globals()[name] for name in chosen] or CASES:
        home = folder if case is resume_alone else folder / case.__name__
        found = case(home)
        (folder / f"{case.__name__}-{RANK}.pkl").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

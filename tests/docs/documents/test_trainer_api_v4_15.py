"""The blocks of the Trainer's documentation of v4.15, by line; those of TFTrainer are in a lane of their own."""

import inspect
import logging
import re
import shutil
import sys
import warnings

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import nn

from hftrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from hftrainer.arguments.releases import EARLIER_DEFAULTS
from tests.docs.documents import shell
from tests.docs.documents.support import losses, parsed, quiet
from tests.support.tiny import make_bert, make_plain, make_t5, plain_data, t5_data, text_data, without_dropout

# ---- Signatures -----------------------------------------------------------------------------------------------------

EVALUATE = "eval_dataset=None ignore_keys=None metric_key_prefix='eval'"
LOOP = "dataloader description prediction_loss_only=None ignore_keys=None metric_key_prefix='eval'"
GENERATION = "max_length=None num_beams=None"
#: Line → method and its parameters.
SIGNATURES = {
    73: ("add_callback", "callback"),
    91: ("create_scheduler", "num_training_steps optimizer=None"),
    93: ("evaluate", EVALUATE),
    117: ("evaluation_loop", LOOP),
    122: ("floating_point_ops", "inputs"),
    128: ("get_eval_dataloader", "eval_dataset=None"),
    132: ("get_test_dataloader", "test_dataset"),
    143: (
        "hyperparameter_search",
        "hp_space=None compute_objective=None n_trials=20 direction='minimize' backend=None hp_name=None",
    ),
    208: ("log", "logs"),
    212: ("log_metrics", "split metrics"),
    261: ("metrics_format", "metrics"),
    271: ("pop_callback", "callback"),
    280: ("predict", "test_dataset ignore_keys=None metric_key_prefix='test'"),
    310: ("prediction_loop", LOOP),
    315: ("prediction_step", "model inputs prediction_loss_only ignore_keys=None"),
    338: ("push_to_hub", "commit_message='End of training' blocking=True"),
    356: ("remove_callback", "callback"),
    359: ("save_metrics", "split metrics combined=True"),
    371: ("train", "resume_from_checkpoint=None trial=None ignore_keys_for_eval=None"),
    388: ("training_step", "model inputs"),
    703: ("main_process_first", "local=True desc='work'"),
}


def read(text):
    """Name → default, or no default."""
    pairs = re.findall(r"(\w+)(?:=('[^']*'|\([^)]*\)|\S+))?", text)
    return {name: eval(default) if default else inspect.Parameter.empty for name, default in pairs}


def parameters(function):
    found = inspect.signature(function).parameters
    return {name: each.default for name, each in found.items() if name != "self"}


@pytest.mark.parametrize("line", SIGNATURES)
def test_methods(line):
    """Called by position or by name: what later releases have added comes after it, with a default."""
    name, text = SIGNATURES[line]
    documented = read(text)
    ours = parameters(getattr(TrainingArguments if name == "main_process_first" else Trainer, name))
    assert dict(list(ours.items())[: len(documented)]) == documented
    added = {name: ours[name] for name in ours.keys() - documented.keys() - {"kwargs"}}
    assert inspect.Parameter.empty not in added.values()


def test_line_45():
    """The first seven by position, as in later releases, and all by name."""
    documented = read(
        "model=None args=None data_collator=None train_dataset=None eval_dataset=None tokenizer=None model_init=None "
        "compute_metrics=None callbacks=None optimizers=(None,None)"
    )
    ours = parameters(Trainer)
    assert {name: ours[name] for name in documented} == documented
    names = ["processing_class" if name == "tokenizer" else name for name in documented]
    assert list(ours)[:7] == names[:7]


def test_lines_410_441(tmp_path, monkeypatch):
    """`max_length` and `num_beams`, by position and by name; the prefix of predict() is that of later releases."""
    model, data, asked = make_t5(), t5_data(4), []
    generate = model.generate

    def noting(*inputs, **settings):
        asked.append((settings["max_length"], settings["num_beams"]))
        return generate(*inputs, **settings)

    monkeypatch.setattr(model, "generate", noting)
    args = quiet(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = Seq2SeqTrainer(model, args, compute_metrics=lambda prediction: {})
    for name in ("evaluate", "predict"):
        method = getattr(trainer, name)
        by_position, by_name = method(data, None, "eval", 7, 2), method(data, max_length=7, num_beams=2)
        if name == "predict":
            assert np.array_equal(by_position.predictions, by_name.predictions)
            assert by_position.metrics["eval_loss"] == by_name.metrics["test_loss"]
        else:
            assert by_position["eval_loss"] == by_name["eval_loss"]
    assert asked == [(7, 2)] * 4


ARGUMENTS = """
    overwrite_output_dir=False do_train=False do_eval=False do_predict=False evaluation_strategy='no'
    prediction_loss_only=False per_device_train_batch_size=8 per_device_eval_batch_size=8 per_gpu_train_batch_size=None
    per_gpu_eval_batch_size=None gradient_accumulation_steps=1 eval_accumulation_steps=None learning_rate=5e-05
    weight_decay=0.0 adam_beta1=0.9 adam_beta2=0.999 adam_epsilon=1e-08 max_grad_norm=1.0 num_train_epochs=3.0
    max_steps=-1 lr_scheduler_type='linear' warmup_ratio=0.0 warmup_steps=0 log_level='passive'
    log_level_replica='passive' log_on_each_node=True logging_dir=None logging_strategy='steps'
    logging_first_step=False logging_steps=500 logging_nan_inf_filter=True save_strategy='steps' save_steps=500
    save_total_limit=None save_on_each_node=False no_cuda=False seed=42 bf16=False fp16=False fp16_opt_level='O1'
    half_precision_backend='auto' bf16_full_eval=False fp16_full_eval=False tf32=None local_rank=-1 xpu_backend=None
    tpu_num_cores=None tpu_metrics_debug=False debug='' dataloader_drop_last=False eval_steps=None
    dataloader_num_workers=0 past_index=-1 run_name=None disable_tqdm=None remove_unused_columns=True label_names=None
    load_best_model_at_end=False metric_for_best_model=None greater_is_better=None ignore_data_skip=False
    sharded_ddp='' deepspeed=None label_smoothing_factor=0.0 adafactor=False group_by_length=False
    length_column_name='length' report_to=None ddp_find_unused_parameters=None dataloader_pin_memory=True
    skip_memory_metrics=True use_legacy_prediction_loop=False push_to_hub=False resume_from_checkpoint=None
    hub_model_id=None hub_strategy='every_save' hub_token=None gradient_checkpointing=False fp16_backend='auto'
    push_to_hub_model_id=None push_to_hub_organization=None push_to_hub_token=None mp_parameters=''"""
OF_GENERATION = "sortish_sampler=False predict_with_generate=False generation_max_length=None generation_num_beams=None"


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        (642, TrainingArguments, ARGUMENTS),
        (729, Seq2SeqTrainingArguments, f"{ARGUMENTS} {OF_GENERATION}"),
    ],
)
def test_arguments(line, kind, text):
    """Each is there; given with the documented default, it changes nothing but what the releases have changed since."""
    documented = read(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        given, left_out = (kind("x", **settings).to_dict() for settings in (documented, {}))
    changed = {name for name in left_out if given[name] != left_out[name]}
    assert changed == {"log_level_replica"} <= EARLIER_DEFAULTS.keys()
    assert given.keys() == left_out.keys()
    # The defaults that the classes have are these too, but for the ones that follow from others.
    names = set(documented) & {"optim", *EARLIER_DEFAULTS}
    assert names == {"log_level_replica", "report_to"}


# ---- Code -----------------------------------------------------------------------------------------------------------


class MultilabelTrainer(Trainer):
    """The block."""

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.get("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.BCEWithLogitsLoss()
        loss = loss_fct(
            logits.view(-1, self.model.config.num_labels), labels.float().view(-1, self.model.config.num_labels)
        )
        return (loss, outputs) if return_outputs else loss


def test_line_32(tmp_path):
    model = without_dropout(make_bert)()
    model.config.problem_type = "multi_label_classification"
    data = [
        {"input_ids": row["input_ids"], "labels": torch.tensor([1.0, 0.0, float(row["label"] == 2)])}
        for row in text_data(8)
    ]
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}

    def expected():
        return nn.functional.binary_cross_entropy_with_logits(model(**batch).logits, batch["labels"]).item()

    trainer = MultilabelTrainer(model, quiet(tmp_path, max_steps=3, learning_rate=1e-2), train_dataset=data)
    before = expected()
    trainer.train()
    logged = losses(trainer.state.log_history)
    assert logged[0] == pytest.approx(before, rel=1e-6)
    assert logged[-1] < logged[0]
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected(), rel=1e-6)


def test_line_220(tmp_path, capsys):
    """The report of memory, in the first stage that is run."""
    pytest.importorskip("psutil")
    trainer = Trainer(make_plain(), quiet(tmp_path, skip_memory_metrics=False), train_dataset=plain_data(8))
    trainer.log_metrics("train", trainer.train().metrics)
    printed = capsys.readouterr().out
    for name in ("init_mem_cpu_alloc_delta", "init_mem_cpu_peaked_delta", "train_mem_cpu_alloc_delta"):
        assert re.search(rf"{name} += +-?\d+MB", printed), printed
    assert re.search(r"train_mem_cpu_peaked_delta += +\d+MB", printed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    args = quiet(folder, save_strategy="steps", save_steps=2, max_steps=4, per_device_train_batch_size=4)
    trainer = Trainer(make_plain(), args, train_dataset=plain_data(8))
    trainer.train()
    return folder, trainer


@pytest.mark.parametrize("line", [855, 856, 863])
def test_resuming(line, undisturbed, tmp_path, monkeypatch):
    """From the latest checkpoint, from a folder, and from the folder that hub_strategy='checkpoint' leaves."""
    written, first = undisturbed
    monkeypatch.chdir(tmp_path)
    name = {855: "checkpoint-2", 856: "elsewhere", 863: "last-checkpoint"}[line]
    shutil.copytree(written / "checkpoint-2", tmp_path / "output_dir" / name)
    asked = {855: True, 856: str(tmp_path / "output_dir" / name), 863: "output_dir/last-checkpoint"}[line]
    args = quiet("output_dir", max_steps=4, per_device_train_batch_size=4)
    trainer = Trainer(make_plain(), args, train_dataset=plain_data(8))
    trainer.train(resume_from_checkpoint=asked)
    assert trainer.state.global_step == 4
    for name, value in first.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value)
    assert losses(trainer.state.log_history) == losses(first.state.log_history)


# ---- Logging --------------------------------------------------------------------------------------------------------


@pytest.fixture
def levels(monkeypatch):
    """Of loggers that a Trainer or the block set, as they were."""
    names = ("hftrainer", "transformers", "datasets")
    before = {name: logging.getLogger(name).level for name in names}
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("words", ["", "--log_level error"])
def test_line_889(words, levels, tmp_path):
    """Without words the levels stay as they are, as in releases from v4.30 on; the text says INFO."""
    training_args = parsed(words)
    logger = logging.getLogger(__name__)
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    Trainer(make_plain(), training_args)
    assert log_level == (logging.ERROR if words else logging.WARNING)
    shown = {logging.getLogger(name).getEffectiveLevel() for name in ("hftrainer", "transformers", "datasets")}
    assert shown == {log_level}


W, E = logging.WARNING, logging.ERROR


@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        (904, "--log_level warning --log_level_replica error", [W, E, W, E]),
        (906, "--log_level warning --log_level_replica error --log_on_each_node 0", [W, E, E, E]),
        (909, "--log_level error --log_level_replica error --log_on_each_node 0", [E, E, E, E]),
    ],
)
def test_log_levels(line, words, expected, monkeypatch):
    """Of two processes on each of two nodes."""
    monkeypatch.setattr(TrainingArguments, "_connect_launched", lambda self: None)  # the processes are made up
    found = []
    for rank in range(4):
        place = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2}
        for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 29501}.items():
            monkeypatch.setenv(name, str(value))
        found.append(parsed(words).get_process_log_level())
    assert found == expected


# ---- FairScale ------------------------------------------------------------------------------------------------------

TRANSLATION = "examples/pytorch/translation/run_translation.py"
WORDS = """
--model_name_or_path t5-small --per_device_train_batch_size 1
--output_dir output_dir --overwrite_output_dir
--do_train --max_train_samples 500 --num_train_epochs 1
--dataset_name wmt16 --dataset_config "ro-en"
--source_lang en --target_lang ro
--fp16"""
#: Line → value of sharded_ddp, and the strategy that does it here.
SHARDED = {
    1046: ("simple", "shard_grad_op"),
    1063: ("zero_dp_3", "full_shard"),
    1068: ("zero_dp_2", "shard_grad_op"),
    1080: ('"zero_dp_2 cpu_offload"', "shard_grad_op"),
    1098: ('"zero_dp_3 auto_wrap"', "full_shard"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By line; 0 is without --sharded_ddp."""
    words = " ".join(WORDS.split())
    lines = shell.several(words, *(f"{words} --sharded_ddp {value}" for value, _ in SHARDED.values()))
    block = f"python -m torch.distributed.launch --nproc_per_node=2 {TRANSLATION} {lines}"
    ranks = shell.run(tmp_path_factory.mktemp("v4.15"), block, TRANSLATION)
    return [dict(zip([0, *SHARDED], runs, strict=True)) for runs in ranks]


@pytest.mark.parametrize("line", SHARDED)
def test_sharded_ddp(line, found):
    """The losses are those of replicas, as FairScale's were."""
    for rank, runs in enumerate(found):
        sharded, whole = runs[line], runs[0]
        assert sharded["place"] == [rank, rank, 2]
        assert (sharded["kind"], whole["kind"], sharded["precision"]) == ("FSDP", "MULTI_CPU", "fp16")
        assert sharded["script"]["dataset_config_name"] == "ro-en"
        words, strategy = SHARDED[line]
        assert sharded["sharding"]["strategy"] == strategy
        assert sharded["sharding"]["cpu_offload"] == ("cpu_offload" in words)
        assert losses(sharded["logs"]) == pytest.approx(losses(whole["logs"]), rel=1e-3)  # of float16
    assert found[0][line]["weights"] == found[1][line]["weights"]

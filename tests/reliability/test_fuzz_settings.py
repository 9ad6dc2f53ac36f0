"""Configurations and references to the Hub that somebody made up: a clear error or a valid value, and no other file."""

import json
import os
import sys

import pytest
from hypothesis import strategies as st

from hftrainer import HfArgumentParser, Trainer, TrainingArguments
from hftrainer.arguments.deepspeed import configure
from hftrainer.errors import CheckpointNotFound
from hftrainer.hub.download import download_checkpoint
from hftrainer.parallel.fsdp.settings import read_fsdp
from tests.support import fuzz
from tests.support.hub_runs import TOKEN
from tests.support.hub_runs import hub as hub
from tests.support.hub_server import Commit, Repo
from tests.support.jobs import names
from tests.support.tiny import make_bert, make_plain, plain_data

ARGUMENTS = {
    **{"output_dir": "out", "learning_rate": 0.1, "max_steps": 3, "logging_steps": 2, "optim": "adamw_torch"},
    **{"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "report_to": ["none"], "use_cpu": True, "seed": 7},
    **{"eval_strategy": "steps", "eval_steps": 2, "label_names": ["labels"], "warmup_steps": 0.1, "run_name": "run"},
}
LIGHTNING = {
    **{"devices": 1, "async_checkpoint": True, "max_time": {"minutes": 1}},
    **{"limit_val_batches": 2, "profiler": "simple"},
}
ACCELERATOR = {"split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True}

FSDP = {
    **{"version": 1, "transformer_layer_cls_to_wrap": ["BertLayer"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    **{"min_num_params": 0, "state_dict_type": "FULL_STATE_DICT", "backward_prefetch": "backward_pre"},
    **{"cpu_ram_efficient_loading": True, "activation_checkpointing": False, "reshard_after_forward": "full_shard"},
    **{"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}},
}
DEEPSPEED = {
    **{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}}},
    **{"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}},
    **{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto"}}},
    **{"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "gradient_clipping": "auto"},
    **{"train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
}


def parsed(path):
    read = HfArgumentParser(TrainingArguments)
    (read.parse_json_file if path.suffix == ".json" else read.parse_yaml_file)(str(path))


def constructed(argument):
    def construct(path):
        args = TrainingArguments("out", use_cpu=True, report_to="none", max_steps=1, **{argument: str(path)})
        Trainer(make_plain(), args, train_dataset=plain_data(8))

    return construct


def sharded(path):
    read_fsdp(True, str(path), {})


def completed(path):
    args = TrainingArguments("out", use_cpu=True, report_to="none")
    args.deepspeed = str(path)  # afterwards: nobody asks whether DeepSpeed is installed
    configure(args).completed(make_bert(), 10, 2, warmup_is_default=True)


#: Name of a file → its contents, and what reads it.
FILES = {
    "arguments.json": (ARGUMENTS, parsed),
    "arguments.yaml": (ARGUMENTS, parsed),
    "lightning.json": (LIGHTNING, constructed("lightning_config")),
    "lightning.yaml": (LIGHTNING, constructed("lightning_config")),
    "accelerator.json": (ACCELERATOR, constructed("accelerator_config")),
    "fsdp.json": (FSDP, sharded),
    "deepspeed.json": (DEEPSPEED, completed),
    "deepspeed.yaml": (DEEPSPEED, completed),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-"])  # made-up devices start no processes
    return tmp_path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["values", "bytes"])
@fuzz.made_up
def test_made_up_files(folder, name, way, data):
    content, read = FILES[name]
    path = folder / name
    if way == "values":
        path.write_text(json.dumps(data.draw(fuzz.mutated(content))))  # YAML reads JSON
    else:
        path.write_bytes(data.draw(fuzz.scrambled(json.dumps(content).encode())))
    with fuzz.accepted_or_refused():
        read(path)
    assert set(names(folder)) <= {name, "out"}


#: Which no reader takes for a mapping of arguments.
ODD = {
    **{"deep": b"[" * 1_000, "deeper": b"[" * 10_000, "empty": b"", "zero": b"\x00", "letters": "é".encode() * 3},
    **{"no anchor": b"a: &a [x, x]\nb: *c", "deep keys": b'{"a": 1' * 2_000, "no UTF-8": b'{"devices": "\xff\xfe"}'},
}


@pytest.mark.parametrize("name", FILES)
def test_odd_files(folder, name):
    """As it is, each is read."""
    content, read = FILES[name]
    (folder / name).write_text(json.dumps(content))
    read(folder / name)
    odd = {case: text for case, text in ODD.items() if case != "deeper" or name.endswith("json")}  # YAML takes long
    for case, text in odd.items():
        (folder / name).write_bytes(text)
        with pytest.raises(fuzz.CLEAR) as refused:
            read(folder / name)
        assert case == "empty" or name in str(refused.value)


# ---- References to the Hub -------------------------------------------------------------------------------------------

WORDS = [
    "me",
    "run",
    "..",
    ".",
    "",
    "checkpoint-2",
    "@",
    "@main",
    "/",
    "\\",
    "%2e%2e",
    "*",
    "~",
    "\0",
    "é",
    "x" * 200,
    " ",
]
REFERENCES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "hub:me/run", "hub:me/good"]),
    st.sampled_from(["", "/", "hub:"]),
    st.lists(st.sampled_from(WORDS), max_size=3).map("/".join),
)
STATE = b'{"global_step": 2}'
#: Names of files in a repository that somebody made up.
PATHS = {
    **{"../outside": STATE, "checkpoint-2/../../outside": STATE, "/tmp/hftrainer-outside": STATE},
    **{"checkpoint-2/trainer_state.json": STATE, "a\\..\\b": STATE},
}


@pytest.fixture
def repos(hub):
    for name, files in (("me/run", PATHS), ("me/good", {"checkpoint-2/trainer_state.json": STATE})):
        hub.repos[name] = Repo(branches={"main": [Commit("made up", files)]})


def files_below(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def downloaded(reference):
    """The folder that a reference leads to, or the error's words."""
    try:
        return download_checkpoint(reference, TOKEN)
    except fuzz.CLEAR as refused:
        return refused


@fuzz.made_up
def test_made_up_references(repos, tmp_path, data):
    """What is downloaded stays in the cache, whatever is asked for and whatever the repository lists."""
    home = tmp_path / "home" / "hub"
    for reference in data.draw(st.lists(REFERENCES, min_size=5, max_size=5)):
        found = downloaded(reference)
        assert TOKEN not in str(found)
        assert isinstance(found, Exception) or os.path.realpath(found).startswith(str(home))
        assert files_below(tmp_path) == files_below(home)
        assert not os.path.exists("/tmp/hftrainer-outside")


@pytest.mark.parametrize(
    "place", ["..", "../..", "checkpoint-2/../../../..", "/", "//", "/tmp", "checkpoint-2//", ".", "a\\..\\.."]
)
def test_a_reference_that_leads_out_of_the_cache(repos, place):
    with pytest.raises(CheckpointNotFound, match="give 'hub:owner/name'"):
        download_checkpoint(f"hub:me/run/{place}", TOKEN)

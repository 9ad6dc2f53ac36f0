"""Configurations and references to the Hub that somebody made up: a clear error or a valid value, and no other file."""

import json
import os
import sys

import pytest
import torch

from hftrainer import HfArgumentParser, Trainer, TrainingArguments
from hftrainer.arguments.deepspeed import configure
from hftrainer.errors import CheckpointNotFound
from hftrainer.hub.download import download_checkpoint
from hftrainer.parallel.fsdp.settings import read_fsdp
from tests.support import fuzz
from tests.support.hub_server import Commit, HubServer, Repo
from tests.support.tiny import make_bert, make_plain, plain_data

ARGUMENTS = {
    **{"output_dir": "out", "learning_rate": 0.1, "max_steps": 3, "logging_steps": 2, "optim": "adamw_torch"},
    **{"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "report_to": ["none"], "use_cpu": True, "seed": 7},
    **{"eval_strategy": "steps", "eval_steps": 2, "label_names": ["labels"], "warmup_steps": 0.1, "run_name": "run"},
}
LIGHTNING = {
    "devices": 1,
    "async_checkpoint": True,
    "max_time": {"minutes": 1},
    "limit_val_batches": 2,
    "profiler": "simple",
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["values", "bytes"])
def test_made_up_files(tmp_path, name, way, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-"])  # made-up devices start no processes
    content, read = FILES[name]
    path, kind = tmp_path / name, f"{name}: {way}"
    path.write_text(json.dumps(content))
    read(path)
    for seed, rng in fuzz.seeds(kind):
        path.write_text(json.dumps(fuzz.mutate(content, rng) if way == "values" else content))  # YAML reads JSON
        if way == "bytes":
            fuzz.scramble(path, rng)
        with fuzz.clear(kind, f"{seed}: {path.read_bytes()!r}"):
            read(path)
        assert {each.name for each in tmp_path.iterdir()} <= {name, "out"}, seed
    torch.manual_seed(0)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "text",
    ["[" * 10_000, "", "\x00", "é".encode("latin-1").decode("latin-1") * 3, "a: &a [x, x]\nb: *c", '{"a": 1' * 5_000],
    ids=["deep", "empty", "zero", "letters", "no anchor", "deep keys"],
)
def test_odd_files(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(fuzz.CLEAR, match=name.replace(".", r"\.") if text else None):
        FILES[name][1](path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_utf_8(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"devices": "\xff\xfe"}')
    with pytest.raises(fuzz.CLEAR, match=name.replace(".", r"\.")):
        FILES[name][1](tmp_path / name)


# ---- References to the Hub ------------------------------------------------------------------------------------------

TOKEN = "hf_ofTheFuzzer"
PARTS = (
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
)
#: Names of files in a repository that somebody made up.
PATHS = (
    "../outside",
    "checkpoint-2/../../outside",
    "/tmp/hftrainer-outside",
    "checkpoint-2/trainer_state.json",
    "a\\..\\b",
)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer({TOKEN: ("me", "write")}).running() as server:
        server.serve(monkeypatch, tmp_path / "home")
        server.repos["me/run"] = Repo()
        files = dict.fromkeys(PATHS, b'{"global_step": 2}')
        server.repos["me/run"].branches["main"].append(Commit("made up", files, tuple(files)))
        server.repos["me/good"] = Repo()
        files = {"checkpoint-2/trainer_state.json": b'{"global_step": 2}'}
        server.repos["me/good"].branches["main"].append(Commit("a run", files, tuple(files)))
        yield server


def files_below(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def downloaded(reference):
    try:
        return download_checkpoint(reference, TOKEN)
    except CheckpointNotFound as refused:
        if TOKEN in str(refused):
            raise RuntimeError("the message has the token") from None
        raise


def test_made_up_references(hub, tmp_path):
    """What is downloaded stays in the cache, whatever is asked for and whatever the repository lists."""
    home = tmp_path / "home" / "hub"
    for _, rng in fuzz.seeds("references to the Hub", fuzz.TRIED * 5):
        reference = (
            rng.choice(["", "hub:me/run", "hub:me/good"])
            + rng.choice(["", "/", "hub:"])
            + "/".join(rng.choice(PARTS) for _ in range(rng.randrange(4)))
        )
        with fuzz.clear("references to the Hub", repr(reference)):
            found = downloaded(reference)
            assert os.path.realpath(found).startswith(str(home)), reference
        assert files_below(tmp_path) == files_below(home), reference
        assert not os.path.exists("/tmp/hftrainer-outside")


@pytest.mark.parametrize(
    "folder", ["..", "../..", "checkpoint-2/../../../..", "/", "//", "/tmp", "checkpoint-2//", ".", "a\\..\\.."]
)
def test_a_reference_that_leads_out_of_the_cache(hub, folder):
    with pytest.raises(CheckpointNotFound, match="give 'hub:owner/name'"):
        download_checkpoint(f"hub:me/run/{folder}", TOKEN)

"""Random changes to checkpoints, configurations and references to the Hub give a clear error, or are used.

No code in them is run, and no other file is written.
"""

import contextlib
import functools
import json
import os
import pickle
import struct
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st

from hftrainer import HfArgumentParser, TrainingArguments
from hftrainer.checkpointing.layout import MANIFEST_NAME, SHARD_FOLDERS
from hftrainer.checkpointing.sharded import load_model_shards, load_optimizer
from hftrainer.checkpointing.writing.files import crc32_of_list
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint
from hftrainer.hub.download import download_checkpoint
from hftrainer.parallel.fsdp_settings import read_fsdp
from hftrainer_deepspeed.settings import make_config
from tests.support import random_files
from tests.support.checkpoints import KeepsState, copy_without_manifest, make_trainer, train_to_end
from tests.support.hub_runs import TOKEN, hub as hub
from tests.support.hub_server import Commit, Repo
from tests.support.jobs import names_in
from tests.support.sharded_checkpoints import make_stepped, write_shards
from tests.support.small_models import make_bert

pytestmark = pytest.mark.filterwarnings("ignore")
HUB_ARGS = SimpleNamespace(hub_token=TOKEN, hub_model_id=None, hub_revision=None)
WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


def make(folder, **settings):
    return make_trainer(folder, callbacks=[KeepsState()], **{"max_steps": 5, "logging_steps": 2, **settings})


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    @functools.cache
    def source(kind):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "shards":
            write_shards(folder / "checkpoint-3")
            (folder / "checkpoint-3" / MANIFEST_NAME).touch()
        else:
            make(folder, max_steps=3, **(WORKERS if kind == "workers" else {})).train()
        return folder / "checkpoint-3"

    return source


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoint-3"


def used_memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def assert_harmless(folder):
    """What is read inside is accepted or refused; it runs no code, writes nothing elsewhere, takes little memory."""
    before = used_memory()
    with random_files.accepted_or_refused():
        yield
    assert names_in(folder.parents[1]) == ["run"]
    assert used_memory() - before < 500 * 2**20


def change_json(path, draw, trace):
    path.write_text(json.dumps(draw(random_files.mutated(json.loads(path.read_text())))))


def change_torch(path, draw, trace):
    torch.save(draw(random_files.pickled(torch.load(path, weights_only=False), trace)), path)


def change_header(path, draw, trace):
    """A header of safetensors that lies about its length, or about the tensors."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(draw(random_files.mutated(json.loads(data[8:end])))).encode()
    length = draw(st.sampled_from([len(header)] * 4 + [0, 7, 2**40, 2**63]))
    path.write_bytes(struct.pack("<Q", length) + header + data[end:])


def change_part(part, path, draw, trace):
    held = torch.load(path, weights_only=False)
    place = held["data"] if part == "workers" else held
    place[part] = draw(random_files.mutated(place[part] or {"loss_a": (torch.tensor(0.5), 2)}, random_files.tensors))
    torch.save(held, path)


def change_list(path, draw, trace):
    metadata = pickle.loads(path.read_bytes())
    name = draw(st.sampled_from(list(vars(metadata))))
    value = getattr(metadata, name)
    described = draw(st.sampled_from(list(value.values()))) if isinstance(value, dict) and value else value
    if getattr(described, "__dict__", None) and draw(st.integers(0, 9)) < 7:
        vars(described)[draw(st.sampled_from(list(vars(described))))] = draw(random_files.tensors)
    else:
        setattr(metadata, name, draw(random_files.mutated(value)))
    if draw(st.integers(0, 9)) == 9:
        metadata.planner_data = {"more": random_files.MaliciousPickle(trace)}
    path.write_bytes(pickle.dumps(metadata))


def scramble(path, draw, trace):
    path.write_bytes(draw(random_files.scrambled(path.read_bytes())))


def resume(folder, **settings):
    train_to_end(make(folder.parent, **settings), folder)


def load(kind):
    def load_shards(folder):
        model, optimizer = make_stepped()
        if kind == "model":
            load_model_shards(model, str(folder))
        else:
            load_optimizer(model, optimizer, str(folder), read_unsharded=dict)

    return load_shards


CHANGES = {
    **{"trainer_state.json": change_json, MANIFEST_NAME: change_json, "model.safetensors": change_header},
    **dict.fromkeys(["progress.pt", "rng_state.pth", "optimizer.pt", "scheduler.pt"], change_torch),
    **dict.fromkeys(["lightning_callbacks.pt", "training_args.bin"], change_torch),
}
#: Case → kind of checkpoint, the file that is changed, how, and what reads it.
CASES = {
    **{f"values of {name}": ("run", name, change, resume) for name, change in CHANGES.items()},
    **{f"bytes of {name}": ("run", name, scramble, resume) for name in CHANGES},
    "metrics": ("run", "progress.pt", partial(change_part, "metrics"), resume),
    "workers": ("workers", "progress.pt", partial(change_part, "workers"), partial(resume, **WORKERS)),
}
for _kind, _folder in SHARD_FOLDERS.items():
    CASES[f"list of shards of the {_kind}"] = ("shards", f"{_folder}/.metadata", change_list, load(_kind))
    CASES[f"bytes of that of the {_kind}"] = ("shards", f"{_folder}/.metadata", scramble, load(_kind))
    CASES[f"bytes of the {_kind}'s shards"] = ("shards", f"{_folder}/__0_0.distcp", scramble, load(_kind))


@pytest.mark.parametrize("case", CASES)
@random_files.with_examples
def test_random_contents_of_checkpoints_are_used_or_refused(sources, folder, case, data):
    kind, name, change, read = CASES[case]
    copy_without_manifest(sources(kind), folder)
    if name == MANIFEST_NAME:
        (folder / name).write_bytes((sources(kind) / name).read_bytes())
    change(folder / name, data.draw, folder.parents[1] / "trace")
    with assert_harmless(folder):
        read(folder)


def manifest_of(name):
    files = {name: {"size": 1, "crc32": 1}}
    return MANIFEST_NAME, {"files": files, "crc32": crc32_of_list(files)}


SHARDS = ("../outside.safetensors", "/tmp/outside.safetensors", 7, None)
OUTSIDE = [
    *(("model.safetensors.index.json", {"weight_map": {"a": shard}}) for shard in SHARDS),
    *map(manifest_of, ["../outside", "/etc/hostname", "a/../../outside"]),
]


@pytest.mark.parametrize(("name", "content"), OUTSIDE, ids=str)
def test_paths_out_of_the_checkpoint_are_refused(sources, folder, name, content):
    copy_without_manifest(sources("run"), folder)
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(random_files.CLEAR, match=name):
        resume(folder)


STEPS = {
    "epoch": ("progress.pt", lambda held: held.update(epoch=10**30)),
    "metric": ("progress.pt", lambda held: held["metrics"].update(loss_a=torch.tensor(0.5))),
    "setting": ("progress.pt", lambda held: held["settings"]["accelerator_config"].update(even_batches=torch.ones(2))),
    "flag": ("optimizer.pt", lambda held: held["param_groups"][0].update(amsgrad=1)),
    "moment": ("optimizer.pt", lambda held: held["param_groups"][0].update(amsgrad=True)),
    "two flags": ("optimizer.pt", lambda held: held["param_groups"][0].update(differentiable=True)),
    "rates": ("scheduler.pt", lambda held: held.update(_last_lr=None)),
}


@pytest.mark.parametrize("name", STEPS)
def test_values_that_would_fail_in_training_are_refused(sources, folder, name):
    file, change = STEPS[name]
    copy_without_manifest(sources("run"), folder)
    held = torch.load(folder / file, weights_only=False)
    change(held)
    torch.save(held, folder / file)
    with pytest.raises(DamagedCheckpoint, match=f"{file} does not hold what"):
        resume(folder)


ARGUMENTS = (
    {"output_dir": "out", "learning_rate": 0.1, "max_steps": 3, "logging_steps": 2, "optim": "adamw_torch"}
    | {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "report_to": ["none"], "use_cpu": True, "seed": 7}
    | {"eval_strategy": "steps", "eval_steps": 2, "label_names": ["labels"], "warmup_steps": 0.1, "run_name": "run"}
)
LIGHTNING = {"devices": 1, "async_checkpoint": True, "max_time": {"minutes": 1}}
LIGHTNING |= {"limit_val_batches": 2, "profiler": "simple"}
ACCELERATOR = {"split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True}
FSDP = {"version": 1, "transformer_layer_cls_to_wrap": ["BertLayer"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FSDP |= {"min_num_params": 0, "state_dict_type": "FULL_STATE_DICT", "backward_prefetch": "backward_pre"}
FSDP |= {"cpu_ram_efficient_loading": True, "activation_checkpointing": False, "reshard_after_forward": "full_shard"}
FSDP |= {"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}}
DEEPSPEED = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}}}
DEEPSPEED |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}}
DEEPSPEED |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto"}}}
DEEPSPEED |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "gradient_clipping": "auto"}
DEEPSPEED |= {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}


def parse_arguments(path):
    parser = HfArgumentParser(TrainingArguments)
    (parser.parse_json_file if path.suffix == ".json" else parser.parse_yaml_file)(str(path))


def complete_deepspeed(path):
    args = TrainingArguments("out", use_cpu=True, report_to="none")
    args.deepspeed = str(path)  # afterwards: nobody asks whether DeepSpeed is installed
    make_config(args).complete_with_run_values(args, make_bert(), 10)


#: Kind of file → its contents, and what reads it.
KINDS = {
    "arguments": (ARGUMENTS, parse_arguments),
    "lightning": (LIGHTNING, lambda path: make_trainer("out", lightning_config=str(path))),
    "accelerator": (ACCELERATOR, lambda path: make_trainer("out", accelerator_config=str(path))),
    "fsdp": (FSDP, lambda path: read_fsdp(True, str(path), {})),
    "deepspeed": (DEEPSPEED, complete_deepspeed),
}
FILES = [*(f"{kind}.json" for kind in KINDS), "arguments.yaml", "lightning.yaml", "deepspeed.yaml"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-"])  # made-up devices start no processes
    return tmp_path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["values", "bytes"])
@random_files.with_examples
def test_random_config_files_are_used_or_refused(place, name, way, data):
    content, read = KINDS[name.partition(".")[0]]
    if way == "values":
        text = json.dumps(data.draw(random_files.mutated(content))).encode()  # YAML reads JSON
    else:
        text = data.draw(random_files.scrambled(json.dumps(content).encode()))
    (place / name).write_bytes(text)
    with random_files.accepted_or_refused():
        read(place / name)
    assert set(names_in(place)) <= {name, "out"}


#: Contents that are no mapping of arguments.
ODD = {"deep": b"[" * 1_000, "deeper": b"[" * 10_000, "empty": b"", "zero": b"\x00", "letters": "é".encode() * 3}
ODD |= {"no anchor": b"a: &a [x, x]\nb: *c", "deep keys": b'{"a": 1' * 2_000, "no UTF-8": b'{"devices": "\xff\xfe"}'}


@pytest.mark.parametrize("name", FILES)
def test_config_files_without_a_mapping_are_refused(place, name):
    """Unchanged, the same files are read."""
    content, read = KINDS[name.partition(".")[0]]
    (place / name).write_text(json.dumps(content))
    read(place / name)
    odd = {case: text for case, text in ODD.items() if case != "deeper" or name.endswith("json")}  # YAML takes long
    for case, text in odd.items():
        (place / name).write_bytes(text)
        with pytest.raises(random_files.CLEAR) as refused:
            read(place / name)
        assert case == "empty" or name in str(refused.value)


WORDS = ["", " ", "x" * 200, *"me run .. . checkpoint-2 @ @main / \\ %2e%2e * ~ \0 é".split(" ")]
REFERENCES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "hub:me/run", "hub:me/good"]),
    st.sampled_from(["", "/", "hub:"]),
    st.lists(st.sampled_from(WORDS), max_size=3).map("/".join),
)
STATE = b'{"global_step": 2}'
#: Malicious names of files in a repository.
PATHS = {"../outside": STATE, "checkpoint-2/../../outside": STATE, "/tmp/hftrainer-outside": STATE}
PATHS |= {"checkpoint-2/trainer_state.json": STATE, "a\\..\\b": STATE}


@pytest.fixture
def repos(hub):
    for name, files in (("me/run", PATHS), ("me/good", {"checkpoint-2/trainer_state.json": STATE})):
        hub.repos[name] = Repo(branches={"main": [Commit("made up", files)]})


def files_below(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


@random_files.with_examples
def test_random_references_download_into_the_cache_only(repos, tmp_path, data):
    home = tmp_path / "home" / "hub"
    for reference in data.draw(st.lists(REFERENCES, min_size=5, max_size=5)):
        try:
            found = download_checkpoint(reference, HUB_ARGS)
        except random_files.CLEAR as refused:
            found = refused
        assert TOKEN not in str(found)
        assert isinstance(found, Exception) or os.path.realpath(found).startswith(str(home))
        assert files_below(tmp_path) == files_below(home)
        assert not os.path.exists("/tmp/hftrainer-outside")


@pytest.mark.parametrize(
    "place", ["..", "../..", "checkpoint-2/../../../..", "/", "//", "/tmp", "checkpoint-2//", ".", "a\\..\\.."]
)
def test_reference_that_leads_out_of_the_cache_is_refused(repos, place):
    with pytest.raises(CheckpointNotFound, match="pass 'hub:owner/name'"):
        download_checkpoint(f"hub:me/run/{place}", HUB_ARGS)

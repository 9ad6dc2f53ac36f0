"""What is known of TPUs without torch_xla: when they are chosen, what is refused, and what is to be installed."""

import os
import subprocess
import sys

import pytest
import torch

from hftrainer import Seq2SeqTrainingArguments, TrainingArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.table import check_supported, overridden
from hftrainer.cli.launch import add_options
from hftrainer.parallel import tpu
from hftrainer.parallel.environment import LAUNCHERS, RankInfo, detect
from hftrainer.parallel.fsdp.settings import FsdpSettings, XlaSettings, read_fsdp
from hftrainer.parallel.xla import devices as xla
from hftrainer.trainer_utils import ParallelMode
from tests.support.plug_in_devices import VARIABLES


@pytest.fixture(autouse=True)
def _no_tpu(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tpu, "chips", lambda: 0)


@pytest.fixture
def on_xla(monkeypatch):
    """As if torch_xla were there; torch itself knows the name of its devices."""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(xla, "installed", lambda: True)
    monkeypatch.setattr(xla, "device", lambda: torch.device("xla", 0))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"PJRT_DEVICE": "TPU"}, True),
        ({"PJRT_DEVICE": "CPU"}, True),
        ({"TPU_NAME": "local"}, True),
        ({"TPU_WORKER_ID": "0"}, True),
        ({"PJRT_DEVICE": "TPU", "USE_TORCH_XLA": "0"}, False),
        ({"TPU_NAME": ""}, False),
    ],
)
def test_wanted(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert xla.wanted() == expected


def test_found_on_the_machine(monkeypatch):
    monkeypatch.setattr(tpu, "chips", lambda: 4)
    assert xla.wanted()


def test_device(tmp_path, on_xla):
    args = TrainingArguments(str(tmp_path))
    assert args.device == torch.device("xla", 0)
    assert (args.parallel_mode, args.n_gpu, args.world_size) == (ParallelMode.TPU, 0, 1)
    assert TrainingArguments(str(tmp_path), use_cpu=True).device == torch.device("cpu")


def test_not_without_torch_xla(tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(xla, "installed", lambda: False)
    assert TrainingArguments(str(tmp_path)).device.type != "xla"


def test_never_imported_unasked():
    code = "import hftrainer, sys; hftrainer.TrainingArguments('x').device; assert 'torch_xla' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)


def found(folder, kind=TrainingArguments, **settings) -> str:
    return "\n".join(check_supported(ResolvedArguments(kind(str(folder), **settings))))


def test_cores_without_torch_xla(tmp_path, monkeypatch):
    monkeypatch.setattr(xla, "installed", lambda: False)
    assert "pip install 'hftrainer[tpu]'" in found(tmp_path, tpu_num_cores=8)
    assert "the torch that it needs, 2.9" in found(tmp_path, tpu_num_cores=8)
    assert not found(tmp_path, tpu_num_cores=8, use_cpu=True)


def test_sharding_without_torch_xla(tmp_path, monkeypatch):
    monkeypatch.setattr(xla, "installed", lambda: False)
    said = found(tmp_path, fsdp=True, fsdp_config={"xla": True}, use_cpu=True)
    assert "fsdp_config['xla'] needs a TPU" in said and "pip install 'hftrainer[tpu]'" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tpu_num_cores": 8},
            "this run uses 1 of this machine's cores: start the script with python -m hftrainer run",
        ),
        ({"fp16": True}, "TPUs compute in bfloat16"),
        ({"torch_compile": True}, "XLA already compiles the whole step"),
        ({"fsdp": True}, "uses torch_xla: give fsdp_config={'xla': True} too"),
        ({"fsdp": True, "fsdp_config": {"xla": True, "cpu_offload": True}}, "fsdp_config['cpu_offload']"),
    ],
)
def test_refused(tmp_path, on_xla, settings, message):
    assert message in found(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings", [{}, {"tpu_num_cores": 1}, {"bf16": True}, {"fsdp": True, "fsdp_config": {"xla": True}}]
)
def test_accepted(tmp_path, on_xla, settings):
    assert not found(tmp_path, **settings)


def test_generation_needs_whole_weights(tmp_path, on_xla):
    settings = {"fsdp": True, "fsdp_config": {"xla": True}, "predict_with_generate": True}
    assert "xla_fsdp_v2" in found(tmp_path, Seq2SeqTrainingArguments, **settings)


def test_other_launchers(tmp_path, on_xla, monkeypatch):
    """torchrun's processes would all take the same core."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7",
    }.items():
        monkeypatch.setenv(name, value)
    assert "run --tpu" in found(tmp_path)
    spmd = {"fsdp": True, "fsdp_config": {"xla": True, "xla_fsdp_v2": True}}
    assert "drives all cores from one process" in found(tmp_path, **spmd)


def test_two_cores_in_a_process(tmp_path, on_xla, monkeypatch):
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "4")
    assert detect() == "xla"
    monkeypatch.setattr(xla, "rank_info", lambda: RankInfo(8, 3, 3, 8, launcher="xla"))
    monkeypatch.setattr("hftrainer.arguments.checks.xla.cores_in_this_process", lambda: 2)
    assert "two cores share a process" in found(tmp_path, tpu_num_cores=8)
    assert "run --tpu" in LAUNCHERS["xla"][1]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"xla": True}, XlaSettings()),
        ({"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True}, XlaSettings(spmd=True, grad_ckpt=True)),
        ({"xla": "true", "xla_fsdp_settings": {"a": 1}}, XlaSettings(settings=(("a", 1),))),
        ({"xla": False, "xla_fsdp_v2": False, "xla_fsdp_settings": {}}, None),
    ],
)
def test_settings(config, expected):
    assert read_fsdp(True, config, {}) == FsdpSettings(xla=expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-cores", "8"], "--num-cores is for TPUs: add --tpu"),
        (["--tpu", "--nproc", "2"], "use --tpu or the others"),
        (["--tpu", "--num-cores", "0"], "is not a number >= 1"),
        (["--tpu"], "--tpu needs torch_xla: pip install 'hftrainer[tpu]'"),
    ],
)
def test_wrong_options(options, message, monkeypatch, capsys):
    from hftrainer import __main__ as command

    monkeypatch.setattr(xla, "installed", lambda: False)
    monkeypatch.setattr(sys, "argv", ["hftrainer", "run", *options, __file__])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err
    assert callable(add_options)


def test_metrics_of_no_tpu(tmp_path):
    said = overridden(ResolvedArguments(TrainingArguments(str(tmp_path), debug="tpu_metrics_debug", use_cpu=True)))
    assert said == ["debug='tpu_metrics_debug' prints nothing: training is on cpu, which is not an XLA device."]


class _FakeTensor:
    pass


def test_states_without_xla_tensors_stay():
    state = {"a": torch.ones(2), "b": [torch.zeros(1), (1, "x")], "c": _FakeTensor()}
    moved = xla.to_host(state)
    assert moved["a"] is state["a"] and moved["b"][0] is state["b"][0] and moved["c"] is state["c"]
    assert moved["b"][1] == (1, "x")

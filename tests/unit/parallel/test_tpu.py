"""TPUs, which no test machine has: whether there is one, what is said without a library, and torch_tpu's device."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer import __main__ as command
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.table import check_supported, make_plan
from hftrainer.errors import MissingPackage, UnsupportedArgument
from hftrainer.parallel import tpu
from hftrainer.parallel.xla import devices as xla
from tests.support.plug_in_devices import SECOND, VARIABLES, needs_python_device, run_on_plug_in
from tests.support.tiny import make_plain

UNDEFINED = "_XLAC.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE"


@pytest.fixture(autouse=True)
def _no_tpu(monkeypatch):
    for name in (*VARIABLES, *SECOND, tpu.ADDRESSES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tpu, "chips", lambda: 0)


def make(**settings):
    return TrainingArguments(**{"output_dir": "unused", "report_to": "none", **settings})


def found(**settings) -> str:
    return "\n".join(check_supported(ResolvedArguments(make(**settings))))


# ---- Whether there is one --------------------------------------------------------------------------------------------

count_chips = tpu.chips.__wrapped__


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([], 0),
        ([("0x1ae0", "0x0063")] * 4, 4),  # TPU v5e
        ([("0x1ae0", "0x0027"), ("0x1ae0", "0x0042")], 1),  # TPU v2 and Google's network card
        ([("0x1ae0", "0x0042"), ("0x1ae0", "0x001f")], 0),  # a virtual machine of Google's, without a TPU
        ([("0x10de", "0x2330"), ("0x10de", "0x0063")], 0),  # NVIDIA's
    ],
)
def test_chips(tmp_path, monkeypatch, devices, expected):
    for index, (vendor, device) in enumerate(devices):
        folder = tmp_path / f"0000:00:{index:02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    monkeypatch.setattr(tpu, "_PCI_DEVICES", tmp_path)
    assert count_chips() == expected


@pytest.mark.parametrize(
    ("chips", "variables", "message"),
    [
        (4, {}, "This machine has a TPU, but torch finds none"),
        (0, {"PJRT_DEVICE": "TPU"}, "PJRT_DEVICE=TPU asks for a TPU, but torch finds none"),
        (0, {"PJRT_DEVICE": "CPU"}, None),
        (0, {"TPU_NAME": "of-another-machine"}, None),
        (4, {"USE_TORCH_XLA": "0"}, None),
    ],
)
def test_a_tpu_without_a_library(monkeypatch, chips, variables, message):
    monkeypatch.setattr(tpu, "chips", lambda: chips)
    monkeypatch.setattr(xla, "installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not found(use_cpu=True)
    if message is None:
        assert not found()
        return
    with pytest.raises(UnsupportedArgument, match=message) as raised:
        Trainer(make_plain(), make())
    for part in ("pip install 'hftrainer[tpu]'", "pip install 'hftrainer[torch-tpu]'", "use_cpu=True"):
        assert part in str(raised.value)


def test_torch_xla_for_another_torch(tmp_path, monkeypatch):
    (tmp_path / "torch_xla.py").write_text(f"raise ImportError({UNDEFINED!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(MissingPackage, match=r"undefined symbol.* pip install 'hftrainer\[tpu\]'.* use_cpu=True"):
        Trainer(make_plain(), make())
    Trainer(make_plain(), make(use_cpu=True))


# ---- torch_tpu -------------------------------------------------------------------------------------------------------


@needs_python_device
def test_training_on_torch_tpu(tmp_path, processes):
    """A run on a device with torch_tpu's interface, resumed too, is one on the CPU."""
    found = run_on_plug_in(processes, "tests/support/fake_tpu.py", tmp_path)
    assert found.pop("losses off by") < 1e-6
    assert found.pop("weights off by") < 1e-6
    assert found == {
        "device": "tpu:0",
        "model on": "tpu:0",
        "Lightning's": "tpu",
        "n_gpu": 1,
        "measured": ["train_mem_gpu_alloc_delta", "train_mem_gpu_peaked_delta"],
        "calls": ["empty_cache", "reset_peak_memory_stats", "set_device tpu:0"],
        "random states": ["cpu", "numpy", "python", "tpu"],
        "resumed the same": True,
        "calls of resuming": ["empty_cache", "reset_peak_memory_stats", "set_device tpu:0", "set_state 7"],
    }


class OnTpu(TrainingArguments):
    """Arguments on torch_tpu's device, whose name torch does not know here."""

    _setup_devices = SimpleNamespace(type="tpu", index=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, None),
        ({"bf16": True, "tpu_num_cores": 1}, None),
        ({"torch_compile_backend": "tpu"}, None),
        ({"fp16": True}, "TPUs compute in bfloat16"),
        ({"torch_compile": True}, "set torch_compile_backend='tpu'"),
        ({"tpu_num_cores": 4}, "uses 1 of this machine's cores: start the script with python -m hftrainer run --tpu"),
        ({"fsdp": True}, "this device is tpu: leave out fsdp"),
        ({"lightning_config": {"devices": 2}}, "start the script with python -m hftrainer run --tpu"),
    ],
)
def test_checks(settings, message):
    (*said,) = check_supported(ResolvedArguments(OnTpu("unused", **settings)))
    assert (message is None) == (not said)
    assert message is None or message in said[0]


def test_several_processes(monkeypatch):
    """torchrun alone lacks what all processes of torch_tpu have to know."""
    for name, value in SECOND.items():
        monkeypatch.setenv(name, value)
    resolved = ResolvedArguments(OnTpu("unused"))
    assert (
        "no TPU core of their own: start the script with python -m hftrainer run --tpu" in check_supported(resolved)[0]
    )
    monkeypatch.setenv(tpu.ADDRESSES, "localhost:8070,localhost:8071")
    assert not check_supported(resolved)
    assert make_plan(resolved).process_group_backend == "tpu_dist"


@pytest.mark.parametrize(("options", "processes"), [([], 4), (["--num-cores", "2"], 2)])
def test_run_on_torch_tpu(monkeypatch, options, processes):
    """The variables are set before torchrun starts the processes."""
    monkeypatch.setattr(type(tpu.module), "is_available", lambda self: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setenv(tpu.ADDRESSES, "")  # restores it
    launch_env = SimpleNamespace(
        set_tpu_launch_env=lambda nproc_per_node: os.environ.update({tpu.ADDRESSES: f"{nproc_per_node} addresses"})
    )
    monkeypatch.setattr(torch, "tpu", SimpleNamespace(distributed=launch_env), raising=False)
    started = []
    monkeypatch.setattr(
        "torch.distributed.run.run", lambda args: started.append((args.nproc_per_node, dict(os.environ)))
    )
    monkeypatch.setattr(sys, "argv", ["hftrainer", "run", "--tpu", *options, __file__])
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main()
    ((count, environment),) = started
    assert (count, environment[tpu.ADDRESSES]) == (str(processes), f"{processes} addresses")

"""When TPUs, which no test machine has, are chosen, what is refused, and what has to be installed."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from hftrainer import Trainer, __main__ as command
from hftrainer.arguments.checks.unsupported import find_unused_settings
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import MissingPackage
from hftrainer.parallel import devices
from hftrainer.parallel.environment import LAUNCHERS, RankInfo, detect_launcher
from hftrainer.training_args import ParallelMode
from hftrainer_xla import devices as xla
from tests.support.refusals import assert_refused, make, plan_of, problems
from tests.support.small_models import make_plain

UNDEFINED = "_XLAC.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE"
count_chips = devices.count_tpu_chips.__wrapped__


@pytest.fixture
def no_torch_xla(monkeypatch):
    monkeypatch.setattr(devices, "has_torch_xla", lambda: False)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], 0),
        ([("0x1ae0", "0x0063")] * 4, 4),  # TPU v5e
        ([("0x1ae0", "0x0027"), ("0x1ae0", "0x0042")], 1),  # TPU v2 and Google's network card
        ([("0x1ae0", "0x0042"), ("0x1ae0", "0x001f")], 0),  # a virtual machine of Google's, without a TPU
        ([("0x10de", "0x2330"), ("0x10de", "0x0063")], 0),  # NVIDIA's
    ],
)
def test_tpu_chips_are_counted_by_pci_ids(tmp_path, monkeypatch, found, expected):
    for index, (vendor, device) in enumerate(found):
        folder = tmp_path / f"0000:00:{index:02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    monkeypatch.setattr(devices, "_PCI_DEVICES", tmp_path)
    assert count_chips() == expected


@pytest.mark.parametrize(
    ("chips", "variables", "expected"),
    [
        (0, "", False),
        (4, "", True),
        *((0, variable, True) for variable in "PJRT_DEVICE=TPU PJRT_DEVICE=CPU TPU_NAME=local TPU_WORKER_ID=0".split()),
        (4, "PJRT_DEVICE=TPU USE_TORCH_XLA=0", False),
        (0, "TPU_NAME=", False),
    ],
)
def test_xla_is_requested_by_chips_or_variables(monkeypatch, set_variables, chips, variables, expected):
    monkeypatch.setattr(devices, "count_tpu_chips", lambda: chips)
    set_variables(variables)
    assert devices.is_xla_requested() == expected


def test_xla_device_is_used_without_use_cpu(on_xla):
    args = make()
    assert args.device == torch.device("xla", 0)
    assert (args.parallel_mode, args.n_gpu, args.world_size) == (ParallelMode.TPU, 0, 1)
    assert make(use_cpu=True).device == torch.device("cpu")


XLA, EITHER = "pip install 'hftrainer[tpu]'", ("pip install 'hftrainer[torch-tpu]'", "use_cpu=True")


@pytest.mark.parametrize(
    ("chips", "variables", "settings", "said"),
    [
        (4, "", {}, ("This machine has a TPU, but torch finds none", XLA, *EITHER)),
        (4, "", {"use_cpu": True}, ()),
        (4, "USE_TORCH_XLA=0", {}, ()),
        (0, "PJRT_DEVICE=TPU", {}, ("PJRT_DEVICE=TPU asks for a TPU, but torch finds none", XLA, *EITHER)),
        (0, "PJRT_DEVICE=CPU", {}, ()),
        (0, "TPU_NAME=of-another-machine", {}, ()),
        (0, "", {"tpu_num_cores": 8}, (XLA, "with torch 2.9")),
        (0, "", {"tpu_num_cores": 8, "use_cpu": True}, ()),
        (0, "", {"fsdp": True, "fsdp_config": {"xla": True}, "use_cpu": True}, ("fsdp_config['xla'] needs a TPU", XLA)),
    ],
)
def test_missing_tpu_library_is_named(monkeypatch, set_variables, no_torch_xla, chips, variables, settings, said):
    monkeypatch.setattr(devices, "count_tpu_chips", lambda: chips)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_variables(variables)
    found = "\n".join(problems(**settings))
    assert bool(found) == bool(said) and all(part in found for part in said), found
    assert make(**settings).device.type != "xla"


def test_torch_xla_built_for_another_torch_is_named(tmp_path, monkeypatch):
    (tmp_path / "torch_xla.py").write_text(f"raise ImportError({UNDEFINED!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(MissingPackage, match=r"undefined symbol.* pip install 'hftrainer\[tpu\]'.* use_cpu=True"):
        Trainer(make_plain(), make())
    Trainer(make_plain(), make(use_cpu=True))


def test_run_tpu_without_torch_xla_is_refused(no_torch_xla, capsys):
    with pytest.raises(SystemExit):
        command.main(["run", "--tpu", __file__])
    assert "--tpu needs torch_xla: pip install 'hftrainer[tpu]'" in capsys.readouterr().err


def test_torchrun_alone_is_refused_with_torch_tpu(on_torch_tpu, two_processes, monkeypatch):
    """torchrun alone lacks what all processes of torch_tpu have to know."""
    assert_refused(problems(), "assigned no TPU core to any: start the script with python -m hftrainer run --tpu")
    monkeypatch.setenv(devices.TPU_ADDRESSES, "localhost:8070,localhost:8071")
    assert not problems()
    assert plan_of().process_group_backend == "tpu_dist"


def test_two_tpu_cores_in_a_process_are_refused(on_xla, monkeypatch):
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "4")
    assert detect_launcher() == "xla"
    monkeypatch.setattr(xla, "rank_info", lambda: RankInfo(8, 3, 3, 8, launcher="xla"))
    monkeypatch.setattr(xla, "cores_in_this_process", lambda: 2)
    assert_refused(problems(tpu_num_cores=8), "two cores share a process")
    assert "run --tpu" in LAUNCHERS["xla"][1]


def test_tpu_metrics_debug_warns_without_a_tpu():
    said = find_unused_settings(ResolvedArguments(make(debug="tpu_metrics_debug", use_cpu=True)))
    assert said == ["debug='tpu_metrics_debug' prints nothing: training is on cpu, which is not an XLA device."]


def test_to_host_keeps_tensors_that_are_not_xla():
    state = {"a": torch.ones(2), "b": [torch.zeros(1), (1, "x")], "c": SimpleNamespace()}
    moved = xla.to_host(state)
    assert moved["a"] is state["a"] and moved["b"][0] is state["b"][0] and moved["c"] is state["c"]
    assert moved["b"][1] == (1, "x")


@pytest.mark.parametrize(("options", "processes"), [([], 4), (["--num-cores", "2"], 2)])
def test_run_tpu_sets_variables_before_torchrun_starts(monkeypatch, options, processes):
    """The variables are set before torchrun starts the processes."""

    def set_tpu_launch_env(nproc_per_node):
        os.environ[devices.TPU_ADDRESSES] = f"{nproc_per_node} addresses"

    def run(args):
        started.append((args.nproc_per_node, os.environ[devices.TPU_ADDRESSES]))

    started, launch_env = [], SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env)
    monkeypatch.setattr(type(devices.torch_tpu), "is_available", lambda self: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setenv(devices.TPU_ADDRESSES, "")  # restores it
    monkeypatch.setattr(torch, "tpu", SimpleNamespace(distributed=launch_env), raising=False)
    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(sys, "argv", ["hftrainer", "run", "--tpu", *options, __file__])
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main()
    assert started == [(str(processes), f"{processes} addresses")]

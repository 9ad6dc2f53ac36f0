"""Devices that no test machine has: what is planned for them, with torch told that they are there."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.table import check_supported, make_plan
from hftrainer.data import random_states
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.errors import UnsupportedArgument
from hftrainer.parallel import devices
from hftrainer.parallel.parallelism import Parallelism
from hftrainer_lightning.strategies.precision import precision_plugin
from tests.support.plug_in_devices import SECOND, needs_python_device, run_on_plug_in
from tests.support.releases import TORCH
from tests.support.tiny import make_plain, plain_data

ROOT = Path(__file__).parents[3]
NO_OPERATOR = (
    "The operator 'aten::foo' is not currently implemented for the MPS device. As a temporary fix, you can set the "
    "environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1`"
)

needs_scaler = pytest.mark.skipif(TORCH < (2, 8), reason="torch's GradScaler knows Apple's GPU since 2.8")


@pytest.fixture
def mac(monkeypatch):
    """Apple Silicon with macOS 14."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (14, 0))


@pytest.fixture
def xpu(monkeypatch):
    """Two Intel GPUs."""
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)


@pytest.fixture
def two_processes(monkeypatch):
    for name, value in SECOND.items():
        monkeypatch.setenv(name, value)


def make(**settings):
    return TrainingArguments(**{"output_dir": "unused", "report_to": "none", **settings})


def make_trainer(**settings):
    """A Trainer whose model stays on the CPU, where it can be built."""

    class Arguments(TrainingArguments):
        place_model_on_device = False

    args = Arguments(**{"output_dir": "unused", "report_to": "none", **settings})
    return Trainer(make_plain(), args, train_dataset=plain_data(8))


# ---- Apple's GPU -----------------------------------------------------------------------------------------------------


def test_mps_is_the_default(mac):
    plan = make_plan(ResolvedArguments(args := make()))
    assert (str(args.device), args.n_gpu, args.world_size) == ("mps", 1, 1)
    assert (plan.accelerator, plan.device, plan.trainer_keywords()["devices"]) == ("mps", "mps", 1)
    assert not check_supported(ResolvedArguments(args))
    assert make_plan(ResolvedArguments(make(use_cpu=True))).accelerator == "cpu"


def test_lightning_gets_mps(mac, monkeypatch):
    from lightning.fabric.accelerators import MPSAccelerator as OfFabric
    from lightning.pytorch.accelerators import MPSAccelerator

    monkeypatch.setattr(OfFabric, "is_available", staticmethod(lambda: True))
    trainer = make_trainer(bf16=True)._hftrainer.engine._build_trainer(max_epochs=1)
    assert isinstance(trainer.accelerator, MPSAccelerator)
    assert trainer.strategy.root_device == torch.device("mps")


def test_use_mps_device_where_it_is(mac):
    assert not check_supported(ResolvedArguments(make(use_mps_device=True)))


@pytest.mark.parametrize(
    ("built", "settings", "reason"),
    [
        (False, {}, "this torch was built without MPS"),
        (True, {}, "macOS is too old"),
        (True, {"use_cpu": True}, "use_cpu=True contradicts it"),
    ],
)
def test_use_mps_device_where_it_is_not(monkeypatch, built, settings, reason):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    with pytest.raises(UnsupportedArgument, match=f"use_mps_device=True, but .*{reason}.*leave it out"):
        Trainer(make_plain(), make(use_mps_device=True, **settings))


def test_one_process_on_mps(mac, two_processes):
    (message,) = check_supported(ResolvedArguments(make()))
    assert message.startswith(
        "2 processes are not possible on Apple's GPU: it is one device, and neither gloo nor nccl"
    )
    assert not check_supported(ResolvedArguments(make(use_cpu=True)))


@pytest.mark.parametrize("settings", [{"lightning_config": {"devices": 2}}, {"fsdp": True}])
def test_one_device_on_mps(mac, settings):
    (message,) = check_supported(ResolvedArguments(make(**settings)))
    assert "not possible on Apple's GPU" in message


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), pytest.param("fp16", torch.float16, marks=needs_scaler)]
)
def test_autocast_on_mps(mac, name, dtype):
    plan = make_plan(ResolvedArguments(args := make(**{name: True})))
    assert not check_supported(ResolvedArguments(args))
    seen = []

    class Model(torch.nn.Module):
        def forward(self):
            seen.append((torch.is_autocast_enabled("mps"), torch.get_autocast_dtype("mps")))

    module = SimpleNamespace(model=Model())
    plugin = precision_plugin(plan, scaler := Parallelism(plan).make_scaler())
    plugin.convert_module(module)
    module.model()
    plugin.teardown()
    assert seen == [(True, dtype)]
    assert (scaler is not None) == (name == "fp16")
    assert scaler is None or (scaler._device == "mps" and scaler.is_enabled())


@needs_scaler
@pytest.mark.parametrize("launcher", [False, True])
def test_bf16_needs_macos_14(mac, monkeypatch, launcher):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if launcher else "no")
    (message,) = check_supported(ResolvedArguments(make(bf16=not launcher)))
    assert "needs macOS 14: use fp16=True" in message
    assert not check_supported(ResolvedArguments(make(fp16=True)))


def test_fp16_on_mps_needs_its_scaler(mac, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.7.1"))
    (message,) = check_supported(ResolvedArguments(make(fp16=True)))
    assert "needs torch 2.8" in message


def test_tf32_is_refused_on_mps(mac):
    with pytest.raises(ValueError, match="tf32=True needs an NVIDIA GPU"):
        make_trainer(tf32=True).train()


def test_loaders_on_mps(mac):
    assert not make_trainer().get_train_dataloader().pin_memory
    loader = torch.utils.data.DataLoader(plain_data(8), pin_memory=False)
    config = AcceleratorConfig(non_blocking=True)
    kinds = {
        kind: PreparedDataLoader.from_loader(loader, torch.device(kind), config=config).non_blocking
        for kind in ("mps", "cuda")
    }
    assert kinds == {"mps": False, "cuda": True}


def test_workers_on_mps(mac, monkeypatch):
    assert make(dataloader_num_workers=2).dataloader_multiprocessing_context == "fork"
    assert make(dataloader_num_workers=1).dataloader_multiprocessing_context is None
    given = make(dataloader_num_workers=2, dataloader_multiprocessing_context="spawn")
    assert given.dataloader_multiprocessing_context == "spawn"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert make(dataloader_num_workers=2).dataloader_multiprocessing_context is None


def test_memory_on_mps(mac, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 12)
    devices.empty_cache()
    devices.reset_memory_peak()
    assert emptied == [True]
    assert (devices.memory_used(), devices.memory_peak()) == (12, None)
    trainer = make_trainer(skip_memory_metrics=False)
    trainer.accelerator.free_memory()
    assert emptied == [True, True]
    metrics = {}

    def train():  # a stage goes by the name of the method that calls
        trainer._memory_tracker.start()
        trainer._memory_tracker.stop_and_update_metrics(metrics)

    train()
    assert metrics["train_mem_gpu_alloc_delta"] == 0
    assert {"train_mem_cpu_peaked_delta", "init_mem_gpu_alloc_delta", "before_init_mem_gpu"} <= metrics.keys()
    assert "train_mem_gpu_peaked_delta" not in metrics


def test_random_state_of_mps(monkeypatch, tmp_path):
    restored = []
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([5], dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: restored.append(state.item()))
    random_states._accelerators.cache_clear()
    try:
        random_states.save_rng_state(str(tmp_path / "rng.pth"))
        random_states.load_rng_state(str(tmp_path / "rng.pth"))
    finally:
        random_states._accelerators.cache_clear()
    assert restored == [5]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (NotImplementedError(NO_OPERATOR), "Set PYTORCH_ENABLE_MPS_FALLBACK=1 before Python starts"),
        (
            TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
            "float32",
        ),
        (NotImplementedError("something else"), None),
    ],
)
@pytest.mark.parametrize("call", ["train", "evaluate", "evaluate in train"])
def test_hints(tmp_path, caplog, error, hint, call):
    """An operator that the device lacks, as torch says it: a note of the error, which Python 3.10 does not show."""
    error.__notes__ = []

    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 3)

        def forward(self, x, labels):
            if self.training == (call == "train"):
                raise error
            return {"loss": self.layer(x).square().sum()}

    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "max_steps": 2, "disable_tqdm": True}
    args = make(output_dir=str(tmp_path), use_cpu=True, **settings)
    trainer = Trainer(Broken(), args, train_dataset=plain_data(8), eval_dataset=plain_data(8))
    with pytest.raises(type(error), match=str(error)[:20]):
        trainer.evaluate() if call == "evaluate" else trainer.train()
    assert [note for note in error.__notes__ if hint is None or hint in note] == error.__notes__
    assert len(error.__notes__) == (hint is not None)
    logged = [record.message for record in caplog.records if record.name == "hftrainer.parallel.devices"]
    assert logged == (error.__notes__ if sys.version_info < (3, 11) else [])


# ---- Other accelerators ----------------------------------------------------------------------------------------------


def test_intel(xpu, two_processes):
    args = make()
    plan = make_plan(ResolvedArguments(args))
    assert (str(args.device), args.n_gpu) == ("xpu:1", 1)
    assert (plan.accelerator, plan.device, plan.process_group_backend) == ("xpu", "xpu:1", "xccl")
    assert plan.trainer_keywords()["devices"] == 2
    assert make_plan(ResolvedArguments(make(ddp_backend="ccl"))).process_group_backend == "ccl"
    assert not check_supported(ResolvedArguments(args))
    (message,) = check_supported(ResolvedArguments(make(fsdp=True)))
    assert "sharded and split on CUDA and CPU only, and this device is xpu: leave out fsdp" in message
    assert make_plan(ResolvedArguments(make(use_cpu=True))).process_group_backend is None


def test_lightning_gets_others(xpu):
    trainer = make_trainer(lightning_config={"devices": 1})
    assert trainer.get_train_dataloader().pin_memory
    built = trainer._hftrainer.engine._build_trainer(max_epochs=1)
    assert (built.accelerator.name(), built.strategy.root_device) == ("xpu", torch.device("xpu:0"))


def test_python_alone_starts_a_process_for_each(xpu, monkeypatch):
    # accelerate's launcher sets it; transformers did too until v5, for whoever makes its arguments, as other tests do.
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert make().world_size == 2
    assert not make_plan(ResolvedArguments(make())).processes.started


def test_more_processes_than_devices(xpu, two_processes, monkeypatch):
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    (message,) = check_supported(ResolvedArguments(make()))
    assert "2 processes on this node need one GPU each, but there are 1" in message


@pytest.mark.parametrize("name", ["hpu", "sdaa", "neuron"])
def test_refused_accelerators(monkeypatch, name):
    monkeypatch.setattr(torch, name, SimpleNamespace(is_available=lambda: True), raising=False)
    with pytest.raises(UnsupportedArgument, match=f"torch.{name} is available, but hftrainer cannot .* use_cpu=True"):
        Trainer(make_plain(), make())
    assert not check_supported(ResolvedArguments(make(use_cpu=True)))


@needs_python_device
def test_training_on_a_plug_in(tmp_path, processes):
    """A run on torch's plug-in device, resumed too, is one on the CPU; the device is made of Python."""
    found = run_on_plug_in(processes, "tests/support/fake_npu.py", tmp_path)
    assert found.pop("losses off by") < 1e-6
    assert found.pop("weights off by") < 1e-6
    assert found.pop("scaled losses off by") < 1e-3
    assert found == {
        "device": "npu:0",
        "model on": "npu:0",
        "Lightning's": "npu",
        "n_gpu": 1,
        "measured": ["train_mem_gpu_alloc_delta", "train_mem_gpu_peaked_delta"],
        "calls": ["empty_cache", "reset_peak_memory_stats", "set_device npu:0"],
        "random states": ["cpu", "npu", "numpy", "python"],
        "resumed the same": True,
        "calls of resuming": ["empty_cache", "reset_peak_memory_stats", "set_device npu:0", "set_rng_state 7"],
        "scale": 65536.0,
    }


# ---- How processes communicate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("gloo", None),
        ("GLOO", None),
        ("cpu:gloo", None),
        ("mpi", "has no 'mpi' (it needs torch built from source with MPI): use 'gloo', or leave it out."),
        ("nccl", "has no 'nccl' (it comes with torch for CUDA or ROCm): use 'gloo'"),
        ("cpu:gloo,cuda:nccl", "has no 'nccl'"),
        ("xccl", "has no 'xccl' (it comes with torch for Intel GPUs)"),
        (
            "ccl",
            "has no 'ccl' (the script must import oneccl_bindings_for_pytorch, which Intel has replaced by 'xccl')",
        ),
        ("smddp", "has no 'smddp' (the script must import smdistributed.dataparallel.torch.torch_smddp"),
        ("hccl", "has no 'hccl' (it comes with torch_npu)"),
        ("cncl", "has no 'cncl' (it comes with torch_mlu)"),
        ("mccl", "has no 'mccl' (it comes with torch_musa)"),
        ("glo", "no backend is called 'glo' (did you mean 'gloo'?): use 'gloo'"),
        ("carrier pigeon", "no backend is called 'carrier pigeon': use 'gloo'"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_backends_on_the_cpu(two_processes, monkeypatch, backend, message, old):
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: False)
    args = make(use_cpu=True, **{"xpu_backend" if old else "ddp_backend": backend})
    assert make_plan(ResolvedArguments(args)).process_group_backend == backend
    found = check_supported(ResolvedArguments(args))
    assert len(found) == (message is not None)
    if message:
        assert found[0].startswith(f"ddp_backend={backend!r}: ")
        assert message in found[0]


def test_a_backend_for_another_device(two_processes, xpu, monkeypatch):
    for name in ("mpi", "nccl", "xccl"):
        monkeypatch.setattr(torch.distributed, f"is_{name}_available", lambda: True)
    assert check_supported(ResolvedArguments(make(use_cpu=True, ddp_backend="nccl"))) == [
        "ddp_backend='nccl' does not connect processes on cpu: use 'gloo', or leave it out."
    ]
    assert not check_supported(ResolvedArguments(make(use_cpu=True, ddp_backend="mpi")))
    assert not check_supported(ResolvedArguments(make(ddp_backend="xccl")))
    (message,) = check_supported(ResolvedArguments(make(ddp_backend="gloo")))
    assert message == "ddp_backend='gloo' does not connect processes on xpu: use 'xccl', or leave it out."


def test_one_process_needs_no_backend():
    assert not check_supported(ResolvedArguments(make(use_cpu=True, ddp_backend="nccl")))
    assert "did you mean 'nccl'" in check_supported(ResolvedArguments(make(use_cpu=True, ddp_backend="ncl")))[0]


def test_a_backend_of_the_users_own(two_processes, monkeypatch):
    backend = torch.distributed.Backend
    monkeypatch.setattr(backend, "backend_list", [*backend.backend_list, "smoke"])
    monkeypatch.setitem(backend.backend_capability, "smoke", ["cpu"])
    assert not check_supported(ResolvedArguments(make(use_cpu=True, ddp_backend="smoke")))

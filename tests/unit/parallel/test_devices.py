"""What is planned for devices that no test machine has, while torch is made to report them."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils import backend_registration

from hftrainer import Trainer, TrainingArguments
from hftrainer.data import randomness
from hftrainer.parallel import devices
from hftrainer.strategies.ddp import DdpStrategy
from hftrainer_lightning.precision import make_precision_plugin
from tests.support.processes import ROOT
from tests.support.refusals import assert_refused, make, plan_of, problems
from tests.support.releases import TORCH
from tests.support.small_models import make_plain, plain_data

NO_OPERATOR = (
    "The operator 'aten::foo' is not currently implemented for the MPS device. As a temporary fix, you can set the "
    "environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1`"
)
NO_DOUBLE = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
needs_scaler = pytest.mark.skipif(TORCH < (2, 8), reason="torch's GradScaler knows Apple's GPU since 2.8")
FLOAT16 = pytest.param("fp16", torch.float16, marks=needs_scaler)


class OnCpu(TrainingArguments):
    place_model_on_device = False


def make_trainer(**settings):
    return Trainer(make_plain(), make(OnCpu, **settings), train_dataset=plain_data(8))


def test_lightnings_trainer_gets_the_mps_accelerator(mac, monkeypatch):
    from lightning.fabric.accelerators import MPSAccelerator as OfFabric
    from lightning.pytorch.accelerators import MPSAccelerator

    plan = plan_of(args := make())
    assert (str(args.device), args.n_gpu, args.world_size) == ("mps", 1, 1)
    assert (plan.device, plan.trainer_keywords()["devices"]) == ("mps", 1)
    assert plan_of(use_cpu=True).device == "cpu"
    monkeypatch.setattr(OfFabric, "is_available", staticmethod(lambda: True))
    trainer = make_trainer(bf16=True)._hftrainer.engine._make_pl_trainer(max_epochs=1)
    assert isinstance(trainer.accelerator, MPSAccelerator)
    assert trainer.strategy.root_device == torch.device("mps")


@pytest.mark.parametrize(
    ("built", "settings", "reason"),
    [
        (False, {}, "this torch was built without MPS"),
        (True, {}, "macOS is too old"),
        (True, {"use_cpu": True}, "use_cpu=True contradicts it"),
    ],
)
def test_use_mps_device_without_mps_is_refused(monkeypatch, built, settings, reason):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    (message,) = problems(use_mps_device=True, **settings)
    assert message.startswith("use_mps_device=True, but ") and reason in message and "remove it to train" in message


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), FLOAT16])
def test_mixed_precision_on_mps_uses_its_autocast(mac, name, dtype):
    assert not problems(**{name: True})
    plan, seen = plan_of(**{name: True}), []

    class Model(torch.nn.Module):
        def forward(self):
            seen.append((torch.is_autocast_enabled("mps"), torch.get_autocast_dtype("mps")))

    module = SimpleNamespace(model=Model())
    plugin = make_precision_plugin(plan, scaler := DdpStrategy(plan).make_scaler())
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
    assert_refused(problems(bf16=not launcher), "needs macOS 14: use fp16=True")
    assert not problems(fp16=True)


def test_fp16_on_mps_needs_torch_2_8(mac, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.7.1"))
    assert_refused(problems(fp16=True), "needs torch 2.8")


def test_tf32_is_refused_on_mps(mac):
    with pytest.raises(ValueError, match="tf32=True needs an NVIDIA GPU"):
        make_trainer(tf32=True).train()


def test_loaders_on_mps_do_not_pin_memory(mac):
    assert not make_trainer().get_train_dataloader().pin_memory


@pytest.mark.parametrize(
    ("available", "settings", "context"),
    [
        (True, {"dataloader_num_workers": 2}, "fork"),
        (True, {"dataloader_num_workers": 1}, None),
        (True, {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "spawn"}, "spawn"),
        (False, {"dataloader_num_workers": 2}, None),
    ],
)
def test_several_loading_processes_on_mps_are_forked(mac, monkeypatch, available, settings, context):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)
    assert make(**settings).dataloader_multiprocessing_context == context


def test_popped_memory_peak_still_counts_for_the_stage(monkeypatch):
    """`observe` asks for the peak of each interval; the memory report and the summary for that of a whole stage."""
    module = SimpleNamespace(peak=0)
    module.max_memory_allocated = lambda: module.peak
    module.reset_peak_memory_stats = lambda: setattr(module, "peak", 0)
    monkeypatch.setattr(devices, "_module_in_use", lambda: module)
    devices.reset_memory_peak()
    module.peak = 7
    assert (devices.memory_peak(), devices.pop_memory_peak(), devices.memory_peak()) == (7, 7, 7)
    module.peak = 3
    assert (devices.pop_memory_peak(), devices.memory_peak()) == (3, 7)
    devices.reset_memory_peak()
    assert devices.memory_peak() == 0


def test_memory_metrics_on_mps_have_no_peak(mac, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 12)
    devices.empty_cache()
    devices.reset_memory_peak()
    assert emptied == [True]
    assert (devices.used_memory(), devices.memory_peak()) == (12, None)
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


def test_random_state_of_mps_is_saved_and_restored(monkeypatch, tmp_path):
    restored = []
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([5], dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: restored.append(state.item()))
    monkeypatch.setattr(randomness, "_accelerators", randomness._accelerators.__wrapped__)  # without its cache
    torch.save(randomness.rng_state(), tmp_path / "rng.pth")
    randomness.load_rng_file(str(tmp_path / "rng.pth"))
    assert restored == [5]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (NotImplementedError(NO_OPERATOR), "Set PYTORCH_ENABLE_MPS_FALLBACK=1 before Python starts"),
        (TypeError(NO_DOUBLE), "float32"),
        (NotImplementedError("something else"), None),
    ],
)
@pytest.mark.parametrize("call", ["train", "evaluate", "evaluate in train"])
def test_operator_missing_on_mps_gets_a_hint(tmp_path, caplog, error, hint, call):
    """The hint is a note of the error; Python 3.10 does not show notes, so there it is logged."""
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
    notes = [note for note in error.__notes__ if not note.startswith(("This happened", "(The engine's"))]
    assert [hint in note for note in notes] == ([] if hint is None else [True])
    logged = [record.message for record in caplog.records if record.name == "hftrainer.base.tracebacks"]
    assert logged == (error.__notes__ if sys.version_info < (3, 11) else [])


def test_intel_gpus_are_planned_with_xccl(xpu, two_processes, monkeypatch):
    plan = plan_of(args := make())
    assert (str(args.device), args.n_gpu) == ("xpu:1", 1)
    assert (plan.device, plan.process_group_backend) == ("xpu:1", "xccl")
    assert plan.trainer_keywords()["devices"] == 2
    assert plan_of(ddp_backend="ccl").process_group_backend == "ccl"
    assert plan_of(use_cpu=True).process_group_backend is None
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    assert_refused(problems(), "2 processes on this node need one GPU each, but there are 1")


def test_lightnings_trainer_gets_the_xpu_accelerator(xpu):
    trainer = make_trainer(lightning_config={"devices": 1})
    assert trainer.get_train_dataloader().pin_memory
    built = trainer._hftrainer.engine._make_pl_trainer(max_epochs=1)
    assert (built.accelerator.name(), built.strategy.root_device) == ("xpu", torch.device("xpu:0"))


def test_one_process_is_started_for_each_intel_gpu(xpu, monkeypatch):
    # accelerate's launcher sets it; transformers did too until v5, for whoever makes its arguments, as other tests do.
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert make().world_size == 2
    assert not plan_of().processes.started


@pytest.mark.parametrize("name", ["hpu", "sdaa", "neuron"])
def test_unsupported_accelerator_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch, name, SimpleNamespace(is_available=lambda: True), raising=False)
    (message,) = problems()
    assert message.startswith(f"torch.{name} is available, but hftrainer cannot ") and "use_cpu=True" in message
    assert not problems(use_cpu=True)


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no device made of Python",
)
@pytest.mark.parametrize(("name", "restores"), [("npu", "set_rng_state 7"), ("tpu", "set_state 7")])
def test_training_on_a_plug_in_device_matches_the_cpu(tmp_path, processes, name, restores):
    """A run on torch's plug-in device or one with torch_tpu's interface, resumed too, is one on the CPU."""
    done = processes.run(f"tests/support/fake_{name}.py", tmp_path, cwd=ROOT, fresh=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name_of_numbers in ("losses", "filtered losses", "weights"):
        assert found.pop(f"{name_of_numbers} off by") < 1e-6
    if name == "npu":
        assert found.pop("scaled losses off by") < 1e-3
        assert found.pop("scale") == 65536.0
    calls = ["empty_cache", "reset_peak_memory_stats", f"set_device {name}:0"]
    assert found == {
        **{"device": f"{name}:0", "model on": f"{name}:0", "Lightning's": name, "n_gpu": 1, "calls": calls},
        "measured": ["train_mem_gpu_alloc_delta", "train_mem_gpu_peaked_delta"],
        "random states": sorted(["cpu", "numpy", "python", name]),
        "resumed the same": True,
        "calls of resuming": [*calls, restores],
    }

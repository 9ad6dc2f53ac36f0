"""An Ascend NPU made of the CPU: torch's own hooks for plug-ins, and each operator computed on a CPU tensor.

`python tests/support/fake_npu.py FOLDER` trains on it and on the CPU, and prints what was found as JSON.
"""

import json
import math
import sys
from pathlib import Path

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

#: tests/support/fake_tpu.py sets another name.
NAME = "npu"
CALLS: list[str] = []


class NpuModule(backend_registration._DummyBackendModule):
    """`torch.npu`: as much of `torch.cuda` as torch's plug-ins have."""

    def set_device(self, device):
        CALLS.append(f"set_device {device}")

    def empty_cache(self):
        CALLS.append("empty_cache")

    def memory_allocated(self):
        return sum(tensor.nbytes for tensor in HELD.values())

    max_memory_allocated = memory_allocated

    def reset_peak_memory_stats(self):
        CALLS.append("reset_peak_memory_stats")

    def get_rng_state(self):
        return torch.tensor([7], dtype=torch.uint8)

    def set_rng_state(self, state):
        CALLS.append(f"set_rng_state {state.item()}")

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


#: Storages on the device → the CPU tensors that hold their numbers. Nothing is removed, since runs are short.
HELD: dict[int, torch.Tensor] = {}


def _key(tensor):
    return tensor.untyped_storage()._cdata


def _is_here(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _to_host(value):
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == NAME else value
    return HELD[_key(value)] if _is_here(value) else value


def _to_device(tensor):
    made = torch._C._acc.create_empty_tensor(tensor.shape, tensor.dtype)
    HELD[_key(made)] = tensor.detach().contiguous()  # as those on the device say that they are
    return made


def _compute(operator, *args, **kwargs):
    inputs = {id(_to_host(value)): value for value in tree_leaves((args, kwargs)) if _is_here(value)}
    host_args, host_kwargs = tree_map(_to_host, (args, kwargs))
    result = operator(*host_args, **host_kwargs)

    def back(value):  # what was changed in place stays the tensor that it was
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in inputs:
            return _to_device(value)
        if inputs[id(value)].shape != value.shape:  # an out= that was empty
            inputs[id(value)].data = _to_device(value)
        return inputs[id(value)]

    return tree_map(back, result)


def _copy_from(source, target, non_blocking=False):
    _to_host(target).copy_(_to_host(source))
    return target


class Storage:
    """What `torch.save` asks of a storage; those on the device are empty."""

    cpu_of_others, nbytes_of_others = torch.UntypedStorage.cpu, torch.UntypedStorage.nbytes

    def cpu(self):
        here = self.device.type == NAME
        return HELD[self._cdata].clone().contiguous().untyped_storage() if here else Storage.cpu_of_others(self)

    def nbytes(self):
        return HELD[self._cdata].nbytes if self.device.type == NAME else Storage.nbytes_of_others(self)


def plug_in(name: str, module: backend_registration._DummyBackendModule) -> list[torch.library.Library]:
    """Make `torch.npu` and its operators, or those of another name; they last as long as what is returned."""
    global NAME
    NAME = name
    backend_registration._setup_privateuseone_for_python_backend(name, module)
    fallback, autocast, copy = (torch.library.Library(name, "IMPL") for name in ("_", "_", "aten"))
    fallback.fallback(_compute, "PrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # it rounds nothing
    copy.impl("_copy_from", _copy_from, "PrivateUse1")
    torch.UntypedStorage.cpu, torch.UntypedStorage.nbytes = Storage.cpu, Storage.nbytes
    return [fallback, autocast, copy]


def main(folder: Path, fp16: bool = True) -> None:
    """Train on both devices, also with an infinite loss; resume on the plug-in, and train there with a scaled loss."""
    from hftrainer import Trainer, TrainingArguments
    from tests.support.small_models import make_plain, plain_data

    class InfiniteOnce(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            return loss + math.inf if self.state.global_step == 1 else loss  # the gradients stay finite

    def run(name, checkpoint=None, trainer_class=Trainer, **settings):
        settings = {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "torch_empty_cache_steps": 2, **settings}
        settings |= {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
        args = TrainingArguments(str(folder / name), skip_memory_metrics=False, **settings)
        model = make_plain()
        model.layers[3].p = 0.0  # the device draws no random numbers
        trainer = trainer_class(model, args, train_dataset=plain_data(), eval_dataset=plain_data(8))
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        losses.append(trainer.evaluate()["eval_loss"])
        return trainer, metrics, torch.tensor(losses), torch.cat([each.cpu().flatten() for each in model.parameters()])

    trainer, metrics, losses, weights = run(NAME)
    found = {
        "device": str(trainer.args.device),
        "model on": str(next(trainer.model.parameters()).device),
        "Lightning's": trainer._hftrainer.engine.pl_trainer.accelerator.name(),
        "n_gpu": trainer.args.n_gpu,
        "measured": sorted(name for name in metrics if name.startswith("train_mem_gpu")),
        "calls": sorted(set(CALLS)),
        "random states": sorted(torch.load(folder / NAME / "checkpoint-3" / "rng_state.pth", weights_only=False)),
    }
    *_, on_cpu, cpu_weights = run("cpu", use_cpu=True)
    found["losses off by"] = float((losses - on_cpu).abs().max())
    found["weights off by"] = float((weights - cpu_weights).abs().max())
    bad = {"trainer_class": InfiniteOnce, "logging_steps": 3}
    *_, filtered, _ = run("filtered", **bad)
    *_, filtered_on_cpu, _ = run("filtered on the CPU", use_cpu=True, **bad)
    found["filtered losses off by"] = float((filtered - filtered_on_cpu).abs().max())
    CALLS.clear()
    found["resumed the same"] = torch.equal(run(NAME, str(folder / NAME / "checkpoint-3"))[3], weights)
    found["calls of resuming"] = sorted(set(CALLS))
    if fp16:
        half, _, half_losses, _ = run("half", fp16=True)
        found["scale"] = half.accelerator.scaler.get_scale()
        found["scaled losses off by"] = float((half_losses - losses).abs().max())
    print(json.dumps(found))


if __name__ == "__main__":
    kept = plug_in(NAME, NpuModule())
    main(Path(sys.argv[1]))

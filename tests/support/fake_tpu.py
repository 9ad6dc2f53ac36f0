"""torch_tpu made of the CPU, as tests/support/fake_npu.py makes an NPU: what `torch.tpu` refuses is refused here.

`python tests/support/fake_tpu.py FOLDER` trains on it and on the CPU, and prints what was found as JSON.
"""

import functools
import sys
from pathlib import Path

import torch
from torch.utils import backend_registration

from tests.support import fake_npu


def internal(function):
    """As torch_tpu 0.2 has it: only torch may call the function."""

    @functools.wraps(function)
    def wrapper(*args):
        if sys._getframe(1).f_globals["__name__"].split(".")[0] != "torch":
            raise RuntimeError(
                f"{function.__name__} is internal to TorchTPU and can only be called by the PyTorch framework"
            )
        return function(*args)

    return wrapper


class Generator:
    """The generator of the device, as far as checkpoints use it."""

    def get_state(self):
        return torch.tensor([7], dtype=torch.uint8)

    def set_state(self, state):
        fake_npu.CALLS.append(f"set_state {state.item()}")


class TpuModule(backend_registration._DummyBackendModule):
    """`torch.tpu`, which has no functions for memory."""

    default_generators = (Generator(),)
    current_device = internal(backend_registration._DummyBackendModule.current_device)
    device_count = internal(backend_registration._DummyBackendModule.device_count)
    is_available = internal(backend_registration._DummyBackendModule.is_available)

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class Accelerator(fake_npu.NpuModule):
    """What `torch.accelerator` asks of torch_tpu's own C++."""

    set_device_index = fake_npu.NpuModule.set_device

    def current_device_index(self):
        return 0


if __name__ == "__main__":
    kept = fake_npu.plug_in("tpu", TpuModule())
    of_cpp = "current_device_index set_device_index empty_cache memory_allocated max_memory_allocated"
    for name in (*of_cpp.split(), "reset_peak_memory_stats"):
        setattr(torch.accelerator, name, getattr(Accelerator(), name))
    fake_npu.main(Path(sys.argv[1]), fp16=False)

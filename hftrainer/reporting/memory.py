"""The memory report: the memory that each stage of a Trainer allocated, and its peak above that."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from typing import Any

from hftrainer.errors import MissingPackage, cause_if_installed
from hftrainer.parallel import devices

#: Method of the Trainer → the name of its stage in the metrics.
STAGES = {
    "__init__": "init",
    "train": "train",
    "_inner_training_loop": "train",
    "_finalize_training": "train",
    "_final_metrics": "train",
    "evaluate": "eval",
    "predict": "test",
}


class TrainerMemoryTracker:
    """Measures this process's resident memory, and torch's GPU memory, over the stages of a Trainer.

    Metrics are in bytes: `{stage}_mem_cpu_alloc_delta` is the memory that a stage added, `{stage}_mem_cpu_peaked_delta`
    its peak above that; the same with `gpu`. A nested stage (evaluation during training) counts as part of the outer
    one. A thread samples the CPU peak, so it may miss a short peak.

    Args:
        skip_memory_metrics: disable all measurements.

    Raises:
        ImportError: if psutil, which reads the memory, is not installed.
    """

    def __init__(self, skip_memory_metrics: bool = False) -> None:
        self.skip_memory_metrics = skip_memory_metrics
        self.stage: str | None = None
        self._init: tuple[dict[str, int], dict[str, int]] = {}, {}
        if skip_memory_metrics:
            return
        try:
            import psutil
        except ImportError as error:
            raise MissingPackage("skip_memory_metrics=False needs `pip install psutil`") from cause_if_installed(error)
        self._process = psutil.Process()

    def start(self) -> None:
        """Start the stage of the calling method, unless another stage is active."""
        if self.skip_memory_metrics or self.stage is not None:
            return
        self.stage = self._calling_stage()
        gc.collect()
        devices.reset_memory_peak()
        self._begin = self._used()
        self._peak = self._begin["cpu"]
        self._stop_watching = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """End the stage of the calling method, and add its measurements to `metrics`."""
        if self.skip_memory_metrics or self.stage != self._calling_stage():
            return
        self._stop_watching.set()
        self._watcher.join()
        gc.collect()
        end = self._used()
        peaks = {"cpu": self._peak, "gpu": devices.memory_peak()}
        stage, self.stage = self.stage, None
        stage_metrics: dict[str, int] = {}
        for kind, used_bytes in end.items():
            stage_metrics[f"{stage}_mem_{kind}_alloc_delta"] = used_bytes - self._begin[kind]
            if (peak := peaks[kind]) is not None:
                stage_metrics[f"{stage}_mem_{kind}_peaked_delta"] = max(0, peak - used_bytes)
        # `__init__` has no metrics, so the first stage with metrics reports its memory.
        if stage == "init":
            self._init = stage_metrics, {f"before_init_mem_{kind}": self._begin[kind] for kind in end}
        elif metrics is not None:
            (init, before_init), self._init = self._init, ({}, {})
            metrics.update({**init, **stage_metrics, **before_init})

    def _calling_stage(self) -> str:
        caller = inspect.currentframe().f_back.f_back.f_code.co_name  # type: ignore[union-attr]
        if caller not in STAGES:
            raise ValueError(f"{caller} is not a stage of the memory report: call this from one of {', '.join(STAGES)}")
        return STAGES[caller]

    def _used(self) -> dict[str, int]:
        used = {"cpu": self._process.memory_info().rss}
        if (device_bytes := devices.used_memory()) is not None:
            used["gpu"] = device_bytes
        return used

    def _watch(self) -> None:
        while not self._stop_watching.wait(0.002):
            self._peak = max(self._peak, self._process.memory_info().rss)


def peak_process_memory() -> int:
    """The peak memory of this process, in bytes; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

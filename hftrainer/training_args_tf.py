"""`TFTrainingArguments`: the arguments of `TFTrainer` (transformers 4.0 to 4.57)."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from hftrainer.arguments.fields.argument import arg
from hftrainer.errors import UnsupportedArgument
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)

_CLOUD_TPU = "refused: use `python -m hftrainer run --tpu` on the TPU's own machine"


class NoOpStrategy:
    """A `tf.distribute.Strategy` whose methods do nothing, since Lightning places the model.

    Attributes:
        num_replicas_in_sync: the number of processes.
    """

    def __init__(self, replicas: int) -> None:
        self.num_replicas_in_sync = replicas

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """An empty context."""
        return contextlib.nullcontext()

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        """The dataset, unchanged: each process selects its rows of each batch."""
        return dataset


@dataclass
class TFTrainingArguments(TrainingArguments):
    """`TrainingArguments` for `TFTrainer`. Training uses torch on Lightning, so all arguments apply.

    Raises:
        UnsupportedArgument: for `tpu_name`, `tpu_zone` and `gcp_project`.
    """

    framework = "tf"
    tpu_name: str | None = arg(None, "Name of a Cloud TPU.", "4.0", _CLOUD_TPU)
    tpu_zone: str | None = arg(None, "Zone of the Cloud TPU.", "4.0", _CLOUD_TPU)
    gcp_project: str | None = arg(None, "Project of the Cloud TPU.", "4.0", _CLOUD_TPU)
    poly_power: float = arg(1.0, "Power of the polynomial decay of the learning rate.", "4.0")
    xla: bool = arg(False, "Compile the model; sets torch_compile.", "4.0")

    def __post_init__(self) -> None:
        tpu_arguments = [name for name in ("tpu_name", "tpu_zone", "gcp_project") if getattr(self, name)]
        if tpu_arguments:
            raise UnsupportedArgument(
                f"{', '.join(tpu_arguments)}: TensorFlow connects to a TPU over the network, but torch_xla runs on the "
                "TPU's machine. Omit these arguments and start the script there: python -m hftrainer run --tpu SCRIPT."
            )
        if self.xla:
            self.torch_compile = True
        super().__post_init__()
        _hide_gpus_from_tensorflow()

    @property
    def n_replicas(self) -> int:
        """The number of processes."""
        return self.world_size

    @property
    def strategy(self) -> NoOpStrategy:
        """A strategy whose `scope()` is empty."""
        return NoOpStrategy(self.n_replicas)

    @property
    def train_batch_size(self) -> int:
        """Samples per micro-batch over all processes; in `TrainingArguments`, of one process."""
        return super().train_batch_size * self.n_replicas

    @property
    def eval_batch_size(self) -> int:
        """Samples per evaluation batch over all processes; in `TrainingArguments`, of one process."""
        return super().eval_batch_size * self.n_replicas

    @property
    def n_gpu(self) -> int:
        """The old name of `n_replicas`."""
        warnings.warn("TFTrainingArguments.n_gpu is now n_replicas", FutureWarning, stacklevel=2)
        return self.n_replicas


def _hide_gpus_from_tensorflow() -> None:
    """Hide the GPUs from TensorFlow, which would reserve all their memory, if the script uses it."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not hasattr(tensorflow, "config"):
        return
    try:
        tensorflow.config.set_visible_devices([], "GPU")
    except RuntimeError as error:
        logger.warning("TensorFlow already uses the GPUs and may have reserved their memory: %s", error)

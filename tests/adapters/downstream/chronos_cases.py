"""Chronos-2: forecasters trained with evaluations and saves, saved, and resumed; and its pipeline's own `fit`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chronos import Chronos2Pipeline
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.config import Chronos2CoreConfig
from chronos.chronos2.dataset import Chronos2Dataset, DatasetMode
from chronos.chronos2.trainer import Chronos2Trainer
from transformers import TrainerCallback, TrainingArguments

from tests.adapters.downstream import full_run, records

AHEAD = 4
SIZES = {"context_length": 16, "prediction_length": AHEAD, "batch_size": 4}


def model() -> Chronos2Model:
    torch.manual_seed(1)
    return Chronos2Model(
        Chronos2CoreConfig(
            **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
            chronos_config={
                **dict.fromkeys(("input_patch_size", "input_patch_stride", "output_patch_size"), 4),
                **{"context_length": 16, "quantiles": [number / 10 for number in range(1, 10)]},
                **{"use_reg_token": True, "use_arcsinh": True, "max_output_patches": 2},
            },
        )
    )


def series(count: int) -> list[dict[str, np.ndarray]]:
    return [{"target": np.sin(np.arange(40 + index, dtype=np.float32) / (index + 2)) + index} for index in range(count)]


def live(folder: Path, **settings: Any) -> dict[str, Any]:
    def build(name: str) -> Chronos2Trainer:
        train = Chronos2Dataset(series(6), **SIZES, output_patch_size=4, min_past=4, mode=DatasetMode.TRAIN)
        held_out = Chronos2Dataset(series(5), **SIZES, output_patch_size=4, mode=DatasetMode.VALIDATION)
        return Chronos2Trainer(
            model=model(),
            args=TrainingArguments(
                str(folder / name),
                **{**full_run.SETTINGS, "label_names": ["future_target"], "prediction_loss_only": True, **settings},
            ),
            train_dataset=train,
            eval_dataset=held_out,
        )

    return full_run.record(build, folder, alike=False)


class Witness(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state = state


def fit(folder: Path, **more: Any) -> dict[str, Any]:
    """The record of `Chronos2Pipeline.fit` with a validation set: the best checkpoint is forecast with."""
    witness = Witness()
    fitted = Chronos2Pipeline(model()).fit(
        series(6),
        validation_inputs=series(5),
        output_dir=folder,
        callbacks=[witness],
        **{**SIZES, "min_past": 4, "learning_rate": 1e-2, "num_steps": 6},
        **{"logging_steps": 1, "eval_steps": 2, "save_steps": 2, "disable_tqdm": True, **more},
    )
    forecast = fitted.predict([one["target"] for one in series(3)], prediction_length=AHEAD)
    return {
        "log_history": records.plain(witness.state.log_history),
        "weights": records.weights(fitted.model),
        "files": records.files(folder),
        "forecast": records.plain(forecast),
    }


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "trainer": live,
    "trainer_best_at_end": functools.partial(live, load_best_model_at_end=True),
    "fit": fit,
    "fit_lora": functools.partial(fit, finetune_mode="lora"),
}

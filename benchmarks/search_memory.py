"""Resident memory after each of 30 trials of a search on the digits example: `make bench BENCH=search_memory`.

Fails when the 30th has more than 5 % more than the 5th.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import optuna
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from digits_vit import accuracy, make_datasets, make_model

from hftrainer import PrinterCallback, Trainer, TrainingArguments


def space(trial: optuna.Trial) -> dict:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [16, 32, 64]),
        "gradient_accumulation_steps": trial.suggest_int("gradient_accumulation_steps", 1, 2),
        "optim": trial.suggest_categorical("optim", ["adamw_torch", "sgd"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=30, help="how many (default %(default)s)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(logging.WARNING)
    train, validation, _ = make_datasets()
    resident: list[float] = []

    def note(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        resident.append(psutil.Process().memory_info().rss / 2**20)
        print(f"trial {len(resident):2}: {resident[-1]:7.1f} MiB  {trial.state.name.lower()}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch", disable_tqdm=True, use_cpu=True
        )
        trainer = Trainer(
            model_init=make_model, args=args, train_dataset=train, eval_dataset=validation, compute_metrics=accuracy
        )
        trainer.remove_callback(PrinterCallback)
        best = trainer.hyperparameter_search(space, n_trials=options.trials, direction="maximize", callbacks=[note])
    growth = resident[-1] / resident[min(4, len(resident) - 1)] - 1
    print(f"best: {best.hyperparameters} (accuracy {best.objective:.3f})")
    print(f"trial {len(resident)} has {growth:+.1%} against trial 5")
    sys.exit(growth > 0.05)


if __name__ == "__main__":
    main()

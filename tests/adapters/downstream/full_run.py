"""The life of a Trainer that any library has built: trained, evaluated, saved, and resumed by a new one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.adapters.downstream import records

#: A log line each optimizer step; evaluations and checkpoints at the third and the sixth and last.
SETTINGS = {"max_steps": 6, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
SETTINGS |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "warmup_steps": 2, "logging_steps": 1}
SETTINGS |= {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "use_cpu": True}
SETTINGS |= {"report_to": "none", "disable_tqdm": True}


def record(
    build: Callable[[str], Any], folder: Path, *, resumes: bool = True, alike: bool = True, **more: Any
) -> dict[str, Any]:
    """The record of a life, with `more` in it; `build` makes a Trainer that writes into a folder of the name given.

    `alike` is False where transformers resumes with other random numbers or weights; ours must end as the first did.
    """
    trainer = build("run")
    output = trainer.train()
    more["metrics"] = trainer.evaluate()
    trainer.save_model(str(folder / "final"))
    if resumes:
        resumed = build("resumed")
        resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
        if alike:
            more["resumed"] = {"log_history": resumed.state.log_history, "weights": records.weights(resumed.model)}
        elif "hftrainer" in sys.modules:
            assert records.weights(resumed.model) == records.weights(trainer.model)
    output.metrics.pop("total_flos", None)  # PrinterCallback of transformers takes it out of this very dict
    found = records.of(trainer, folder, output=output.metrics, cards=records.cards(folder), **more)
    if not alike:
        found["files"] = {name: what for name, what in found["files"].items() if not name.startswith("resumed")}
    return found

"""A run in ranks that is observed, and is asked to save, evaluate and stop."""

import time
from pathlib import Path

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.monitoring import run_requests
from tests.support.small_models import make_llama

#: Samples of 5 tokens for one rank and 7 for the other, 2 of each in a step.
LENGTHS = (5, 7)
STEP_SECONDS = 0.05


class Asked(TrainerCallback):
    """Notes the steps after which the rank evaluates and saves; rank 0 asks as a file would, and at once.

    Attributes:
        now: the rank's clock, on which only steps take time.
    """

    def __init__(self, requested):
        self.requested, self.done, self.now = dict(requested), [], 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.now += STEP_SECONDS
        request = self.requested.get(state.global_step)
        if request is not None and args.process_index == 0:
            folder = Path(args.output_dir, run_requests.FOLDER)
            folder.mkdir(exist_ok=True)
            (folder / request).touch()

    def on_evaluate(self, args, state, control, **kwargs):
        self.done.append(("evaluate", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.done.append(("save", state.global_step))


def train(folder, requested, resume=None):
    """Train two ranks; returns what was done after which step, the last step, the log lines and the weights."""
    run_requests._PERIOD = 0.0
    samples = [
        {"input_ids": [3] * length, "labels": [3] * length} for _ in range(40) for length in LENGTHS for _ in "ab"
    ]
    args = TrainingArguments(
        str(folder), max_steps=20, logging_steps=4, per_device_train_batch_size=2, use_cpu=True, save_steps=100,
        train_sampling_strategy="sequential", observe=True, disable_tqdm=True, report_to="none",
    )  # fmt: skip
    asked = Asked(requested)
    trainer = Trainer(make_llama(), args, train_dataset=samples, eval_dataset=samples[:2], callbacks=[asked])
    time.perf_counter = lambda: asked.now  # this process ends with the run
    trainer.train(resume_from_checkpoint=resume)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return asked.done, trainer.state.global_step, lines, trainer.model.state_dict()

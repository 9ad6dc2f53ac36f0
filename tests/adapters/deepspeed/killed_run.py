"""Trains with DeepSpeed, saving each step, and kills one of its processes: python killed_run.py CONFIG FOLDER STEP."""

import os
import signal
import sys
from pathlib import Path

import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.trainer_utils import get_last_checkpoint
from tests.adapters.deepspeed.training_cases import without_compiler
from tests.support.small_models import language_data, make_llama


class Killed(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(config, folder, step):
    without_compiler()
    torch.set_num_threads(1)
    settings = {"max_steps": 7, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}
    settings |= {"save_steps": 1, "save_total_limit": 2, "ddp_timeout": 20, "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(str(folder), deepspeed=config, use_cpu=True, **settings)
    trainer = Trainer(make_llama(), args, train_dataset=language_data(), callbacks=[Killed(step)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    trainer.save_model(str(folder / "final"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

"""A small training script that the tests kill, stop and start again.

python job.py OUTPUT_DIR [SETTINGS AS JSON]

It resumes if there is anything to resume from, prints a line for each step, and writes `final.pt` when it is done: the
weights and the log.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.trainer_utils import get_last_checkpoint
from hftrainer.training import stopping

#: Options of a job besides training arguments, with their defaults.
OPTIONS = {"width": 64, "pause": 0.0, "waits_at": None, "alone_until": None, "kill_at": 0, "adds": False}
OPTIONS |= {"adapters": False, "exact": False, "kill_upload": 0, "dies_at": None, "copies_within": None}
#: Audit events of Python that touch a file.
TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


class Net(nn.Module):
    def __init__(self, width=64, dropout=0.2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(dropout), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_model(width, adapters):
    if not adapters:
        return Net(width)
    from peft import LoraConfig, get_peft_model

    return get_peft_model(Net(width), LoraConfig(r=8, lora_dropout=0.1, target_modules=["layers.0", "layers.3"]))


def make_exact(samples):
    """A model and data in float64, without dropout: in any number of ranks only the order of additions differs."""
    return Net(dropout=0.0).double(), [{**sample, "x": sample["x"].double()} for sample in samples]


def data(count=70):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": index % 3} for index, row in enumerate(x)]


def say(*words):
    """A line in one write: those of two ranks that share a pipe would mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Reports(TrainerCallback):
    """Tells where training stands, line by line, and slows it down.

    Args:
        pause: seconds of sleep in each step, so that a kill by the clock hits the middle of a run.
        waits_at: number of steps after which the next one waits until the named pipe OUTPUT_DIR.go is opened.
        alone_until: number of steps after which a process without others waits until it is asked to end.
        dies_at: number of steps after which the process kills itself, before they are logged and saved.
    """

    def __init__(self, pause=0.0, waits_at=None, alone_until=None, dies_at=None):
        self.pause, self.waits_at, self.alone_until, self.dies_at = pause, waits_at, alone_until, dies_at

    def on_train_begin(self, args, state, control, **kwargs):
        if state.trial_name:
            say("trial", state.trial_name)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.waits_at:
            say("waiting")
            open(f"{args.output_dir}.go").close()
        if state.global_step == self.alone_until and args.world_size == 1:
            wait_for_sigterm()

    def on_step_end(self, args, state, control, **kwargs):
        say("step", state.global_step)
        if state.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause)

    def on_save(self, args, state, control, **kwargs):
        say("saved", state.global_step)


def wait_for_sigterm():
    received, handler = threading.Event(), signal.getsignal(signal.SIGTERM)

    def receive(number, frame):
        received.set()
        handler(number, frame)

    signal.signal(signal.SIGTERM, receive)
    received.wait()


def kill_at(event, folder):
    """`kill -9` this process when it has touched files below `folder` so many times; 0 for never."""
    left = event

    def audit(name, arguments):
        nonlocal left
        path = str(arguments[0]) if name in TOUCHES and arguments else "/"
        if path.startswith(folder) or not path.startswith("/"):  # files that are deleted are named without their folder
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if event:
        sys.addaudithook(audit)


def kill_upload(number):
    """`kill -9` this process in the middle of the upload of a file, the one of this number; 0 for never."""
    from fsspec.implementations.dirfs import DirFileSystem

    original, left = DirFileSystem.put_file, number

    def put_file(self, local, name, **keywords):
        nonlocal left
        left -= 1
        if left:
            return original(self, local, name, **keywords)
        content = Path(local).read_bytes()
        if "file" in self.fs.protocol:  # others write a file whole or not at all
            self.pipe_file(name, content[: len(content) // 2])
        return os.kill(os.getpid(), signal.SIGKILL)

    if number:
        DirFileSystem.put_file = put_file


class AddsFiles(Trainer):
    def _save_checkpoint(self, model, trial):
        place = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "before.txt").write_text(f"{place.name}/before.txt " * 1000)
        super()._save_checkpoint(model, trial)
        (place / "after.txt").write_text(f"{place.name}/after.txt " * 1000)


def main(folder, settings):
    torch.set_num_threads(1)
    if "deepspeed" in settings:
        from tests.adapters.deepspeed.training_cases import without_compiler

        without_compiler()
    options = {key: settings.pop(key, default) for key, default in OPTIONS.items()}
    kill_at(options["kill_at"], folder)
    kill_upload(options["kill_upload"])
    if options["copies_within"] is not None:
        stopping._DUPLICATE_WINDOW.update(dict.fromkeys((False, True), options["copies_within"]))
    torch.manual_seed(1)
    defaults = {"per_device_train_batch_size": 4, "num_train_epochs": 4, "learning_rate": 1e-2, "save_steps": 7}
    defaults |= {"save_total_limit": 2, "logging_steps": 5, "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(folder, **{**defaults, **settings})
    samples, model = data(), make_model(options["width"], options["adapters"])
    if options["exact"]:
        model, samples = make_exact(samples)
    trainer_class = AddsFiles if options["adds"] else Trainer
    callbacks = [Reports(*(options[name] for name in ("pause", "waits_at", "alone_until", "dies_at")))]
    trainer = trainer_class(model, args, train_dataset=samples, eval_dataset=samples, callbacks=callbacks)
    say("resuming from", get_last_checkpoint(folder) if Path(folder).is_dir() else None)
    say("processes", args.world_size)
    trainer.train(resume_from_checkpoint="auto")
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        torch.save({"weights": weights, "log": trainer.state.log_history}, Path(folder) / "final.pt")
    say("done", trainer.state.global_step)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})

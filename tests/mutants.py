"""Twenty one-line faults, put into the code one at a time: do the tests find each?

`python -m tests.mutants [NUMBER ...]`, or `make mutants`. The fast tests run first, and all others if those pass. It
prints a table: the fault, the first test that found it, and whether a fast one did. Each file is restored afterwards,
also after Ctrl-C or SIGTERM; one with uncommitted changes is refused.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HF, ADAPTER = "hftrainer", "adapters/hftrainer_lightning"
FAST = ["-m", "not slow", "-n", "2"]
SLOW = ["-m", "slow", "-n", "3"]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "--dist", "loadfile", "--no-loadscope-reorder"]


class Mutant(NamedTuple):
    """A fault: what is wrong, the file, a text that is in it once, and what stands there instead."""

    fault: str
    file: str
    text: str
    instead: str


MUTANTS = [
    Mutant(
        "a loss of two micro-batches is not divided",
        f"{HF}/training/steps.py",
        "accumulation if accumulation > 1 and not",
        "accumulation if accumulation > 2 and not",
    ),
    Mutant(
        "an event has another's name",
        f"{HF}/training/loop.py",
        'announce("on_pre_optimizer_step")',
        'announce("on_optimizer_step")',
    ),
    Mutant(
        "a line without a new step is logged",
        f"{HF}/training/log_save_evaluate.py",
        "trainer.state.global_step > self.run.last_logged:",
        "trainer.state.global_step >= self.run.last_logged:",
    ),
    Mutant(
        "an equal metric is a new best",
        f"{HF}/training/log_save_evaluate.py",
        "value > best if args.greater_is_better",
        "value >= best if args.greater_is_better",
    ),
    Mutant("the manifest is not flushed", f"{HF}/checkpointing/manifest.py", "    flush_to_disk(beside)\n", ""),
    Mutant(
        "the renamed checkpoint's entry is not flushed",
        f"{HF}/checkpointing/staging.py",
        "    flush_to_disk(final.parent)\n",
        "",
    ),
    Mutant(
        "contents that have changed are not noticed",
        f"{HF}/checkpointing/manifest.py",
        "if contents and _crc32(path) != entry.crc32",
        "if not contents and _crc32(path) != entry.crc32",
    ),
    Mutant(
        "a checkpoint too many is kept",
        f"{HF}/checkpointing/folders.py",
        "max(save_total_limit, len(kept))",
        "max(save_total_limit + 1, len(kept))",
    ),
    Mutant(
        "resuming skips a batch too few",
        f"{HF}/data/samplers.py",
        "skipped * batches.batch_size",
        "(skipped - 1) * batches.batch_size",
    ),
    Mutant(
        "NumPy's generator is not restored",
        f"{HF}/data/random_states.py",
        '    np.random.set_state(states["numpy"])\n',
        "",
    ),
    Mutant(
        "the first line after resuming divides by all steps",
        f"{HF}/training/loss_sum.py",
        "        run.last_logged = progress.last_logged\n",
        "",
    ),
    Mutant(
        "a loss that is left out counts one step too few",
        f"{HF}/training/loss_sum.py",
        "steps = 1 + state.global_step",
        "steps = max(1, state.global_step)",
    ),
    Mutant(
        "the warmup ends a step late", f"{HF}/optimization.py", "return step / max(1, num", "return step / (1 + num"
    ),
    Mutant(
        "early stopping waits for one evaluation more",
        f"{HF}/callbacks/flow.py",
        "_counter >= self.early_stopping_patience",
        "_counter > self.early_stopping_patience",
    ),
    Mutant(
        "each evaluated batch counts alike",
        f"{HF}/evaluation/evaluation_pass.py",
        "_repeated(loss, self.args.eval_batch_size)",
        "_repeated(loss, 1)",
    ),
    Mutant(
        "the last round is completed with its own samples",
        f"{HF}/data/sharding.py",
        "samples = cycle(chain.from_iterable(first))",
        "samples = cycle(chain.from_iterable(in_turn))",
    ),
    Mutant(
        "tokens of all ranks divide the loss of one",
        f"{HF}/training/steps.py",
        "loss = loss * trainer.accelerator.processes.data_processes",
        "loss = loss * 1",
    ),
    Mutant(
        "resumed within an epoch, Lightning counts it as not begun",
        f"{ADAPTER}/private_api/training.py",
        "begun = epoch + 1 if batch else epoch",
        "begun = epoch",
    ),
    Mutant(
        "a step that the scaler took counts as skipped",
        f"{ADAPTER}/strategies/precision.py",
        "self.scaler.get_scale() < before",
        "self.scaler.get_scale() <= before",
    ),
    Mutant(
        "the module does not stop when the run does",
        f"{ADAPTER}/module.py",
        "        self.epoch_ended = False\n        if self.hooks.should_stop:",
        "        self.epoch_ended = False\n        if False:",
    ),
]


def found_by(options: list[str]) -> str | None:
    """The first test that fails; None when all pass.

    Raises:
        RuntimeError: when pytest itself fails.
    """
    run = subprocess.run([*PYTEST, *options], cwd=ROOT, capture_output=True, text=True)
    if run.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)( - |$)", run.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
    return failed[1]


def row(number: int, mutant: Mutant) -> str:
    """Try one fault; returns its line of the table.

    Raises:
        ValueError: when the text is not in its file once, or the file has uncommitted changes.
    """
    path = ROOT / mutant.file
    original = path.read_text()
    if original.count(mutant.text) != 1:
        raise ValueError(f"{mutant.text!r} is {original.count(mutant.text)} times in {mutant.file}")
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", mutant.file], cwd=ROOT).returncode:
        raise ValueError(f"{mutant.file} has uncommitted changes")
    try:
        path.write_text(original.replace(mutant.text, mutant.instead))
        fast = found_by(FAST)
        test = fast or found_by(SLOW)
    finally:
        path.write_text(original)
    return f"| {number} | {mutant.fault} (`{mutant.file}`) | {test or '**none**'} | {'yes' if fast else 'no'} |"


def main(numbers: list[int]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print("| | fault | found by | fast |\n| ---: | --- | --- | --- |", flush=True)
    for number, mutant in enumerate(MUTANTS, 1):
        if not numbers or number in numbers:
            print(row(number, mutant), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])

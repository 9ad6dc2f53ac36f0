"""Disturbs runs at random until there were enough kills, and lets each go on to its end.

    python -m tests.reliability.soak [--kills 1000] [--only plain search ...] [--seed 0]

After each disturbance nothing may be lost that was saved, and no process may be left. At its end a run has the weights,
the log and the files of one that nothing has disturbed, on disk and on the Hub. What is found is printed with the seed
of its run, which `--only SCENARIO --seed SEED --kills 1` repeats as far as time lets it.
"""

import argparse
import contextlib
import importlib.util
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hftrainer.checkpointing.inspection import inspect_checkpoint
from tests.reliability.search_job import check
from tests.support import faults, processes
from tests.support.checkpoints import BACKGROUND
from tests.support.hub_runs import environment
from tests.support.hub_server import HubServer
from tests.support.jobs import SHARDED, JobGroup, assert_same, final_log, final_weights, names_in

TOKEN = "hf_ofTheSoak"
#: What the errors of a full or read-only disk say; the last one is torch's, of a file that the job itself saves.
FULL = ("No space left", "Read-only file system", "iostream error")
#: Part of the traceback of a loader's worker whose parent is killed while it passes on a batch.
HANDS_OVER = ", in _serve\n"
#: The fault that a job does to itself.
AT_A_TOUCH = "kill at a touch of a file"
#: Maximum number of disturbances of a run, so that it ends.
MOST = 6
#: Size of the disk of a run.
SIZE = "24m"
#: A run that has not ended after so many seconds hangs.
SECONDS = 120
#: The optimizer steps of a run.
LAST = 72


@dataclass(frozen=True)
class Scenario:
    """Settings of the job.

    Attributes:
        settings: training arguments, and options of the job.
        count: processes.
        uploads: whether checkpoints are pushed to a Hub.
        needs: a package.
        searches: whether the job is a search, for which a disk that is full is an error of its storage.
        sizes: processes and settings, of which each start has others.
    """

    settings: dict = field(default_factory=dict)
    count: int = 1
    uploads: bool = False
    needs: str = "torch"
    searches: bool = False
    sizes: tuple = ()

    @property
    def in_background(self):
        return "lightning_config" in self.settings


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 7}
WIDE = {"width": 5_000}
#: Processes, and settings with which a step has eight samples.
SIZES = [
    (count, {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // (count * size), **strategy})
    for count, size, strategy in [(1, 8, {}), (1, 2, {}), (2, 4, {}), (2, 1, {}), (4, 2, {}), (2, 2, {"fsdp": True})]
]
SCENARIOS = {
    "plain": Scenario(WIDE),
    "background": Scenario({**WIDE, **BACKGROUND}),
    "best": Scenario({**WIDE, **BEST}),
    "best, background, one kept": Scenario({**WIDE, **BEST, **BACKGROUND, "save_total_limit": 1}),
    "files of the script": Scenario({**WIDE, "adds": True}),
    "adapters": Scenario({**WIDE, "adapters": True}, needs="peft"),
    "loading processes": Scenario({**WIDE, "dataloader_num_workers": 1}),
    "uploads": Scenario({"push_to_hub": True, "hub_token": TOKEN}, uploads=True),
    "search": Scenario({"job": "search_job", "n_trials": 8}, needs="optuna", searches=True),
    "two processes": Scenario(count=2),
    "two processes, background": Scenario(BACKGROUND, count=2),
    "sharded": Scenario(SHARDED, count=2),
    "sharded, full files, background": Scenario({"fsdp": True, **BACKGROUND}, count=2),
    "elastic": Scenario({"elastic": True, "exact": True}, count=2, sizes=tuple(SIZES)),
    "deepspeed": Scenario(
        {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}},
        count=2,
        needs="deepspeed",
    ),
}


def numbers_of(lines, word):
    return [int(found[1]) for line in lines if (found := re.fullmatch(rf"{word} .*?(\d+)", line))]


def left_over(output):
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(output) and int(link.parts[2]) != os.getpid():
                found.append(int(link.parts[2]))
    return found


def what_is_left(folder):
    """The number of whole checkpoints, the last one, and other files; a signal saves others in between."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=step_of)
    whole = [path for path in checkpoints if (path / "trainer_state.json").exists()]  # a script may have begun others
    return len(whole), whole[-1].name, set(names_in(folder)) - {path.name for path in checkpoints}


def step_of(checkpoint):
    return int(checkpoint.name.rpartition("-")[2])


@dataclass
class Found:
    runs: int = 0
    disturbed: Counter = field(default_factory=Counter)
    findings: list = field(default_factory=list)

    @property
    def kills(self):
        return self.disturbed.total() - self.disturbed["damage"]


class Run:
    """One run, from its first start to its end.

    Args:
        name: of the scenario.
        folder: for its files.
        seed: of what happens to it.
        found: where that is counted.
    """

    def __init__(self, name, folder, seed, found):
        self.name, self.scenario, self.found = f"{name}, seed {seed}", SCENARIOS[name], found
        self.moments = random.Random(self.name)
        folder.mkdir(parents=True)
        self.disk = faults.Disk(folder / "out", SIZE)
        self.folder = self.disk.folder
        self.repo = f"me/{name.replace(' ', '-').replace(',', '')}-{seed}"
        self.durable = 0  # the step that the next start must not be before
        self.history = []  # what has happened to it

    def _start(self, kill_at=0, **settings):
        uploads = {"hub_model_id": self.repo} if self.scenario.uploads else {}
        sizes = self.scenario.sizes
        count, size = self.moments.choice(sizes) if sizes else (self.scenario.count, {})
        job_settings = {**self.scenario.settings, **size, **uploads, **settings}
        return JobGroup(self.folder, count, (kill_at,) * count, **job_settings)

    def close(self):
        self.disk.remove()
        shutil.rmtree(self.folder.parent)

    def live(self, kills, expected, hub):
        try:
            for _ in range(MOST):
                if self.found.kills >= kills or self.disturb():
                    break
            self.finish()
            self.compare(expected)
            if self.scenario.uploads:
                self.compare_uploads(hub)
        except (AssertionError, OSError, KeyError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1].line
            self.found.findings.append(f"{self.name}: {type(error).__name__}: {where}: {error}")
            print(*self.history, self.found.findings[-1], sep="\n", file=sys.stderr, flush=True)

    def disturb(self):
        """One start that something happens to; whether the run has ended all the same."""
        has_disk = self.disk.mounted and not self.scenario.searches
        possible = [*faults.SIGNALS, *(faults.DISK_FAULTS if has_disk else ())]
        name = self.moments.choice([*possible, *[AT_A_TOUCH] * 3])
        if name == AT_A_TOUCH:
            group = self._start(kill_at=self.moments.randrange(1, 250 // self.scenario.count))
        else:
            group = self._start(pause=0.004)
            faults.disturb(name, group, self.disk, self.moments)
        statuses = group.end(SECONDS)
        self.disk.mend()
        self.history.append((name, statuses, *group.printed()))
        self._check(group, name)
        if not any(statuses):
            return True
        self.found.disturbed[name] += 1
        if self.moments.random() < 0.2:
            self._damage()
        return False

    def _check(self, group, name):
        printed = group.printed()
        lines = printed[0].splitlines()
        resumed, saved = numbers_of(lines, "resuming from"), numbers_of(lines, "saved")
        if resumed or saved:
            assert "resuming from None" not in lines or not self.durable, f"not from {self.durable}: {lines}"
            assert not resumed or resumed[0] >= self.durable, f"{self.durable} was saved, it resumes from {resumed[0]}"
        if self.scenario.in_background:
            saved = saved[:-1]  # that may not be complete
        self.durable = max([self.durable, *resumed, *saved])
        complete = numbers_of(lines, "done") or self.durable == LAST  # it may be killed before it says so
        if self.scenario.settings.get("save_total_limit") == 1 and complete:
            self.durable = 0  # of a complete run the best is kept, though a later one was saved
        if self.scenario.count == 1:
            excused = name in faults.DISK_FAULTS and any(words in printed[0] for words in FULL)
            assert printed[0].count("Traceback") == printed[0].count(HANDS_OVER) or excused, printed[0]
        for checkpoint in self.folder.glob("checkpoint-*") if "adds" in self.scenario.settings else ():
            if inspect_checkpoint(checkpoint).skip_reason is None:  # then what the script has added is whole too
                assert (checkpoint / "before.txt").read_text() == f"{checkpoint.name}/before.txt " * 1000
        self._check_processes(group)

    def _check_processes(self, group):
        deadline = time.monotonic() + 120  # a loader's worker looks for its parent every few seconds
        while left := [pid for job in group.jobs for pid in left_over(job.output)]:
            assert time.monotonic() < deadline, f"processes {left} are left"
            time.sleep(0.05)

    def _damage(self):
        """Harm the newest whole checkpoint, if there is another one and the best is elsewhere."""
        found = self.folder.glob("checkpoint-*")
        whole = (folder for folder in found if inspect_checkpoint(folder).skip_reason is None)
        folders = sorted(whole, key=step_of)
        if len(folders) < 2 or "load_best_model_at_end" in self.scenario.settings:
            return
        self.history.append(("damage", faults.damage_a_file(folders[-1], self.moments)))
        self.found.disturbed["damage"] += 1
        self.durable = 0

    def finish(self):
        group = self._start()
        statuses = group.end(SECONDS)
        assert not any(statuses), group.printed()
        self._check(group, "nothing")

    def compare(self, expected):
        if self.scenario.searches:
            check(self.folder, self.scenario.settings["n_trials"])
            return
        if self.scenario.sizes:
            self.compare_sums(expected)
            return
        assert_same(final_weights(self.folder), final_weights(expected.folder))
        assert final_log(self.folder) == final_log(expected.folder)
        assert what_is_left(self.folder) == what_is_left(expected.folder)
        assert abs(self.disk.used() - expected.disk.used()) < 0.1

    def compare_sums(self, expected):
        """Ranks and micro-batches add up losses and gradients in another order."""
        found, wanted = final_weights(self.folder), final_weights(expected.folder)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name
        for line, other in zip(final_log(self.folder), final_log(expected.folder), strict=True):
            assert line.keys() == other.keys() and line["step"] == other["step"]
            assert abs(line.get("loss", 0) - other.get("loss", 0)) < 1e-6, (line, other)

    def compare_uploads(self, hub):
        pushed = hub.repos[self.repo].at("main").files
        assert pushed["model.safetensors"] == (self.folder / f"checkpoint-{LAST}" / "model.safetensors").read_bytes()


def soak(name, folder, kills, seed, found, hub):
    with contextlib.closing(Run(name, folder / "expected", "undisturbed", Found())) as expected:
        expected.finish()
        while found.kills < kills:
            with contextlib.closing(Run(name, folder / "run", seed + found.runs, found)) as run:
                run.live(kills, expected, hub)
            found.runs += 1


def table(results):
    yield f"{'scenario':34}{'runs':>6}{'kills':>7}{'damaged':>9}{'findings':>10}"
    for name, found in results.items():
        yield f"{name:34}{found.runs:6}{found.kills:7}{found.disturbed['damage']:9}{len(found.findings):10}"
    disturbed = sum((found.disturbed for found in results.values()), Counter())
    yield ", ".join(f"{name} {count}" for name, count in disturbed.most_common())


def run_all(kills, only, seed):
    chosen = [name for name in only or SCENARIOS if importlib.util.find_spec(SCENARIOS[name].needs)]
    results = {name: Found() for name in chosen}
    with tempfile.TemporaryDirectory(prefix="soak") as base, HubServer({TOKEN: ("me", "write")}) as hub:
        os.environ.update(environment(hub, Path(base) / "home"))  # before the processes' server is started
        for name, found in results.items():
            print(f"{name} ...", file=sys.stderr, flush=True)
            soak(name, Path(base) / name.replace(", ", "-"), -(-kills // len(chosen)), seed, found, hub)
    return results


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="of all scenarios together (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, help="default: all whose packages are installed")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    options = parser.parse_args(words)
    results = run_all(options.kills, options.only, options.seed)
    print("\n".join(table(results)))
    return any(found.findings for found in results.values())


if __name__ == "__main__":
    os.environ.update(processes.environment())
    sys.exit(main())

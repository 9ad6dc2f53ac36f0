"""`python -m hftrainer diff RUN_A RUN_B`: the first step at which two runs differ, and which values differ."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hftrainer.base.messages import format_span
from hftrainer.cli.checkpoint import release_that_saved
from hftrainer.cli.parser import Parser, paint_headings
from hftrainer.errors import DamagedCheckpoint, InvalidArgument

#: Subject → the log entries that belong to it; 'metrics' has all others. Weights are not logged.
SUBJECTS = {
    "data": ("epoch", "num_input_tokens_seen"),
    "loss": ("loss",),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "metrics": (),
    "weights": (),
}


@dataclass(frozen=True)
class ComparedValues:
    """A value of two runs at the same optimizer step: the step, the value's name, and both values.

    For values that are too large to be shown, `values` is a text on their differences.
    """

    step: float
    name: str
    values: Any

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}: {self.values if isinstance(self.values, str) else _pair(self.values)}"


@dataclass(frozen=True)
class Difference:
    """The differences between two runs.

    Attributes:
        names: the names of the runs.
        steps: optimizer steps of each run.
        partings: subject → its first values that differ.
        compared: subject → number of values that both runs recorded at the same step.
        only_in_one: name of a value that only one run logged → that run's name.
        arguments: name → both values, for arguments that differ; None if arguments are not recorded.
        versions: the same for versions.
    """

    names: tuple[str, str]
    steps: tuple[int, int]
    partings: dict[str, ComparedValues]
    compared: dict[str, int]
    only_in_one: dict[str, str]
    arguments: dict[str, tuple[Any, Any]] | None
    versions: dict[str, tuple[Any, Any]] | None

    @property
    def is_equal(self) -> bool:
        """Whether the runs are equal."""
        differences = (self.partings, self.only_in_one, self.arguments, self.versions)
        return self.steps[0] == self.steps[1] and not any(differences)

    def __str__(self) -> str:
        parts = [self._summary(), "" if self.is_equal else f"\n{'':14} {' | '.join(self.names)}"]
        for subject in SUBJECTS:
            parting, compared = self.partings.get(subject), self.compared[subject]
            kind = "tensors" if subject == "weights" else "values"
            text = f"equal, {compared} {kind} compared" if compared else "nothing to compare"
            parts.append(f"{subject:<14} {parting or text}")
        parts += [f"{name} is logged by {run} only" for name, run in self.only_in_one.items()]
        # Only models of transformers record versions.
        recorded = [("arguments", self.arguments), ("versions", self.versions)][: 1 + (self.versions is not None)]
        for title, differences in recorded:
            count = f"{len(differences)} differ{'s' if len(differences) == 1 else ''}" if differences else "equal"
            parts.append(f"{title:<14} {'not recorded' if differences is None else count}")
            parts += [f"  {name}: {_pair(values)}" for name, values in (differences or {}).items()]
        return "\n".join(parts)

    def _summary(self) -> str:
        (one, other), count = self.names, self.steps
        cause = f"; the arguments differ in {', '.join(self.arguments)}" if self.arguments else ""
        if self.partings:
            step = min(parting.step for parting in self.partings.values())
            subjects = [subject for subject, parting in self.partings.items() if parting.step == step]
            return f"{one} and {other} differ from step {step} in {', '.join(subjects)}{cause}."
        if count[0] != count[1]:
            rest = f"{one if count[0] > count[1] else other} continues to step {max(count)}"
            return f"The runs are equal in all {min(count)} common steps; {rest}{cause}."
        if not self.is_equal:
            return f"All common values are equal{cause or ', but other parts differ'}."
        recorded = ", ".join(subject for subject in SUBJECTS if self.compared[subject])
        return f"The runs are equal{'' if all(self.compared.values()) else f' in what was recorded: {recorded}'}."


def _pair(values: tuple[Any, Any]) -> str:
    short = [f"{value:.6g}" if isinstance(value, float) else repr(value) for value in values]
    return " | ".join(short if short[0] != short[1] else map(repr, values))


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "diff",
        help="show the first step at which two runs differ, and which values differ",
        epilog="example: %(prog)s out-1 out-2",
        description="Compare the logs, weights and arguments of two runs exactly. Exits with 0 if they are equal, "
        "1 if they differ or one is longer, 2 if they cannot be compared. Data is compared by its records: the "
        "position in the epoch, the token count, and, in checkpoints of one step, what sets the order of samples.",
    )
    parser.set_defaults(missing="pass two runs")
    parser.add_argument("runs", metavar="OUTPUT_DIR", nargs=2, help="a run's output folder, or a checkpoint")


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    if not any(os.path.exists(run) or "://" in run for run in options.runs):
        parser.fail(f"{' and '.join(options.runs)} do not exist: pass the output_dir of two runs")
    try:
        difference = compare(*options.runs)
    except DamagedCheckpoint as error:
        parser.fail(str(error).replace(DamagedCheckpoint.REMEDY, ": compare checkpoints that are whole"))
    # Our errors derive from ValueError.
    except (ValueError, OSError) as error:
        parser.fail(error)
    report = {"equal": difference.is_equal, **asdict(difference)}
    print(json.dumps(report, indent=2) if options.json else paint_headings(str(difference)))
    parser.exit(0 if difference.is_equal else 1)


def compare(a: str, b: str) -> Difference:
    """Compare two runs.

    Raises:
        InvalidArgument: for a folder without a run, or if the runs have nothing in common but arguments and versions.
        DamagedCheckpoint: for a file that cannot be read.
    """
    from hftrainer.checkpointing.saved_arguments import read_arguments_of_run
    from hftrainer.monitoring.journal import run_names
    from hftrainer.monitoring.run_facts import RunRecord
    from hftrainer.reporting.metrics import logged

    records = RunRecord(a), RunRecord(b)
    # Name → optimizer step → value.
    logs: tuple[dict[str, dict[float, Any]], ...] = {}, {}
    for values, record in zip(logs, records, strict=True):
        for step, name, value in logged(record.state.log_history):
            values.setdefault(name, {})[step] = value
    partings: dict[str, ComparedValues] = {}
    compared = dict.fromkeys(SUBJECTS, 0)
    saved = _saved(a, b)
    for subject, part in [*_log_pairs(*logs), *_data_pairs(saved), *_weight_pairs(saved)]:
        compared[subject] += 1
        if not _same(*part.values) and (subject not in partings or part.step < partings[subject].step):
            partings[subject] = part
    if not any(compared.values()):
        steps = [sorted({step for values in log.values() for step in values}) for log in logs]
        spans = " and ".join(format_span(known[0], known[-1]) if known else "none" for known in steps)
        problem = f"{a} and {b} share no logged or saved step (logged: {spans})"
        raise InvalidArgument(f"Nothing to compare: {problem}: set logging_steps.")
    names = run_names([a, b])
    return Difference(
        (names[0], names[1]),
        (records[0].state.global_step, records[1].state.global_step),
        {subject: _shorten(partings[subject]) for subject in SUBJECTS if subject in partings},
        compared,
        {name: names[name not in logs[0]] for name in sorted(logs[0].keys() ^ logs[1].keys())},
        # A run without checkpoints may have a journal with them.
        _find_differences(*(read_arguments_of_run(record.folder) or record.arguments for record in records)),
        _find_differences(_versions(a), _versions(b)),
    )


def _log_pairs(a: dict[str, dict[float, Any]], b: dict[str, dict[float, Any]]) -> Iterator[tuple[str, ComparedValues]]:
    for name in sorted(a.keys() & b.keys()):
        subject = next((subject for subject, entries in SUBJECTS.items() if name in entries), "metrics")
        for step in a[name].keys() & b[name].keys():
            yield subject, ComparedValues(step, name, (a[name][step], b[name][step]))


def _data_pairs(saved: list[tuple[int, str, str]]) -> Iterator[tuple[str, ComparedValues]]:
    """Pairs of values that determine the sample order, from the checkpoints in `saved`."""
    from hftrainer.checkpointing.run_progress import STEP_SETTINGS, load_progress

    for step, *folders in saved:
        one, other = (load_progress(folder, 0, 1) for folder in folders)
        if one is not None and other is not None:
            is_elastic = one.settings.get("elastic") and other.settings.get("elastic")
            names = one.settings.keys() & other.settings.keys() - {"max_steps"}
            if is_elastic and one.global_batch_size == other.global_batch_size:
                # Steps have the same samples, however they are split, and each split its own random states.
                names -= {*STEP_SETTINGS}
            for name in sorted(names):
                yield "data", ComparedValues(step, name, (one.settings[name], other.settings[name]))
            if all(one.settings.get(name) == other.settings.get(name) for name in STEP_SETTINGS):
                yield "data", ComparedValues(step, "random states of the data", (one.data, other.data))


def _weight_pairs(saved: list[tuple[int, str, str]]) -> Iterator[tuple[str, ComparedValues]]:
    """Pairs of tensors, from the newest checkpoints in `saved` whose weights are not in shards."""
    from hftrainer.base.safe_loading import read_weights
    from hftrainer.checkpointing.weights import plain_files

    files_by_step = ((step, plain_files(folder_a), plain_files(folder_b)) for step, folder_a, folder_b in saved[::-1])
    # Only the newest is read.
    for step, *files in itertools.islice((row for row in files_by_step if all(row[1:])), 1):
        one, other = (ChainMap(*map(read_weights, paths)) for paths in files)
        for name in sorted(one.keys() | other.keys()):
            yield "weights", ComparedValues(step, name, (one.get(name), other.get(name)))


def _shorten(parting: ComparedValues) -> ComparedValues:
    """The values, with a text in place of tensors."""
    a, b = parting.values
    if isinstance(a, dict) or isinstance(b, dict):
        return replace(parting, values="differ")
    if not (hasattr(a, "untyped_storage") or hasattr(b, "untyped_storage")):
        return parting
    if a is None or b is None:
        return replace(parting, values=f"only in the {'second' if a is None else 'first'} run")
    if a.dtype != b.dtype or a.shape != b.shape:
        return replace(parting, values=f"{a.dtype} {[*a.shape]} | {b.dtype} {[*b.shape]}")
    differ = (a != b) & ~((a != a) & (b != b))
    one, other = a[differ].cdouble(), b[differ].cdouble()
    differences = (one - other).abs()
    largest, relative = differences.max(), (differences / one.abs().maximum(other.abs())).max()
    text = f"{len(one):,} of {a.numel():,} elements differ by up to {largest:.3g}, relatively {relative:.3g}"
    return replace(parting, values=text)


def _saved(a: str, b: str) -> list[tuple[int, str, str]]:
    """Each optimizer step of which both runs have a state, with their folders."""
    from hftrainer.callbacks.state import TrainerState
    from hftrainer.checkpointing.layout import TRAINER_STATE_NAME

    def by_step(run: str) -> dict[int, str]:
        files = filter(os.path.isfile, (os.path.join(folder, TRAINER_STATE_NAME) for folder in _folders(run)))
        return {TrainerState.load_from_json(file).global_step: os.path.dirname(file) for file in files}

    folders_a, folders_b = by_step(a), by_step(b)
    return [(step, folders_a[step], folders_b[step]) for step in sorted(folders_a.keys() & folders_b.keys())]


def _folders(run: str) -> list[str]:
    """The folder itself and its checkpoints, newest first."""
    from hftrainer.checkpointing.layout import checkpoints_newest_first

    return [run, *checkpoints_newest_first(run)]


def _versions(run: str) -> dict[str, Any] | None:
    """The release of transformers that saved the model; other versions are not recorded."""
    releases = filter(None, map(release_that_saved, _folders(run)))
    return next(({"transformers": release} for release in releases), None)


def _find_differences(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, tuple[Any, Any]] | None:
    """The differences between common names. Other names depend on the library and its release."""
    if not a or not b:
        return None
    pairs = {name: (a[name], b[name]) for name in sorted(a.keys() & b.keys())}
    return {name: values for name, values in pairs.items() if not _same(*values)}


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, to the bit; NaN equals NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    # Arrays and tensors.
    if hasattr(a, "tobytes") or hasattr(a, "untyped_storage"):
        is_alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return is_alike and bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (a != a and b != b)

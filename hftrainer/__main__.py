"""The command line: `python -m hftrainer`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from typing import Any

from hftrainer.cli.launch import add_options, is_launch, launch
from hftrainer.compat.version import __version__


def main() -> None:
    """Parse the command line and run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="python -m hftrainer", description="The Hugging Face Trainer API, with PyTorch Lightning as its engine."
    )
    parser.add_argument("--version", action="version", version=f"hftrainer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = _add_run(commands)
    _add_explain(commands)
    plot, checkpoint = _add_plot(commands), _add_checkpoint(commands)
    options, remaining = parser.parse_known_args()
    if options.command == "explain":
        _explain(remaining, as_json=options.json)
    elif remaining:
        parser.error(f"unrecognized arguments: {' '.join(remaining)}")
    elif options.command == "plot":
        _plot(plot, options)
    elif options.command == "checkpoint":
        _accept(checkpoint, options.accept)
    elif is_launch(options):
        launch(run, options)
    else:
        from hftrainer.cli.run import run_script

        run_script(options.script, options.arguments, as_module=options.as_module)


def _add_run(commands: Any) -> argparse.ArgumentParser:
    run = commands.add_parser(
        "run",
        help="run an unmodified Trainer script, in one process or in several",
        usage="%(prog)s [--nproc N ...] [-m] SCRIPT [arguments …]",
        allow_abbrev=False,
    )
    add_options(run)
    run.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", metavar="SCRIPT", help="path of the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return run


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show how training arguments are used",
        usage="%(prog)s [--json] [any training arguments …]",
        add_help=False,
    )
    explain.add_argument("--json", action="store_true", help="for programs")


def _add_plot(commands: Any) -> argparse.ArgumentParser:
    plot = commands.add_parser(
        "plot",
        help="draw the losses, metrics and learning rates of runs, or the trials of a search",
        usage="%(prog)s [--html] [--out FILE.png] OUTPUT_DIR ...\n"
        "       %(prog)s [--html] --study STORAGE [--study-name NAME] [--output DIR]",
        allow_abbrev=False,
    )
    plot.add_argument("folders", metavar="OUTPUT_DIR", nargs="*", help="output folder of a run; several are compared")
    plot.add_argument("--html", action="store_true", help="write interactive pages too")
    plot.add_argument("--out", metavar="FILE.png", help="the file for runs; default: training.png in the first folder")
    plot.add_argument(
        "--study", metavar="STORAGE", help="a search: sqlite:///search.db, another URL, or a journal file"
    )
    plot.add_argument("--study-name", metavar="NAME", help="the study's name, if the storage holds several")
    plot.add_argument("--output", metavar="DIR", help="the folder for a study's plots; default: the current one")
    return plot


def _add_checkpoint(commands: Any) -> argparse.ArgumentParser:
    checkpoint = commands.add_parser(
        "checkpoint",
        help="accept a checkpoint whose files were changed intentionally",
        description="Read the files of a checkpoint that was changed after it was written (for example, its weights "
        "were converted), and write a new manifest, so that it counts as whole. If a file cannot be read, exits with 1 "
        "and changes nothing.",
        allow_abbrev=False,
    )
    checkpoint.add_argument("--accept", metavar="FOLDER", required=True, help="the checkpoint-xxx folder")
    return checkpoint


def _plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from hftrainer.errors import InvalidArgument, MissingPackage
    from hftrainer.reporting.plot import plot
    from hftrainer.search.plots import plot_study

    if bool(options.folders) == (options.study is not None):
        parser.error("give the output folders of runs, or --study for a search")
    others = ("--out",) if options.study is not None else ("--study-name", "--output")
    for option in others:
        if getattr(options, option.strip("-").replace("-", "_")) is not None:
            parser.error(f"{option} is for {'runs' if options.study is not None else '--study'}")
    try:
        if options.study is not None:
            written = plot_study(options.study, options.study_name, out=options.output or ".", html=options.html)
        else:
            written = plot(options.folders, html=options.html, out=options.out)
    except (InvalidArgument, MissingPackage) as error:
        parser.error(str(error))
    print("\n".join(written))


def _accept(parser: argparse.ArgumentParser, folder: str) -> None:
    from hftrainer.checkpointing.manifest import accept
    from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint

    try:
        found = accept(folder)
    except (CheckpointNotFound, DamagedCheckpoint, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(f"{folder} is accepted" + (f" ({found})." if found else ", all its files can be read."))


def _explain(words: list[str], *, as_json: bool) -> None:
    from hftrainer.hf_argparser import HfArgumentParser
    from hftrainer.training_args import TrainingArguments

    parser = HfArgumentParser(TrainingArguments, prog="python -m hftrainer explain", allow_abbrev=False)
    try:
        args, unknown = parser.parse_args_into_dataclasses(words, True, look_for_args_file=False)
    except ValueError as error:
        parser.error(str(error))
    if unknown:
        options = [f"--{field.name}" for field in dataclasses.fields(TrainingArguments)]
        near = difflib.get_close_matches(unknown[0], options, n=1)
        parser.error(f"unknown argument {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    explanation = args.explain()
    print(explanation.to_json() if as_json else explanation)


if __name__ == "__main__":
    main()

"""The command line: `python -m hftrainer`."""

from __future__ import annotations

import argparse

from hftrainer import __version__


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        prog="python -m hftrainer", description="The Hugging Face Trainer API, with PyTorch Lightning as its engine."
    )
    parser.add_argument("--version", action="version", version=f"hftrainer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run", help="run an unmodified Trainer script", usage="%(prog)s [-m] SCRIPT [arguments …]"
    )
    run.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", metavar="SCRIPT", help="path of the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args()
    if options.command == "run":
        from hftrainer.run import run_script

        run_script(options.script, options.arguments, as_module=options.as_module)


if __name__ == "__main__":
    main()

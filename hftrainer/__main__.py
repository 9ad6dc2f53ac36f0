"""The command line: `python -m hftrainer`."""

from __future__ import annotations

from collections.abc import Sequence

from hftrainer.cli.commands import make_parser


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line and run the subcommand, a module of `hftrainer.cli`.

    Args:
        words: the command line; default: the one of this process.
    """
    parser = make_parser()
    options, remaining = parser.parse_known_args(words)
    if options.command == "explain":
        options.words = remaining + options.words  # argparse splits them; see hftrainer.cli.explain
    elif remaining:
        parser.error(f"unrecognized arguments: {' '.join(remaining)}")
    options.execute(options)


if __name__ == "__main__":
    main()

"""`python -m hftrainer checkpoint --accept FOLDER`: accepts a checkpoint that was changed on purpose."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hftrainer.cli.parser import Parser


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "checkpoint",
        help="accept a checkpoint whose files were changed intentionally",
        description="Read the files of a checkpoint that was changed after it was written (for example, its weights "
        "were converted), and write a new manifest, so that it counts as whole. If a file cannot be read, exits with 1 "
        "and changes nothing.",
    )
    parser.add_argument("--accept", metavar="FOLDER", required=True, help="the checkpoint-xxx folder")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(execute=_accept, parser=parser)


def _accept(parser: Parser, options: argparse.Namespace) -> None:
    from hftrainer.checkpointing.folder import CheckpointFolder
    from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint

    folder = options.accept
    try:
        changes = CheckpointFolder(folder).accept().changes
    except (CheckpointNotFound, DamagedCheckpoint, OSError) as error:
        parser.fail(error, status=1)
    if options.json:
        print(json.dumps({"folder": folder, "changes": changes or None}, indent=2))
    else:
        print(f"{folder} is accepted" + (f" ({changes})." if changes else ", all its files can be read."))

"""Prints how much of each folder the tests have reached, and fails below the floor: the end of `make coverage`."""

import collections
import json
import sys
import tempfile
from pathlib import Path

from coverage import Coverage

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def by_folder(files: dict[str, dict]) -> dict[str, collections.Counter]:
    """The counts of all files of a folder, and of all together, from the files of coverage's JSON report."""
    found = collections.defaultdict(collections.Counter)
    for path, report in files.items():
        counts = {name: report["summary"][name] for name in COUNTS}
        for row in (str(Path(path).parent), "all"):
            found[row].update(counts)
    return dict(sorted(found.items(), key=lambda row: (row[0] == "all", row[0])))


def line(name: str, counts: collections.Counter) -> str:
    there = counts["num_statements"] + counts["num_branches"]
    share = 100 * (counts["covered_lines"] + counts["covered_branches"]) / max(there, 1)
    statements = f"{counts['covered_lines']}/{counts['num_statements']}"
    branches = f"{counts['covered_branches']}/{counts['num_branches']}"
    return f"{name:42s} {statements:>15s} {branches:>15s} {share:7.1f}"


def main() -> int:
    coverage = Coverage()
    coverage.load()
    with tempfile.NamedTemporaryFile() as file:
        total = coverage.json_report(outfile=file.name)
        files = json.loads(Path(file.name).read_text())["files"]
    print(f"{'folder':42s} {'statements':>15s} {'branches':>15s} {'%':>7s}")
    print("\n".join(line(*row) for row in by_folder(files).items()))
    floor = coverage.get_option("report:fail_under")
    if total < floor:
        print(f"{total:.1f} % is below the floor of {floor} % (`fail_under` in pyproject.toml).", file=sys.stderr)
    return int(total < floor)


if __name__ == "__main__":
    sys.exit(main())

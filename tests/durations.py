"""How long each test takes: a recorded table, from which `slow` is set, and the page of the slowest files.

`make durations` runs every test, and writes both anew: `tests/durations.json`, and the table in CONTRIBUTING.md. The
times are those of one machine with nothing else to do; what counts is which tests take long beside the others.
"""

import argparse
import collections
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "durations.json"
PAGE = ROOT / "CONTRIBUTING.md"
#: A test of more seconds is slow, and no part of `make test-fast`.
SLOW = 0.09
#: Shorter ones are not in the table.
_KEPT = 0.02
_MARKS = ("<!-- slowest files: make durations -->", "<!-- end -->")


def function_of(node: str) -> str:
    """The id of a test without its parameters: its cases take about the same time."""
    return node.partition("[")[0]


def load() -> dict[str, float]:
    """Test function → seconds for one of its cases; those that are missing take none to speak of."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def read(report: Path) -> dict[str, list[float]]:
    """Test function → the seconds of each of its cases, from a report of `pytest --junitxml`."""
    found = collections.defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        module, inside, tests = case.get("classname", "").partition(".Test")
        node = f"{module.replace('.', '/')}.py::{f'Test{tests}::' if inside else ''}{case.get('name')}"
        found[function_of(node)].append(float(case.get("time", 0)))
    return dict(found)


def slowest_files(cases: dict[str, list[float]], count: int = 10) -> Iterable[str]:
    """Lines of a table in Markdown."""
    seconds: collections.Counter[str] = collections.Counter()
    tests: collections.Counter[str] = collections.Counter()
    for name, times in cases.items():
        seconds[name.partition("::")[0]] += sum(times)  # type: ignore[assignment]
        tests[name.partition("::")[0]] += len(times)
    yield "| file | tests | seconds |"
    yield "| --- | ---: | ---: |"
    yield from (f"| `{name}` | {tests[name]} | {taken:.0f} |" for name, taken in seconds.most_common(count))


def write(cases: dict[str, list[float]]) -> None:
    """Write the table, and the slowest files into the page."""
    means = {name: round(sum(times) / len(times), 2) for name, times in sorted(cases.items())}
    kept = {name: mean for name, mean in means.items() if mean >= _KEPT}
    TABLE.write_text(json.dumps(kept, indent=0) + "\n")
    begin, end = map(re.escape, _MARKS)
    table = "\n".join((_MARKS[0], *slowest_files(cases), _MARKS[1]))
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: table, PAGE.read_text(), flags=re.DOTALL))
    fast = [times for name, times in cases.items() if means[name] <= SLOW]
    taken = [sum(map(sum, chosen)) for chosen in (fast, cases.values())]
    print(f"{sum(map(len, fast))} fast tests take {taken[0]:.0f} s, all take {taken[1]:.0f} s.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="what `pytest --junitxml` has written")
    write(read(parser.parse_args().report))

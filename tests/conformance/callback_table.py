"""What the tests have found out about each of Lightning's callbacks; printed at the end of a test run."""

MODES = ("fit", "fit with evaluation", "accumulation 2", "resume")
STATUS: dict[tuple[str, str], str] = {}


def lines() -> list[str]:
    """A line for each callback: what it does in each of the modes; then the reasons of refusals."""
    reasons = [status for status in STATUS.values() if status.startswith("refused")]
    rows = [["callback", *MODES]]
    for name in sorted({name for name, _ in STATUS}):
        cells = [STATUS.get((name, mode), "not run") for mode in MODES]
        rows.append([name, *(f"refused [{reasons.index(cell) + 1}]" if cell in reasons else cell for cell in cells)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(MODES) + 1)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return table + [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]

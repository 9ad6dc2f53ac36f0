"""Curves as lines of text, for terminals."""

from __future__ import annotations

from hftrainer.reporting.plot import PANELS, Line

#: Characters from low to high, and an arrow; the second pair for terminals that cannot write the first.
_SIGNS = (("▁▂▃▄▅▆▇█", "→"), ("_.-=+*#@", "to"))


def draw_text(drawn: list[Line], width: int, encoding: str) -> str:
    """A line for each curve, by panel: its shape between its lowest and highest value, its first and its last value.

    Args:
        drawn: the curves.
        width: characters in a line.
        encoding: of the terminal.
    """
    levels, arrow = next((signs for signs in _SIGNS if _can_write("".join(signs), encoding)), _SIGNS[-1])
    longest = max((len(line.label) for line in drawn), default=0)
    last = max((line.steps[-1] for line in drawn), default=0)
    parts = []
    for panel in PANELS:
        lines = [line for line in drawn if line.panel == panel]
        if lines:
            parts.append(f"{panel} by optimizer step, to {last:g}")
        for line in lines:
            ends = f"{line.values[0]:.4g} {arrow} {line.values[-1]:.4g}"
            room = max(min(width - longest - len(ends) - 6, 60), 8)
            parts.append(f"  {line.label:<{longest}}  {_shape(line, room, last, levels)}  {ends}")
    return "\n".join(parts)


def _can_write(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _shape(line: Line, room: int, last: float, levels: str) -> str:
    """Each character is the mean of the values in its share of the steps, or repeats the one before it."""
    cells: list[list[float]] = [[] for _ in range(room)]
    for step, value in zip(line.steps, line.values, strict=True):
        cells[min(int(step / max(last, 1) * room), room - 1)].append(value)
    low, high = min(line.values), max(line.values)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    shown = ""
    for cell in cells[: max(number for number, cell in enumerate(cells) if cell) + 1]:
        shown += levels[round((sum(cell) / len(cell) - low) * scale)] if cell else shown[-1:] or " "
    return shown.ljust(room)

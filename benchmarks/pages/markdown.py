"""Markdown pieces: a table, and figures as text. Knows no benchmark."""

from collections.abc import Iterable, Sequence

NOTHING, NOT_MEASURED = "-", "not measured"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_left: int = 1,
    ends_left: bool = False,
) -> list[str]:
    """Lines of a table: the first `num_left` columns to the left, the others to the right.

    `ends_left` is for a last column of words.

    A cell's own `|` would end it, so it is written as HTML has it; a line break becomes a space.
    """
    marks = ["---" if index < num_left else "---:" for index in range(len(columns))]
    if ends_left:
        marks[-1] = "---"
    return [_row(columns), f"|{'|'.join(marks)}|", *(_row(row) for row in rows)]


def number(value: float | None, digits: int = 0, suffix: str = "", nothing: str = NOTHING) -> str:
    """A figure with its thousands apart; `nothing` where there is none."""
    return nothing if value is None else f"{value:,.{digits}f}{suffix}"


def multiple(value: float | None, nothing: str = NOTHING) -> str:
    """A ratio to a baseline: 1.00x is no difference."""
    return number(value, 2, "x", nothing)


def percent(share: float | None, digits: int = 0) -> str:
    """A share of 1 in percent."""
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def signed_percent(share: float | None) -> str:
    """A difference in percent, with its sign."""
    return NOTHING if share is None else f"{100 * share:+.0f} %"


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, where both are there."""
    return above / below if above and below else None


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"

"""Result lines, read: one JSON object a line, several of which may be one run.

Owns reading the files, and what makes a run and a configuration. Does not know what the figures of
a benchmark mean.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]

# What every line has (graphseed.measure.provenance), and the two that name what was measured.
NEEDED = ("benchmark", "model", "date", "commit", "command", "device", "device_name")


class BadLine(ValueError):
    """A line that is no result: names file and line, and what to do."""


@dataclass(frozen=True)
class Run:
    """One run of one benchmark on one model: its lines, in the order in which they were written."""

    lines: tuple[Line, ...]
    where: str  # file and number of its first line

    @property
    def first(self) -> Line:
        """The line to ask for what all lines of a run share."""
        return self.lines[0]

    @property
    def configuration(self) -> tuple[str, str, str, str]:
        """What a later run must share to take this one's place: benchmark, model, device, command.

        The command is in it: other chunk sizes or other lengths are another question.
        """
        first = self.first
        return first["benchmark"], first["model"], first["device_name"], first["command"]


def read(folder: Path) -> list[Run]:
    """Every run of a folder's *.jsonl files, newest first. Raises BadLine.

    A missing folder or an empty file holds no runs. Of two runs of one time the one that was
    appended later is the newer.
    """
    found = [pair for path in sorted(folder.glob("*.jsonl")) for pair in _lines(path)]
    return sorted(reversed(_runs(found)), key=lambda run: run.first["date"], reverse=True)


def by_configuration(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of one configuration together, each list newest first, in the order of its newest."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.configuration, []).append(run)
    return list(groups.values())


@contextmanager
def blamed_on(run: Run) -> Iterator[None]:
    """Turn a field that is not there, or is something else, into a BadLine that names the run."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise BadLine(
            f"{run.where}: the {run.first['benchmark']} result of {run.first['model']} cannot be "
            f"shown ({type(error).__name__} {error}); expected the fields that its command writes "
            "today. Run it again, or take it out"
        ) from error


def _lines(path: Path) -> Iterable[tuple[str, Line]]:
    """Every line with where it is."""
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadLine(_said(where, f"is no JSON ({error.msg})")) from None
        if not isinstance(line, dict):
            raise BadLine(_said(where, f"is a {type(line).__name__}"))
        missing = [name for name in NEEDED if name not in line]
        if missing:
            raise BadLine(_said(where, f"has no {', '.join(missing)}"))
        yield where, line


def _said(where: str, what: str) -> str:
    return (
        f"{where} {what}; expected one JSON object a line, as --json appends it. Mend the line or "
        "take it out"
    )


def _runs(found: Iterable[tuple[str, Line]]) -> list[Run]:
    """Lines with the same provenance are one run; runs in the order of their first line."""
    groups: dict[tuple[object, ...], list[tuple[str, Line]]] = {}
    for where, line in found:
        groups.setdefault(tuple(line[name] for name in NEEDED), []).append((where, line))
    return [Run(tuple(line for _, line in group), group[0][0]) for group in groups.values()]

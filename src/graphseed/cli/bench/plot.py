"""`graphseed bench --plot`: prompt tokens per second and multiples over the prompt's length.

Owns the drawing, as an SVG file by matplotlib (the extra `plot`). Measures nothing.
"""

import importlib.util
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graphseed.capture import GraphseedError

if TYPE_CHECKING:
    from graphseed.cli.bench.output import Subject
    from graphseed.measure.bench.rows import BenchRow

Series = tuple[str, "list[BenchRow]"]  # what the rows have in common, and one row for each length
_PANEL_INCHES: Final = (5.2, 3.6)
# Told apart without colours too.
_MARKERS: Final = {"disabled": "x", "off": "o", "seed": "^", "resident": "s"}


class PlotLibraryMissing(GraphseedError):
    """--plot needs matplotlib, which is not installed."""


def require_library() -> None:
    """Raise PlotLibraryMissing where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotLibraryMissing(
            "--plot needs matplotlib, which is not installed: pip install 'graphseed[plot]', or "
            "leave --plot out"
        )


def draw(path: Path, done: "Iterable[tuple[Subject, Sequence[BenchRow]]]") -> None:
    """Draw the prompt rows: one line of panels for each model and setting, a curve a policy.

    Curves of multiples carry the policy's decode ratio in their legend.
    """
    from matplotlib.figure import Figure

    series = [one for subject, rows in done for one in _series(subject, rows)]
    width, height = _PANEL_INCHES
    figure: Any = Figure(figsize=(2 * width, height * len(series)), layout="constrained")
    panels = figure.subplots(len(series), 2, squeeze=False)
    for (title, rows), (left, right) in zip(series, panels, strict=True):
        lens = [row.test.prompt_len for row in rows]
        for policy in rows[0].figures:
            marker = _MARKERS.get(policy, ".")
            rates = [row.figures[policy].rates for row in rows]
            left.errorbar(
                lens, [statistics.fmean(rate) for rate in rates],
                yerr=[statistics.stdev(rate) if len(rate) > 1 else 0.0 for rate in rates],
                marker=marker, capsize=3, label=policy,
            )  # fmt: skip
            multiples = [row.prompt_multiple(policy) or math.nan for row in rows]
            right.plot(lens, multiples, marker=marker, label=f"{policy} ({_decode(rows, policy)})")
        left.set(title=title, ylabel="prompt tokens per second")
        left.set_ylim(bottom=0)
        right.set(title="multiple of policy off", ylabel="times as fast")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_xticks(lens, labels=[str(length) for length in lens])
            panel.minorticks_off()
            panel.set_xlabel("tokens of the prompt")
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})


def _decode(rows: "Sequence[BenchRow]", policy: str) -> str:
    """The decode ratio beside a curve: one figure, or the range of what the rows have."""
    ratios = [ratio for row in rows if (ratio := row.decode_ratio(policy)) is not None]
    shown = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return f"decode {' to '.join(shown)}"


def _series(subject: "Subject", rows: "Sequence[BenchRow]") -> list[Series]:
    found: dict[tuple[int, ...], list[BenchRow]] = {}
    for row in rows:
        test = row.test
        if test.prompt_len and not test.new_len:
            key = (test.depth_len, test.num_batch, test.num_ubatch, test.num_parallel)
            found.setdefault(key, []).append(row)
    series = []
    for (depth, batch, ubatch, parallel), alike in found.items():
        title = f"{subject.label}, ubatch {min(batch, ubatch)}"
        title += f", depth {depth}" if depth else ""
        title += f", {parallel} sequences" if parallel > 1 else ""
        by_len = {row.test.prompt_len: row for row in alike}
        series.append((title, [by_len[length] for length in sorted(by_len)]))
    return series

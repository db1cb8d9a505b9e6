"""How `graphseed attribute` shows what it found.

Owns the tables, the words around them and the JSON records. Measures nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from graphseed.capture import Driver
from graphseed.measure.attribute.attribution import Cell, ChunkGrid, Direct
from graphseed.measure.attribute.launch_gap import LaunchGap
from graphseed.measure.attribute.profile import Part
from graphseed.measure.attribute.sampling_profile import SUBMISSION, Place, SampledProcess
from graphseed.measure.attribute.verdict import verdict
from graphseed.measure.provenance import provenance
from graphseed.models.model import Model

MUCH_DRIFT: Final = 0.1  # between two measurements of the direct path, above which it is said

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def print_head(model: Model, driver: Driver, grid: ChunkGrid) -> None:
    """Say what will be measured."""
    out.print(
        f"model:  {model.name} ({model.num_parameters / 1e6:.0f} M parameters, {model.dtype})"
    )
    out.print(f"device: {driver.device}, {driver.description}")
    sizes, contexts = (", ".join(map(str, values)) for values in (grid.chunks, grid.contexts))
    out.print(f"chunks: {sizes} random tokens, behind {contexts} tokens")


def print_direct(cells: Sequence[Direct], device: str) -> None:
    """Print the direct path: its times, and what the host's went into."""
    out.print(_direct_table(cells, device))
    out.print(_host_table(cells, device))


def print_prediction(cells: Sequence[Direct], gap: LaunchGap) -> None:
    """Print what is predicted of the replay, term by term."""
    out.print(
        "\nlaunch gap, from replays of two near-empty decoders: a launch costs "
        f"{gap.launch_us:+.1f} us, a node {gap.gap_us:+.2f} us beyond its kernel"
    )
    for point in (gap.few, gap.many):
        out.print(
            f"  {point.num_nodes} nodes: replay {point.replay_ms:.3f} ms, without stage "
            f"{point.stage_ms:.3f} and busy {point.busy_ms:.3f}: {point.rest_ms:+.3f} ms"
        )
    table = _table(
        "replay, predicted before any graph of the model exists", "context", "chunk", "stage ms",
        "+ launch ms", "+ busy ms", "+ nodes", "x gap us", "= ms", "x direct",
    )  # fmt: skip
    for cell in cells:
        p = cell.prediction
        table.add_row(
            str(cell.context), str(cell.chunk), f"{p.stage_ms:.3f}", f"{p.launch_ms:.3f}",
            _ms(p.busy_ms), str(p.num_nodes), f"{p.gap_us:+.2f}", _ms(p.ms),
            f"{cell.predicted_multiple:.2f}",
        )  # fmt: skip
    out.print(table)


def print_outcome(cells: Sequence[Cell], device: str) -> list[str]:
    """Print prediction and measurement side by side, then the verdict; return its sentences."""
    table = _table(
        "replay, predicted and measured", "context", "chunk", "predicted ms", "x direct",
        "measured ms", "+-", "host ms", "x direct", "error", "graph nodes",
    )  # fmt: skip
    for cell in cells:
        table.add_row(*_outcome_cells(cell))
    table.caption = (
        "measured: replay and direct path in turn. error: predicted over measured ms, less 1."
    )
    table.caption_justify = "left"
    out.print(table)
    for cell in cells:
        if cell.drift is not None and abs(cell.drift) > MUCH_DRIFT:
            out.print(
                f"note: beside the replays a direct chunk of {cell.direct.chunk} tokens behind "
                f"{cell.direct.context} took {100 * cell.drift:+.0f} % against before; the machine "
                "was not as free both times"
            )
    if device == "cpu":
        out.print(
            "note: on a CPU the arithmetic is the wall clock, not the submission, so replay can "
            "save little; what it saves on a GPU is not shown here"
        )
    sentences = verdict(cells)
    for sentence in sentences:
        out.print(f"[bold]verdict:[/] {sentence}")
    return sentences


def print_samples(processes: Sequence[SampledProcess], seconds: int) -> None:
    """Print where the CPU samples of running processes were, side by side."""
    table = _table(
        f"CPU samples of running threads, in {seconds} s at most",
        "", *(f"pid {process.pid}, policy {process.policy}" for process in processes),
    )  # fmt: skip
    table.add_row(
        "[bold]submission[/]",
        *(f"[bold]{100 * process.submission_share:.1f} %[/]" for process in processes),
    )
    for place in Place:
        indent = "  " if place in SUBMISSION else ""
        table.add_row(
            f"{indent}{place.value}",
            *(f"{100 * process.share(place):.1f} %" for process in processes),
        )
    table.add_row("samples", *(str(process.num_samples) for process in processes))
    out.print(table)
    out.print(
        "Submission is every step, prompt and decode alike. Where the model runs on the CPU its "
        "arithmetic is in these samples; on a GPU it is not, and sampling waits for it."
    )


def as_record(
    model: Model,
    driver: Driver,
    grid: ChunkGrid,
    gap: LaunchGap,
    cells: Sequence[Cell],
    sentences: Sequence[str],
) -> dict[str, object]:
    """The whole result as one JSON line."""
    return provenance(driver.device, driver.description) | {
        "benchmark": "attribute",
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context_len": grid.context_len or None,
        "gap_us": gap.gap_us,
        "launch_us": gap.launch_us,
        "calibration": [asdict(point) for point in (gap.few, gap.many)],
        "cells": [_cell_record(cell) for cell in cells],
        "verdict": list(sentences),
    }


def samples_record(processes: Sequence[SampledProcess], seconds: int) -> dict[str, object]:
    """The samples as one JSON line."""
    return provenance("host", "the sampled processes' own") | {
        "benchmark": "attribute-pid",
        "seconds": seconds,
        "processes": [
            {
                "policy": process.policy,
                "samples": {place.value: process.samples.get(place, 0) for place in Place},
                "submission_share": process.submission_share,
            }
            for process in processes
        ],
    }


def _direct_table(cells: Sequence[Direct], device: str) -> Table:
    table = _table(
        "direct path", "context", "chunk", "wall ms", "+-", "runs", "host ms", "device busy ms",
        "idle", "kernels",
    )  # fmt: skip
    for cell in cells:
        table.add_row(
            str(cell.context), str(cell.chunk), _ms(cell.wall.median_ms), _ms(cell.wall.spread_ms),
            str(cell.wall.num_runs), _ms(cell.host_ms), _ms(cell.profile.busy_ms),
            f"{100 * cell.idle_share:.0f} %", str(cell.profile.num_kernels),
        )  # fmt: skip
    where = "union of kernels and copies; idle: of wall"
    if device == "cpu":
        where = (
            "time inside kernels, in a profiled run of its own; idle: of that run, which the "
            "profiler inflates, not of wall"
        )
    table.caption = (
        "medians; +-: between the quartiles. host: until all is submitted, without a profiler. "
        f"busy: {where}."
    )
    table.caption_justify = "left"
    return table


def _host_table(cells: Sequence[Direct], device: str) -> Table:
    parts = [part for part in Part if part is not Part.KERNEL or device == "cpu"]
    table = _table(
        "the host's time under the profiler, which inflates it: shares count, not milliseconds",
        "context", "chunk", "host ms", *(f"{part.value} ms" for part in parts),
    )  # fmt: skip
    for cell in cells:
        values = [
            f"{_ms(cell.profile.host_ms * cell.profile.share(part))} "
            f"({100 * cell.profile.share(part):.0f} %)"
            for part in parts
        ]
        table.add_row(str(cell.context), str(cell.chunk), _ms(cell.profile.host_ms), *values)
    return table


def _outcome_cells(cell: Cell) -> tuple[str, ...]:
    direct, replay = cell.direct, cell.replay
    told = (
        str(direct.context), str(direct.chunk), _ms(direct.prediction.ms),
        f"{direct.predicted_multiple:.2f}",
    )  # fmt: skip
    if replay.wall is None or cell.multiple is None or cell.error is None:
        return (*told, "not replayed", "", "", "", "", str(replay.num_nodes or ""))
    return (
        *told, _ms(replay.wall.median_ms), _ms(replay.wall.spread_ms), _ms(replay.host_ms),
        f"{cell.multiple:.2f}", f"{100 * cell.error:+.0f} %", str(replay.num_nodes),
    )  # fmt: skip


def _cell_record(cell: Cell) -> dict[str, object]:
    direct, replay, profile = cell.direct, cell.replay, cell.direct.profile
    wall, again = replay.wall, replay.direct
    return {
        "chunk": direct.chunk,
        "context": direct.context,
        "direct_ms": direct.wall.median_ms,
        "direct_spread_ms": direct.wall.spread_ms,
        "direct_runs": direct.wall.num_runs,
        "host_ms": direct.host_ms,
        "busy_ms": profile.busy_ms,
        "idle_share": direct.idle_share,
        "launches": profile.num_kernels,
        "nodes": profile.num_nodes,
        "profiled_host_ms": profile.host_ms,
        "host_split": {part.value: profile.share(part) for part in Part},
        "stage_ms": direct.prediction.stage_ms,
        "predicted_ms": direct.prediction.ms,
        "predicted_multiple": direct.predicted_multiple,
        "replay_ms": wall.median_ms if wall else None,
        "replay_spread_ms": wall.spread_ms if wall else None,
        "replay_runs": wall.num_runs if wall else 0,
        "replay_host_ms": replay.host_ms if wall else None,
        "replay_nodes": replay.num_nodes,
        "direct_beside_ms": again.median_ms if again else None,
        "direct_beside_spread_ms": again.spread_ms if again else None,
        "multiple": cell.multiple,
        "error": cell.error,
        "refused": replay.refused or None,
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _ms(value: float) -> str:
    """Three figures that mean something, whether microseconds or seconds."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"

"""Which families gain a large multiple and which a few percent: one table for each device.

Owns the summary at the top of docs/results.md: the newest measured multiple of each model, chunk
and context (attribute), the decode ratio beside it (bench), and how good the predictions were.
"""

from collections.abc import Sequence
from typing import Any

from pages.decode import DecodeRatios
from pages.markdown import NOT_MEASURED, NOTHING, multiple, number, signed_percent, table
from pages.results import Run, blamed_on

CHUNKS, CONTEXTS = (32, 128, 512, 2048), (0, 32768)
GOOD_PREDICTION = 0.15  # of the measured replay time

Cells = dict[tuple[int, int], dict[str, Any]]  # by chunk and context


def lines(runs: Sequence[Run], ratios: DecodeRatios) -> list[str]:
    """The whole section; nothing where no attribute result is there."""
    out: list[str] = []
    for device_name, models in _by_device(runs).items():
        out += [f"### {device_name}", "", *_device(device_name, models, ratios), ""]
    return ["## Which models gain, and how much", "", *out] if out else []


def error_of(cell: dict[str, Any]) -> float | None:
    """How far the predicted replay time was from the measured one, as a share of the latter."""
    predicted, replay = cell.get("predicted_ms"), cell.get("replay_ms")
    return predicted / replay - 1.0 if predicted is not None and replay else None


def multiple_of(cell: dict[str, Any]) -> str:
    """How many times faster the replayed chunk is; or why there is none."""
    said = cell.get("refused") or cell.get("error")
    if cell.get("multiple") is None and isinstance(said, str):
        return said
    return multiple(cell.get("multiple"), NOT_MEASURED)


def _by_device(runs: Sequence[Run]) -> dict[str, dict[str, Cells]]:
    """The newest cell of each place: runs come newest first."""
    found: dict[str, dict[str, Cells]] = {}
    for run in runs:
        if run.first["benchmark"] != "attribute":
            continue
        first = run.first
        cells = found.setdefault(first["device_name"], {}).setdefault(first["model"], {})
        with blamed_on(run):
            for line in run.lines:
                for cell in line["cells"]:
                    cells.setdefault((cell["chunk"], cell["context"]), cell)
    return found


def _device(device_name: str, models: dict[str, Cells], ratios: DecodeRatios) -> list[str]:
    rows = []
    for model in sorted(models, key=lambda name: (-_largest(models[name]), name)):
        for context in CONTEXTS:
            if any(at[1] == context for at in models[model]):
                shown = [_cell(models[model].get((chunk, context))) for chunk in CHUNKS]
                decode = multiple(ratios.of(model, device_name, context), NOT_MEASURED)
                rows.append([f"`{model}`", number(context), *shown, decode])
    columns = ("model", "context", *(f"chunk {chunk:,}" for chunk in CHUNKS), "decode")
    return [
        *table(columns, rows),
        "",
        "Each cell: how many times faster one replayed chunk is than the same chunk run directly "
        "in the same process, and by how much the replay time that was predicted before it missed "
        "the measured one. Decode: the lowest ratio to policy `off` of the replaying policies in "
        "the newest `bench` at that depth (1.00x: unchanged). A request gains at most this: the "
        "first chunk of an identity runs direct, its capture takes time, and queueing and sampling "
        "are not in it.",
        "",
        *_predictions(models),
    ]


def _largest(cells: Cells) -> float:
    return max((cell.get("multiple") or 0.0 for at, cell in cells.items() if at[1] == 0),
               default=0.0)  # fmt: skip


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return NOTHING
    error = error_of(cell)
    return multiple_of(cell) + ("" if error is None else f" ({signed_percent(error)})")


def _predictions(models: dict[str, Cells]) -> list[str]:
    """How many of the cells without context were predicted well; the others by name."""
    errors = {
        f"`{model}` chunk {chunk:,}": error
        for model, cells in models.items()
        for (chunk, context), cell in sorted(cells.items())
        if context == 0 and chunk in CHUNKS and (error := error_of(cell)) is not None
    }
    if not errors:
        return ["No prediction was measured against a replay at context 0."]
    missed = {name: error for name, error in errors.items() if abs(error) > GOOD_PREDICTION}
    told = ", ".join(f"{name} ({signed_percent(error)})" for name, error in missed.items())
    return [
        f"Predicted within {100 * GOOD_PREDICTION:.0f} % of the measured replay time: "
        f"{len(errors) - len(missed)} of {len(errors)} cells at context 0."
        + (f" Missed: {told}." if told else "")
    ]

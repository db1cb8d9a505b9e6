"""One run as an entry: which benchmark is shown by what.

Owns the choice, and the entry of a benchmark that has none of its own: nothing that was committed
is left out. The entries are in entries_engine (requests) and entries_steps (steps alone).
"""

from collections.abc import Callable, Mapping

from pages import entries_engine, entries_steps
from pages.decode import DecodeRatios
from pages.entry import Entry
from pages.markdown import table
from pages.results import NEEDED, Run, blamed_on

ENTRIES: Mapping[str, Callable[[Run, DecodeRatios], Entry]] = {
    "demo": entries_engine.demo,
    "long_prompt": entries_engine.long_prompt,
    "many": entries_engine.many,
    "load": entries_engine.load,
    "over_http": entries_engine.over_http,
    "attribute": entries_steps.attribute,
    "bench": entries_steps.bench,
    "verify": entries_steps.verify,
    "peers": entries_steps.peers,
}
ON_A_CPU = " On a CPU arithmetic is the wall clock, not submission: there is little to save."


def entry_of(run: Run, ratios: DecodeRatios) -> Entry:
    """The entry of one run. Raises BadLine when its lines lack what the benchmark always has."""
    show = ENTRIES.get(run.first["benchmark"], _unknown)
    with blamed_on(run):
        entry = show(run, ratios)
    if run.first["device"] == "cpu" and run.first["benchmark"] != "verify":
        return Entry(entry.body, entry.not_shown + ON_A_CPU, entry.headline)
    return entry


def _unknown(run: Run, ratios: DecodeRatios) -> Entry:
    """A benchmark without an entry of its own: its plain values, line by line."""
    rows = [
        (str(number), name, str(value))
        for number, line in enumerate(run.lines, 1)
        for name, value in line.items()
        if name not in NEEDED and isinstance(value, str | int | float)
    ]
    body = table(("line", "field", "value"), rows, num_left=2)
    return Entry(body, "whatever is not a plain value.", f"{len(run.lines)} lines")

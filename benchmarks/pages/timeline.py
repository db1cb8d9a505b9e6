"""docs/results.md: every configuration that was measured, newest first, gains and losses alike.

Owns the page: head, summary, and one entry for each configuration with what its newest run found;
earlier runs of it stay as a line each. What a benchmark's figures look like is in entries.
"""

from collections.abc import Sequence

from pages import summary
from pages.decode import DecodeRatios
from pages.entries import entry_of
from pages.results import Run, by_configuration

HEAD = """\
# Results

<!-- written by benchmarks/figures.py from benchmarks/results: change neither by hand -->

What was measured, newest first: one entry for each configuration (benchmark, model, device,
command), gains and losses alike, and what the figure does not show. A multiple above 1.00x is a
gain and below it a loss, against policy `off` of the same run where nothing else is said. Names
that begin with `random:` are published architectures with random weights: their speed is real,
their answers are not."""


def page(runs: Sequence[Run]) -> str:
    """The whole page. Runs come newest first."""
    ratios = DecodeRatios(runs)
    out = [HEAD, "", *summary.lines(runs, ratios), "## Timeline"]
    entries = by_configuration(runs)
    for group in entries:
        out += ["", *_entry(group, ratios)]
    if not entries:
        out += ["", "No result is committed yet."]
    return "\n".join(out) + "\n"


def _entry(group: Sequence[Run], ratios: DecodeRatios) -> list[str]:
    newest, *earlier = group
    first, entry = newest.first, entry_of(newest, ratios)
    versions = ", ".join(
        f"{name} {first[name]}" for name in ("python", "torch", "transformers") if name in first
    )
    dtype = [first["dtype"]] if first.get("dtype") else []
    out = [
        f"### {first['date'][:10]} · {first['benchmark']} · {first['model']} · "
        f"{first['device_name']}",
        "",
        "; ".join([f"{first['date']}, commit `{first['commit']}`", *dtype, versions]) + ".",
        "",
        "```",
        first["command"],
        "```",
        "",
        *entry.body,
        "",
        f"Not shown: {entry.not_shown}",
    ]
    if earlier:
        out += ["", "Earlier runs of the same command:", ""]
        for run in earlier:
            said = entry_of(run, ratios).headline
            out.append(f"- {run.first['date']}, commit `{run.first['commit']}`: {said}")
    return out

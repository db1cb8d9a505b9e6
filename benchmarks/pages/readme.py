"""README's tables, and what the demo shows on a CPU: the newest GPU results.

Owns the demo's table between its markers, the peers' between theirs, and the figures that the
package carries. Does not own README's other words.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pages.entries_steps import peers_table
from pages.markdown import NOT_MEASURED, multiple, number, table
from pages.results import Line, Run, blamed_on

DEMO = ("<!-- figures: begin -->", "<!-- figures: end -->")
PEERS = ("<!-- peers: begin -->", "<!-- peers: end -->")
DEMO_ROW = ("model", "device_name", "prompt_tokens", "num_ubatch", "dtype", "torch", "commit",
            "equal_bytes", "multiples", "policies")  # fmt: skip
CARRIED = ("model", "device_name", "prompt_tokens", "commit", "equal_bytes", "multiples")


class BadMarkers(ValueError):
    """A page whose markers do not come as a pair."""


def newest_demos(runs: Sequence[Run]) -> list[Line]:
    """The newest GPU demo of each model that ran `off` and both others, oldest first.

    Runs come newest first.
    """
    newest: dict[str, Line] = {}
    for run in runs:
        if run.first["benchmark"] != "demo" or run.first["device"] == "cpu":
            continue
        with blamed_on(run):
            row = {name: run.first[name] for name in DEMO_ROW}
            if {"off", "seed", "resident"} <= {policy["policy"] for policy in row["policies"]}:
                newest.setdefault(row["model"], row)
    return list(newest.values())[::-1]


def carried(rows: Sequence[Line]) -> str:
    """What the package carries: a few fields of each row, as JSON."""
    return json.dumps([{name: row[name] for name in CARRIED} for row in rows], indent=1) + "\n"


def filled(text: str, runs: Sequence[Run]) -> str:
    """README's text with its tables as they are now. Raises BadMarkers.

    A table whose markers are not in the text is left out.
    """
    text = between(text, DEMO, demo_table(newest_demos(runs)))
    return between(text, PEERS, newest_peers(runs))


def between(text: str, markers: tuple[str, str], table_text: str) -> str:
    """The text with what stands between two markers replaced."""
    begin, end = markers
    if begin not in text and end not in text:
        return text
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise BadMarkers(f"expected {begin} and {end} once each, in this order; mend the page")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    inside = f"\n{table_text}\n" if table_text else "\n"
    return f"{before}{begin}{inside}{end}{after}"


def demo_table(rows: Sequence[Line]) -> str:
    """Policies beside each other, one row a model."""
    shown = [_demo_row(row) for row in rows]
    columns = ("model", "off, prompt tok/s", "seed", "resident, 2nd prompt", "one chunk, replayed",
               "decode, seed", "bytes")  # fmt: skip
    lines = table(columns, shown, ends_left=True)
    if rows:
        commits = _all(f"`{row['commit']}`" for row in rows)
        lens = _all(f"{row['prompt_tokens']:,}" for row in rows)
        lines += [
            "",
            f"{lens}-token prompt, chunks of {_all(row['num_ubatch'] for row in rows)}, "
            f"{_all(row['dtype'] for row in rows)}, {_all(row['device_name'] for row in rows)}, "
            f"torch {_all(row['torch'] for row in rows)}, commit "
            f"{commits}. Multiples of policy `off` in the same run; the decode column is "
            "the ratio of median step times (1.00x: unchanged). Reproduce a row with",
            "",
            "```",
            f"graphseed demo -m {rows[0]['model']} --device cuda",
            "```",
        ]
    return "\n".join(lines)


def _all(values: Iterable[object]) -> str:
    """Each value once: rows of one table may come from several runs."""
    return ", ".join(dict.fromkeys(map(str, values)))


def newest_peers(runs: Sequence[Run]) -> str:
    """The newest GPU run of each model beside its peers, newest first; empty without one."""
    newest: dict[str, Run] = {}
    for run in runs:
        if run.first["benchmark"] == "peers" and run.first["device"] != "cpu":
            newest.setdefault(run.first["model"], run)
    parts: list[str] = []
    for run in newest.values():
        with blamed_on(run):
            parts += _peers_part(run)
    return "\n".join(parts[:-1])


def _peers_part(run: Run) -> list[str]:
    first = run.first
    return [
        f"`{first['model']}`, {first['prompt_tokens']} prompt tokens and "
        f"{first['new_tokens']} decode steps, {first['device_name']}, torch {first['torch']}, "
        f"commit `{first['commit']}`; steps alone, each peer in a process of its own. The "
        "commands of all of them are in [docs/results.md](docs/results.md); this runs them:",
        "",
        "```",
        first["command"],
        "```",
        "",
        *peers_table(run.lines, has_remarks=False),
        "",
    ]


def _demo_row(row: dict[str, Any]) -> tuple[str, ...]:
    ratios = row["multiples"]
    off = next(policy for policy in row["policies"] if policy["policy"] == "off")
    total_ms = sum(measured["prompt_ms"] for measured in off["passes"])
    return (
        f"`{row['model']}`",
        number(1e3 * row["prompt_tokens"] * len(off["passes"]) / total_ms),
        multiple(ratios.get("seed prompt 2")),
        multiple(ratios.get("resident prompt 2")),
        multiple(ratios.get("seed replayed observation")),
        multiple(ratios.get("seed decode"), NOT_MEASURED),
        "equal" if row["equal_bytes"] else "DIFFER",
    )

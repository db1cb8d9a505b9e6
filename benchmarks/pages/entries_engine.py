"""Entries of what ran through the engine: whole requests.

Owns the tables of demo, long_prompt, many, load and over_http.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from pages.decode import DecodeRatios
from pages.entry import Entry, bytes_said
from pages.markdown import NOT_MEASURED, multiple, number, percent, ratio, table
from pages.results import Run


def demo(run: Run, ratios: DecodeRatios) -> Entry:
    """The same prompt twice under every policy."""
    line = run.first
    off = next((p for p in line["policies"] if p["policy"] == "off"), None)
    off_ms = statistics.median(p["prompt_ms"] for p in off["passes"]) if off else None
    rows = []
    for policy in line["policies"]:
        decode = ratio(off and off["decode_step_ms"], policy["decode_step_ms"])
        counts = policy["counts"]["prompt"]
        for index, measured in enumerate(policy["passes"], 1):
            rows.append(
                (
                    policy["policy"],
                    str(index),
                    number(measured["prompt_ms"], 1),
                    number(1e3 * line["prompt_tokens"] / measured["prompt_ms"]),
                    multiple(ratio(off_ms, measured["prompt_ms"])),
                    multiple(decode, NOT_MEASURED),
                    *(str(counts[name]) for name in ("seeded", "replayed", "direct", "refused")),
                )
            )
    columns = (
        "policy", "pass", "prompt ms", "prompt tok/s", "x off", "decode x off", "seeded",
        "replayed", "direct", "refused",
    )  # fmt: skip
    body = [
        f"{line['prompt_tokens']:,} prompt tokens in chunks of {line['num_ubatch']}, "
        f"{line['new_tokens']} new tokens. Bytes of logits and KV: "
        f"{bytes_said(line['equal_bytes'])}. Counts are of both passes.",
        "",
        *table(columns, rows),
        *_listed("Finding", line["findings"]),
    ]
    return Entry(
        body,
        "spread: two passes are none, and where those of `off` lie apart the multiples are as "
        "uncertain. No waiting for a slot, one request. The multiple is mostly the host's time: "
        "another host has another multiple, and fewer kernels in a layer would make "
        "both sides faster and the multiple smaller. Decoding between the passes releases what "
        "`seed` captured, so its second pass seeds again.",
        _demo_headline(line),
    )


def _demo_headline(line: dict[str, Any]) -> str:
    found = line["multiples"]
    return (
        f"seed {multiple(found.get('seed prompt 2'))}, resident second prompt "
        f"{multiple(found.get('resident prompt 2'))}, one chunk replayed "
        f"{multiple(found.get('seed replayed observation'))}; decode "
        f"{multiple(found.get('seed decode'), NOT_MEASURED)}; bytes "
        f"{bytes_said(line['equal_bytes'])}"
    )


def long_prompt(run: Run, ratios: DecodeRatios) -> Entry:
    """One executable for every position, and two ways in which that is lost."""
    rows = []
    for line in run.lines:
        counts = line["counts"]["prompt"]
        rows.append(
            (
                line["variant"],
                line["policy"],
                f"{line['requests']} x {line['prompt_tokens']:,}",
                number(line["seconds"], 2),
                *(str(counts[name]) for name in ("seeded", "replayed", "direct", "released")),
                ", ".join(f"`{field}`" for field in line["alarm_fields"] if field) or "-",
                NOT_MEASURED,
            )
        )
    columns = (
        "variant", "policy", "prompts", "seconds", "seeded", "replayed", "direct", "released",
        "alarm names", "decode",
    )  # fmt: skip
    digests = {
        (line["prompt_tokens"], digest) for line in run.lines for digest in line["kv_sha256"]
    }
    lengths = {line["prompt_tokens"] for line in run.lines}
    equal = bytes_said(len(digests) == len(lengths))
    best = max(run.lines, key=lambda line: line["counts"]["prompt"]["replayed"])
    counts = best["counts"]["prompt"]
    return Entry(
        [*table(columns, rows, num_left=2), "", f"KV bytes over variants of one length: {equal}."],
        "how fast the prompt is: the seconds include reading back and hashing all KV, which is "
        "most of them. Decode is a few steps and is not timed.",
        f"{best['variant']}: {counts['seeded']} seeded, {counts['replayed']} replayed; KV {equal}",
    )


def many(run: Run, ratios: DecodeRatios) -> Entry:
    """One client's first token, then many clients in closed loop."""
    body: list[str] = []
    for line in run.lines:
        if line["kind"] == "first token":
            body += [*_first_token(line), ""]
    loads = [line for line in run.lines if line["kind"] == "load"]
    rows = []
    for line in loads:
        off = _off_of(loads, line)
        rows.append(_load_row(line, line["figures"], off["figures"] if off else {}))
    if not loads:
        return Entry(
            body[:-1],
            "spread: these are medians over the prompts of each policy. Of decoding nothing is "
            "measured: an answer is one token.",
            _first_token_headline(run.lines[0]),
        )
    equal = bytes_said(all(line["equal_bytes"] for line in loads))
    body += [*table(LOAD_COLUMNS, rows), "", f"Recorded plans against graphs disabled: {equal}."]
    return Entry(
        body,
        "spread: these are medians over the requests of one load of mixed lengths, once for each "
        "policy. A first token that comes later because streams run faster shows as waiting.",
        f"{_first_token_headline(run.lines[0])}; {len(loads)} loads; bytes {equal}",
    )


def _first_token_headline(line: dict[str, Any]) -> str:
    """What one client's first token takes and what the engine adds, of the policy `resident`."""
    row = line.get("resident")
    if line["kind"] != "first token" or row is None:
        return "no first token alone"
    added = row.get("added_ms", row["ttft_ms"] - row["step_ms"])
    bare = row.get("added_to_bare_ms")
    to_bare = "" if bare is None else f", {bare:.2f} ms to a bare step"
    return f"resident first token {row['ttft_ms']:.2f} ms, {added:.2f} ms added{to_bare}"


LOAD_COLUMNS = (
    "policy", "clients", "queue ms", "prompt ms", "x off", "first token ms", "decode tok/s",
    "decode x off", "all tok/s", "prompt replayed", "bytes",
)  # fmt: skip


def load(run: Run, ratios: DecodeRatios) -> Entry:
    """Many clients in closed loop: `graphseed bench --load`."""
    line = run.first
    rows = []
    for row in line["rows"]:
        off = _off_of(line["rows"], row)
        rows.append(_load_row(row, _medians(row), _medians(off) if off else {}))
    equal = bytes_said(line["equal_bytes"])
    body = [*table(LOAD_COLUMNS, rows), *_listed("Finding", line.get("findings") or ())]
    return Entry(
        body,
        "spread: these are medians over the requests of one load of mixed lengths, once for each "
        "policy (the 95th percentiles are in the result). A first token that comes later because "
        "streams run faster shows as waiting, not as a slower prompt.",
        f"{len(rows)} loads; bytes {equal}",
    )


def over_http(run: Run, ratios: DecodeRatios) -> Entry:
    """What a client of the server waits for, and what HTTP adds to Engine.stream."""
    rows = []
    for line in run.lines:
        off = _off_of(run.lines, line) or {}
        rate, is_alone = "decode_tokens_per_second", "added_ms" in line
        rows.append(
            (
                line["policy"],
                str(line["clients"]),
                f"{line['prompt_tokens']:,}",
                number(line["ttft_ms"], 2),
                multiple(ratio(off.get("ttft_ms"), line["ttft_ms"])),
                number(line["queue_ms"], 2),
                number(line["prompt_ms"], 2),
                number(line["stream_ttft_ms"], 2) if is_alone else NOT_MEASURED,
                number(line["added_ms"], 2) if is_alone else NOT_MEASURED,
                number(line["added_outside_engine_ms"], 2) if is_alone else NOT_MEASURED,
                number(line["all_prompt_tokens_per_second"]),
                number(line[rate], 1),
                multiple(ratio(line[rate], off.get(rate)), NOT_MEASURED),
                percent(line["hit_rate"]),
            )
        )
    columns = (
        "policy", "clients", "prompt tokens", "first token ms", "x off", "queue ms", "prompt ms",
        "Engine.stream ms", "HTTP adds ms", "outside the engine", "prompt tok/s of all",
        "decode tok/s", "decode x off", "prompt replayed",
    )  # fmt: skip
    alone = [line for line in run.lines if "added_ms" in line]
    equal = bytes_said(
        all(line["equal_answers"] and line["equal_to_off"] for line in alone) if alone else None
    )
    replayed = [line["added_ms"] for line in alone if line["hit_rate"] == 1.0]
    added = f"beside a replay HTTP adds {max(replayed):.2f} ms at most; " if replayed else ""
    # Up to b358c40ed7cb all prompts ran through Engine.stream, and then all of them over HTTP.
    is_paired = "compared" in run.first
    compared = (
        "the median of the differences prompt by prompt" if is_paired
        else "the difference of two medians of loads that ran one after the other"
    )  # fmt: skip
    body = [
        f"{run.first['new_tokens']} new tokens for each prompt, {run.first['requests']} prompts a "
        f"load, {run.first['prompts']} in the body, server and clients on one machine over "
        "loopback.",
        "",
        *table(columns, rows),
        "",
        "Tokens of one client's answers, over HTTP against Engine.stream and over policies: "
        f"{equal}.",
    ]
    return Entry(
        body,
        "a network, TLS, and what a client's own HTTP library adds; texts are made tokens on both "
        f"sides. These are medians over the requests of one load; `HTTP adds` is {compared}, and "
        "where the direct path runs (`off`, a seed) the host's speed changes by more than that: "
        "what is outside the engine does not hang on it. Under `seed` a prompt of one chunk never "
        "meets its own graph again: decoding after it releases the graph, and the next prompt pays "
        "for another capture.",
        f"{added}answers {equal}",
    )


def _medians(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a load's row, of those that are spreads their medians."""
    names = ("queue_ms", "prompt_ms", "ttft_ms", "decode_tokens_per_second")
    return {name: row[name]["p50"] for name in names} | {
        "all_tokens_per_second": row["all_tokens_per_second"]
    }


def _off_of(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any] | None:
    """Policy off at the same number of clients, and the same length where that is fixed."""
    same = ("clients", "prompt_tokens")
    for other in rows:
        if other["policy"] == "off" and all(other.get(name) == row.get(name) for name in same):
            return other
    return None


def _load_row(
    row: dict[str, Any], figures: dict[str, Any], base: dict[str, Any]
) -> tuple[str, ...]:
    rate = "decode_tokens_per_second"
    return (
        row["policy"],
        str(row["clients"]),
        number(figures["queue_ms"], 2),
        number(figures["prompt_ms"], 2),
        multiple(ratio(base.get("prompt_ms"), figures["prompt_ms"])),
        number(figures["ttft_ms"], 2),
        number(figures[rate], 1),
        multiple(ratio(figures[rate], base.get(rate)), NOT_MEASURED),
        number(figures["all_tokens_per_second"]),
        percent(row["hit_rate"]["prompt"]),
        bytes_said(row["equal_bytes"]),
    )


def _first_token(line: dict[str, Any]) -> list[str]:
    """What the engine adds to the bare step of one client's prompt."""
    found = {name: line[name] for name in ("off", "seed", "resident") if name in line}
    off = found.get("off")
    rows = [
        (
            name,
            number(row["ttft_ms"], 2),
            multiple(ratio(off and off["ttft_ms"], row["ttft_ms"])),
            number(row["step_ms"], 2),
            number(row.get("added_ms", row["ttft_ms"] - row["step_ms"]), 2),
            number(row["bare_ms"], 2) if "bare_ms" in row else NOT_MEASURED,
            number(row["added_to_bare_ms"], 2) if "bare_ms" in row else NOT_MEASURED,
            NOT_MEASURED,
        )
        for name, row in found.items()
    ]
    columns = (
        "policy", "first token ms", "x off", "its step ms", "added ms", "bare step ms", "added ms",
        "decode",
    )  # fmt: skip
    rest = f", {line['rest_ms']:.0f} ms after the last answer" if "rest_ms" in line else ""
    said = f"One client, {line['prompt_tokens']} prompt tokens, one new token{rest}:"
    return [said, "", *table(columns, rows)]


def _listed(what: str, found: Sequence[str]) -> list[str]:
    return ["", *(f"- {what}: {text}" for text in found)] if found else []

"""Entries of what ran steps alone: no queue, no sampling, no text.

Owns the tables of attribute, bench, verify and peers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pages.decode import DecodeRatios
from pages.entry import Entry, bytes_said
from pages.markdown import (
    NOT_MEASURED,
    NOTHING,
    multiple,
    number,
    percent,
    ratio,
    signed_percent,
    table,
)
from pages.results import Run
from pages.summary import error_of, multiple_of


def attribute(run: Run, ratios: DecodeRatios) -> Entry:
    """Where the host's time goes, what replay was predicted to take, and what it took."""
    line = run.first
    rows = []
    for cell in line["cells"]:
        decode = ratios.of(line["model"], line["device_name"], cell["context"])
        rows.append(
            (
                number(cell["chunk"]),
                number(cell["context"]),
                number(cell.get("direct_ms"), 2),
                number(cell.get("direct_spread_ms"), 2),
                number(cell.get("host_ms"), 2),
                _split(cell.get("host_split")),
                number(cell.get("busy_ms"), 2),
                percent(cell.get("idle_share")),
                number(cell.get("launches")),
                number(cell.get("predicted_ms"), 2),
                number(cell.get("replay_ms"), 2),
                signed_percent(error_of(cell)),
                multiple_of(cell),
                multiple(decode, NOT_MEASURED),
            )
        )
    columns = (
        "chunk", "context", "direct ms", "spread", "host ms", "python / dispatcher / driver",
        "busy ms",
        "idle", "launches", "predicted ms", "replay ms", "missed by", "multiple", "decode (bench)",
    )  # fmt: skip
    body = [
        *table(columns, rows, num_left=0),
        "",
        f"Calibrated on this device: {number(line.get('gap_us'), 2)} us from one node to the next, "
        f"{number(line.get('launch_us'), 1)} us to launch{_calibration(line)}. "
        f"Verdict: {_joined(line['verdict'])}",
    ]
    best = max((cell.get("multiple") or 0.0 for cell in line["cells"]), default=0.0)
    idle = " So is the idle share." if line["device"] == "cpu" and "calibration" in line else ""
    return Entry(
        body,
        "requests: each figure is one chunk from an idle device, without queue, sampling or text. "
        "The split of the host's time is from a profiled run, which the profiler makes slower."
        f"{idle}",
        f"multiples up to {multiple(best)}; decode {NOT_MEASURED} here",
    )


def _calibration(line: Mapping[str, Any]) -> str:
    """What the gap was found with: two decoders; in older results a chain of one-operation nodes.

    Nothing where the result does not say.
    """
    if points := line.get("calibration"):
        said = (
            f"{number(point['num_nodes'])} nodes in {number(point['replay_ms'], 3)} ms, busy "
            f"{number(point['busy_ms'], 3)} and stage {number(point['stage_ms'], 3)}"
            for point in points
        )
        return f", from two near-empty decoders: {'; '.join(said)}"
    if line.get("node_us") is None:
        return ""
    return (
        f", from elementwise kernels: a node of {number(line['node_us'], 2)} us, the kernel alone "
        f"{number(line.get('kernel_us'), 2)}"
    )


def _joined(said: str | Sequence[str]) -> str:
    return said if isinstance(said, str) else "; ".join(said)


def _split(split: Mapping[str, float] | None) -> str:
    total = sum(split.values()) if split else 0.0
    if not split or not total:
        return NOTHING
    shares = (100 * split[name] / total for name in ("python", "dispatcher", "driver"))
    return " / ".join(f"{share:.0f}" for share in shares) + " %"


def bench(run: Run, ratios: DecodeRatios) -> Entry:
    """Every test under every policy, prompt and decode side by side."""
    line = run.first
    rows = []
    for row in line["rows"]:
        for name, found in row["policies"].items():
            captured = sum(found.get(field) or 0.0 for field in ("capture_ms", "instantiate_ms"))
            rows.append(
                (
                    _test(row),
                    name,
                    f"{number(found['tokens_per_second'], 1)} ± {number(found['stddev'], 1)}",
                    multiple(found.get("prompt_multiple")),
                    multiple(found.get("decode_ratio"), NOT_MEASURED),
                    percent(found.get("hit_rate")),
                    number(captured, 1),
                    number((found.get("bytes") or 0) / 2**20, 1),
                    percent(found.get("ceiling_share"), 1),
                    bytes_said(row.get("equal_bytes")),
                )
            )
    columns = (
        "test", "policy", "tok/s", "prompt x off", "decode x off", "replayed", "capture ms",
        "MiB", "of the ceiling", "bytes",
    )  # fmt: skip
    ceiling = line.get("ceiling") or {}
    body = [
        f"Ceiling of this device: {number(ceiling.get('tflops'), 2)} TFLOP/s in the model's dtype, "
        f"{number(ceiling.get('gbytes_per_second'))} GB/s. Capture: capture and instantiation "
        "together.",
        "",
        *table(columns, rows, num_left=2),
        *_beside(line["rows"]),
    ]
    return Entry(
        body,
        "queueing, sampling, text. Where prompts follow each other without a decode step (`pp`), "
        "`seed` replays them; a decode step in between releases its prompt graphs, so what a "
        "request gains under `seed` is in its further chunks. `resident` keeps them.",
        _bench_headline(line["rows"]),
    )


def _beside(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the ratios of some rows are of, where that is not the row itself."""
    of_others = {
        row["decode_of"]: None
        for row in rows
        if row["n_prompt"] and not row["n_gen"] and row.get("decode_of")
    }
    drifting = [_test(row) for row in rows if not row.get("side_by_side", True)]
    said = []
    if of_others:
        said.append(f"Decode beside a prompt alone (pp): of {', '.join(of_others)}.")
    if drifting:
        said.append(
            "Memory did not hold all policies at once; one after another, so that drift is in the "
            f"ratios, ran {', '.join(drifting)}."
        )
    return ["", " ".join(said)] if said else []


def _test(row: Mapping[str, Any]) -> str:
    more = {"n_ubatch": "ub", "n_parallel": "np"}
    usual = {"n_ubatch": 512, "n_parallel": 1}
    said = [f"{more[key]} {row[key]}" for key in more if row.get(key) not in (None, usual[key])]
    return ", ".join([str(row["test"]), *said])


def _bench_headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Best and worst prompt multiple, each with the decode ratio beside it."""
    found = [
        (policy["prompt_multiple"], policy.get("decode_ratio"), f"{name} {_test(row)}")
        for row in rows
        for name, policy in row["policies"].items()
        if policy.get("prompt_multiple") is not None and name not in ("off", "disabled")
    ]
    if not found:
        return f"{len(rows)} tests, no prompt multiple"
    ends = [max(found, key=lambda one: one[0]), min(found, key=lambda one: one[0])]
    return "; ".join(
        f"{which} {multiple(gain)} (decode {multiple(decode, NOT_MEASURED)}) in {where}"
        for which, (gain, decode, where) in zip(("best", "worst"), ends, strict=True)
    )


def verify(run: Run, ratios: DecodeRatios) -> Entry:
    """The same plans under every policy, compared byte by byte."""
    line = run.first
    names = ("seeded", "replayed", "refused", "released")
    rows = [
        (policy, *(number(counts.get(name)) for name in names))
        for policy, counts in line["policies"].items()
    ]
    unproven = line.get("unproven") or ()
    equal = "equal" if line["is_equal"] else "DIFFER"
    equal += f", nothing proven of {', '.join(unproven)}" if unproven else ""
    what = f"{line['num_cases']} cases in {line['rounds']} rounds, {line['num_steps']:,} steps"
    against = line.get("against_hf")
    body = [
        f"{what}, beside graphs disabled: bytes {equal}. Counts are of prompt graphs.",
        "",
        *table(("policy", *names), rows),
        "",
        *(f"- Finding: {found}" for found in line.get("findings") or ()),
        *(f"- Difference: {_plain(found)}" for found in line["differences"]),
        *([f"- Against the Hugging Face forward: {_plain(against)}"] if against else []),
    ]
    return Entry(
        body,
        "other lengths, weights, devices and versions: the bytes were compared for these plans on "
        "this device. Speed is not measured.",
        f"{what}: {equal}",
    )


def _plain(found: Mapping[str, Any] | str) -> str:
    """A text as it is; of an object its plain values."""
    if isinstance(found, str):
        return found
    shown = {key: value for key, value in found.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())


PEER_COLUMNS = ("peer", "prompt tok/s", "x graphseed off", "decode tok/s", "x graphseed off",
                "ready after", "version and remarks")  # fmt: skip


def peers(run: Run, ratios: DecodeRatios) -> Entry:
    """Others beside graphseed, each in a process of its own."""
    first = run.first
    commands = [f"{line['peer']}: `{line['peer_command']}`" for line in run.lines]
    body = [
        f"{first['prompt_tokens']} prompt tokens, then {first['new_tokens']} decode steps; "
        "prompts alone and decode alone, each peer in a process of its own, one after another.",
        "",
        *peers_table(run.lines),
        "",
        "Each peer's command:",
        "",
        *(f"- {command}" for command in commands),
    ]
    able = [line for line in run.lines if not line["error"]]
    best = max(able, key=lambda line: line["prompt_tokens_per_second"], default=None)
    return Entry(
        body,
        "serving, and how much the host drifts from one process to the next: that is in the "
        "ratios. Steps alone are timed, but for continuous batching, whose scheduling and greedy "
        "sampling are in its figures. `seed` replays here because no decode step stands between "
        "the prompts; a decode step releases its prompt graphs. llama.cpp has other kernels and "
        "its own weight format.",
        f"{len(able)} of {len(run.lines)} peers ran"
        + (f"; fastest prompt: {best['peer']}, decode beside it "
           f"{number(best['decode_tokens_per_second'], 1)} tok/s" if best else ""),
    )  # fmt: skip


def peers_table(lines: Sequence[Mapping[str, Any]], has_remarks: bool = True) -> list[str]:
    """The table of one run's peers; those that could not run say why, with or without remarks."""
    base = next((x for x in lines if x["peer"] == "graphseed off" and not x["error"]), {})
    prompt, decode = "prompt_tokens_per_second", "decode_tokens_per_second"
    rows = []
    for line in lines:
        if line["error"]:
            rows.append((line["peer"], *[NOTHING] * 5, f"did not run: {line['error']}"))
            continue
        said = (line["peer_version"], line.get("note") if has_remarks else None)
        rows.append(
            (
                line["peer"],
                f"{number(line[prompt])} ± {number(line['prompt_stddev'])}",
                multiple(ratio(line[prompt], base.get(prompt))),
                number(line[decode], 1),
                multiple(ratio(line[decode], base.get(decode)), NOT_MEASURED),
                number(line["setup_seconds"], 1, " s"),
                "; ".join(filter(None, said)),
            )
        )
    columns = PEER_COLUMNS if has_remarks else (*PEER_COLUMNS[:-1], "version")
    return table(columns, rows, ends_left=True)

"""How a load is shown, and what is said about it in words.

Owns the table, the findings and the JSON of `graphseed bench --load`. Measures nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from rich.console import Console

from graphseed.capture.driver import Driver
from graphseed.capture.identity import Namespace
from graphseed.cli.bench.load import NUM_PROVEN
from graphseed.measure.load import Change, LoadResult, change_of, spread_of
from graphseed.measure.provenance import provenance
from graphseed.models.model import Model

if TYPE_CHECKING:
    from graphseed.cli.bench.load import LoadSettings

REPLAYING: Final = ("seed", "resident")
BASELINE: Final = "off"
COLUMNS: Final = (
    "policy", "clients", "queue ms p50", "p95", "prompt ms p50", "p95", "TTFT ms p50", "p95",
    "decode tok/s per stream", "all tok/s", "hits prompt/decode", "seeded prompt/decode",
    "longest capture beside a stream ms", "equal bytes",
)  # fmt: skip
LEGEND: Final = (
    "queue: submission to first chunk staged, a wait for a slot or for the running step. prompt: "
    "from there to the first token, decode steps between its chunks included. TTFT: both.\n"
    "hits, seeded: of the measured requests, the warm-up left out. longest capture: what policy "
    "resident held streams up with, warm-up included; a capture inside a step is in the step's "
    "time. equal bytes: logits and K/V of the first "
    f"{NUM_PROVEN} requests, run once more with their plans on record, and of those plans with "
    "graphs disabled.\n"
    "averages below are over the same requests under both policies, which is not how percentiles "
    "add up; a difference is called one beyond two standard errors, and requests of one load "
    "depend on each other: run it again to see what repeats."
)


def print_head(model: Model, driver: Driver, settings: "LoadSettings") -> None:
    """Say what will be run, on stderr where stdout is for a program."""
    lens = ",".join(str(length) for length in settings.prompt_lens)
    console = Console(stderr=settings.output != "md", highlight=False, soft_wrap=True)
    console.print(
        f"model:  {model.name} ({model.num_parameters / 1e6:.0f} M parameters, {model.dtype})\n"
        f"device: {driver.device}, {driver.description}\n"
        f"load:   {settings.num_requests} requests of {lens} prompt tokens and "
        f"{settings.num_new_tokens} new ones, {settings.num_parallel} slots of "
        f"{settings.context_len} tokens\n",
        markup=False,
    )


def print_report(settings: "LoadSettings", results: Sequence[LoadResult]) -> list[str]:
    """Print the table and return the findings; what no program reads goes to stderr."""
    out = Console(highlight=False, soft_wrap=True)
    notes = Console(stderr=settings.output != "md", highlight=False, soft_wrap=True)
    if settings.output == "md":
        out.print(table_of(results), markup=False)
        notes.print(f"\n{LEGEND}\n")
    found = findings(results)
    for finding in found:
        notes.print(f"finding: {finding}", markup=False)
    records = [row_record(result) for result in results]
    if settings.output == "json":
        out.print(json.dumps(records), markup=False)
    elif settings.output == "jsonl":
        for record in records:
            out.print(json.dumps(record), markup=False)
    return found


def table_of(results: Sequence[LoadResult]) -> str:
    """Markdown, a line for each policy at each number of clients."""
    rows = [COLUMNS, *map(_cells, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths  # the first column is words, the others are figures
    rule = (":".ljust(first, "-"), *(":".rjust(width, "-") for width in others))
    return "\n".join(
        f"| {line[0].ljust(first)} | "
        + " | ".join(cell.rjust(width) for cell, width in zip(line[1:], others, strict=True))
        + " |"
        for line in (rows[0], rule, *rows[1:])
    )


def _cells(result: LoadResult) -> tuple[str, ...]:
    run = result.run
    spreads = [spread_of(values) for values in (run.queue_ms, run.prompt_ms, run.ttft_ms)]
    return (
        result.policy,
        str(result.num_clients),
        *(f"{figure:,.2f}" for spread in spreads for figure in (spread.p50, spread.p95)),
        f"{spread_of(run.decode_rates).p50:,.1f}",
        f"{run.all_rate:,.1f}",
        "/".join(f"{result.hit_rate(space):.2f}" for space in Namespace),
        "/".join(str(result.counts[space].seeded) for space in Namespace),
        f"{result.longest_capture_beside_stream_ms:.0f}",
        "yes" if result.proof.is_equal else "NO",
    )


def findings(results: Sequence[LoadResult]) -> list[str]:
    """What the figures say, in words: bytes, then what became of TTFT, then what never replayed."""
    found = [_differing(result) for result in results if not result.proof.is_equal]
    baselines = {r.num_clients: r for r in results if r.policy == BASELINE}
    for result in results:
        baseline = baselines.get(result.num_clients)
        if baseline is not None and result is not baseline:
            found.append(compared(baseline, result))
        if result.policy in REPLAYING and not result.counts[Namespace.PROMPT].replayed:
            found.append(f"{_title(result)}: no prompt graph replayed: {_why_no_hits(result)}")
        elif result.policy in REPLAYING and not result.num_proven_replays:
            found.append(
                f"{_title(result)}: no prompt graph replayed in the requests whose bytes were "
                "compared: equal bytes say nothing of replays here"
            )
    if not baselines:
        found.append(f"no multiple is said: policy {BASELINE} was not run beside the others")
    return found


def multiples(baseline: LoadResult, result: LoadResult) -> dict[str, float]:
    """Of mean prompt time and of mean decode rate; above 1 is better than the baseline."""
    before, after = baseline.run, result.run
    return {
        "prompt_multiple": _mean(before.prompt_ms) / _mean(after.prompt_ms),
        "decode_ratio": _mean(after.decode_rates) / _mean(before.decode_rates),
    }


def compared(baseline: LoadResult, result: LoadResult) -> str:
    """What became of TTFT against the baseline, in its two halves, with both ratios beside it."""
    before, after = baseline.run, result.run
    ttft = change_of(before.ttft_ms, after.ttft_ms)
    queue = change_of(before.queue_ms, after.queue_ms)
    prompt = change_of(before.prompt_ms, after.prompt_ms)
    ratios = multiples(baseline, result)
    text = (
        f"{_title(result)}: prompt {ratios['prompt_multiple']:.2f}x, decode "
        f"{ratios['decode_ratio']:.2f}x of {baseline.policy}. {_ttft_words(before.ttft_ms, ttft)}: "
        f"{_queue_words(queue)}, {_prompt_words(prompt)}"
    )
    rates = change_of(before.decode_rates, after.decode_rates)
    if ttft.is_growth and queue.is_growth and not prompt.is_growth and rates.is_growth:
        text += "; decode was faster, so clients were back with their next request sooner"
    num_seeded = sum(result.counts[space].seeded for space in Namespace)
    if ttft.is_growth and num_seeded:
        text += (
            f"; {num_seeded} seeds took {result.capture_ms:,.0f} ms in all to capture and "
            "instantiate, beside or inside these steps"
        )
    return text


def as_record(
    model: Model,
    driver: Driver,
    settings: "LoadSettings",
    results: Sequence[LoadResult],
    found: Sequence[str],
) -> dict[str, object]:
    """The whole result as one JSON line."""
    baselines = {r.num_clients: r for r in results if r.policy == BASELINE}
    rows = []
    for result in results:
        baseline = baselines.get(result.num_clients)
        rows.append(row_record(result) | (multiples(baseline, result) if baseline else {}))
    return provenance(driver.device, driver.description) | {
        "benchmark": "load",
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_ubatch": settings.num_ubatch,
        "num_parallel": settings.num_parallel,
        "context_len": settings.context_len,
        "requests": settings.num_requests,
        "prompt_lens": list(settings.prompt_lens),
        "new_tokens": settings.num_new_tokens,
        "equal_bytes": all(result.proof.is_equal for result in results),
        "findings": list(found),
        "rows": rows,
    }


def row_record(result: LoadResult) -> dict[str, object]:
    """One policy at one number of clients, as JSON has it."""
    run = result.run
    return {
        "policy": result.policy,
        "clients": result.num_clients,
        "requests": len(run.requests),
        "queue_ms": asdict(spread_of(run.queue_ms)),
        "prompt_ms": asdict(spread_of(run.prompt_ms)),
        "ttft_ms": asdict(spread_of(run.ttft_ms)),
        "decode_tokens_per_second": asdict(spread_of(run.decode_rates)),
        "all_tokens_per_second": run.all_rate,
        "new_tokens": run.num_tokens,
        "hit_rate": {space.value: result.hit_rate(space) for space in Namespace},
        "counts": {space.value: _counts_record(result, space) for space in Namespace},
        "capture_ms": result.capture_ms,
        "longest_capture_beside_stream_ms": result.longest_capture_beside_stream_ms,
        "recorded_steps": result.proof.num_steps,
        "recorded_prompt_replays": result.num_proven_replays,
        "equal_bytes": result.proof.is_equal,
    }


def _counts_record(result: LoadResult, space: Namespace) -> Mapping[str, int]:
    counts = result.counts[space]
    names = ("candidates", "seeded", "replayed", "direct", "refused", "released", "deferred")
    return {name: getattr(counts, name) for name in names}


def _differing(result: LoadResult) -> str:
    proof = result.proof
    steps = ", ".join(str(number) for number in proof.differing_steps[:8])
    logits = f"logits differ at {len(proof.differing_steps)} steps ({steps})" if steps else ""
    kv = "" if proof.is_kv_equal else "written K/V differs"
    what = " and ".join(part for part in (logits, kv) if part)
    return (
        f"{_title(result)}: the bytes DIFFER from those with graphs disabled: {what}, of "
        f"{proof.num_steps} recorded steps"
    )


def _why_no_hits(result: LoadResult) -> str:
    counts = result.counts[Namespace.PROMPT]
    if not counts.candidates:
        return "no prompt was run"
    if result.refused:
        return f"graphs were refused ({', '.join(result.refused)})"
    if result.num_released_by_decode:
        return (
            f"{result.num_released_by_decode} were released by decode before they were seen "
            "again. Under seed each batch-one decode step that finds no unfinished prompt "
            "releases them all; a prompt of one chunk that is answered alone never gains. "
            "resident keeps them"
        )
    if not counts.seeded:
        return (
            "none was captured in this load, because no moment for it came (resident captures "
            "while idle, and beside streams for a bounded time)"
        )
    return f"none of {counts.seeded} seeded was seen a second time"


def _ttft_words(before_ms: Sequence[float], ttft: Change) -> str:
    before = _mean(before_ms)
    what = "grew" if ttft.is_growth else "fell" if ttft.is_drop else "did not clearly change"
    return f"Average TTFT {what} ({before:,.2f} to {before + ttft.mean:,.2f} ms)"


def _queue_words(queue: Change) -> str:
    if queue.is_growth:
        return f"requests waited {queue.mean:,.2f} ms longer for a slot or a step (queue)"
    if queue.is_drop:
        return f"requests waited {-queue.mean:,.2f} ms less for a slot or a step (queue)"
    return f"the wait for a slot or a step (queue) did not clearly change ({queue.mean:+,.2f} ms)"


def _prompt_words(prompt: Change) -> str:
    if prompt.is_growth:
        return (
            f"the prompt itself was slower ({prompt.mean:+,.2f} ms, decode steps between its "
            "chunks included)"
        )
    if prompt.is_drop:
        return f"the prompt itself was faster ({prompt.mean:+,.2f} ms)"
    if prompt.mean <= 0:
        return f"the prompt itself was not slower ({prompt.mean:+,.2f} ms)"
    return f"the prompt itself was not clearly slower ({prompt.mean:+,.2f} ms, within the noise)"


def _title(result: LoadResult) -> str:
    plural = "" if result.num_clients == 1 else "s"
    return f"{result.policy}, {result.num_clients} client{plural}"


def _mean(values: Sequence[float]) -> float:
    return spread_of(values).mean

"""How the demo is shown, and what it finds.

Owns the tables, the verdict and the JSON record. Measures nothing.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from graphseed.capture import Driver, Namespace
from graphseed.capture.events import Cause
from graphseed.engine import EngineConfig
from graphseed.engine.chunks import plan_chunks
from graphseed.measure.demo import IdentityRow, PolicyRun, paired_step_ms
from graphseed.measure.provenance import provenance
from graphseed.models.model import Model

REPLAYING: Final = ("seed", "resident")

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)


@contextmanager
def working(what: str, is_shown: bool) -> Iterator[None]:
    """Show on stderr that something is running, where a person watches."""
    if is_shown and err.is_terminal:
        with err.status(what):
            yield
    else:
        yield


def print_head(model: Model, driver: Driver, config: EngineConfig, num_tokens: int) -> None:
    """Say what will be run."""
    chunks = plan_chunks(num_tokens, config.num_ubatch)
    sizes = ", ".join(str(chunk.capacity) for chunk in chunks[:8])
    more = "" if len(chunks) <= 8 else f", ... ({len(chunks)} in all)"
    out.print(
        f"model:  {model.name} ({model.num_parameters / 1e6:.0f} M parameters, {model.dtype})"
    )
    out.print(f"device: {driver.device}, {driver.description}")
    out.print(f"prompt: {num_tokens} tokens in chunks of {sizes}{more}")


def print_report(model: Model, driver: Driver, runs: Sequence[PolicyRun]) -> list[str]:
    """Print every table and the verdict; return the findings, empty when all is well."""
    out.print(_speed_table(runs))
    _print_observations(runs)
    for run in runs:
        _print_policy(run)
    out.print(_digest_table(runs))
    if driver.device == "cpu":
        _print_cpu_note()
    found = findings(runs)
    for finding in found:
        out.print(f"[bold red]finding:[/] {finding}")
    if not found:
        out.print("[bold green]verdict:[/] equal bytes, and every graph seen again was replayed")
    return found


def findings(runs: Sequence[PolicyRun]) -> list[str]:
    """What is wrong: bytes that differ, and graphs that should have replayed and did not."""
    found = []
    for part, pick in (("logits", 0), ("KV", 1)):
        digests = {digest[pick] for run in runs for digest in run.digests}
        if len(digests) > 1:
            names = ", ".join(
                f"{run.name} {sorted(d[pick][:8] for d in run.digests)}" for run in runs
            )
            found.append(f"the {part} bytes differ: {names}")
    for run in runs:
        for row in run.rows.values():
            is_expected = run.name in REPLAYING or (
                row.identity.namespace is Namespace.DECODE and run.name != "disabled"
            )
            if is_expected and row.was_seen_again_while_held and not row.num_replayed:
                found.append(f"policy {run.name} never replayed [{row.identity}]")
        if run.name in REPLAYING and not run.counts[Namespace.PROMPT.value]["replayed"]:
            why = "; ".join(run.alarms + [event.detail for event in run.refused]) or "see the log"
            found.append(f"policy {run.name} replayed no prompt graph: {why}")
    return found


def as_record(
    model: Model,
    driver: Driver,
    config: EngineConfig,
    runs: Sequence[PolicyRun],
    found: Sequence[str],
) -> dict[str, object]:
    """The whole result as one JSON line."""
    record = provenance(driver.device, driver.description)
    record |= {
        "benchmark": "demo",
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_ubatch": config.num_ubatch,
        "context_len": config.context_len,
        "prompt_tokens": runs[0].passes[0].num_prompt_tokens,
        "new_tokens": runs[0].passes[0].num_new_tokens,
        "equal_bytes": len({d for run in runs for d in run.digests}) == 1,
        "findings": list(found),
        "multiples": multiples(runs),
        "policies": [_policy_record(run) for run in runs],
    }
    return record


def multiples(runs: Sequence[PolicyRun]) -> dict[str, float | None]:
    """The ratios the demo is about, against policy off of the same run. None: not measured."""
    by_name = {run.name: run for run in runs}
    off = by_name.get("off")
    if off is None:
        return {}
    off_prompt = statistics.median(p.prompt_ms for p in off.passes)
    off_decode = off.decode_step_ms()
    ratios: dict[str, float | None] = {}
    for name in REPLAYING:
        run = by_name.get(name)
        if run is None:
            continue
        for number, measured in enumerate(run.passes, 1):
            ratios[f"{name} prompt {number}"] = off_prompt / measured.prompt_ms
        pair = paired_step_ms(off, run)
        ratios[f"{name} replayed observation"] = pair[0] / pair[1] if pair else None
        ratios[f"{name} decode"] = _ratio(off_decode, run.decode_step_ms())
    return ratios


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _speed_table(runs: Sequence[PolicyRun]) -> Table:
    table = _table(
        "prompt and decode", "policy", "pass", "prompt ms", "prompt tok/s", "x off", "decode tok/s",
        "x off", "seen", "seeded", "replayed", "direct",
    )  # fmt: skip
    ratios = multiples(runs)
    for run in runs:
        for number, p in enumerate(run.passes, 1):
            how = list(p.how)
            table.add_row(
                run.name, str(number), f"{p.prompt_ms:,.1f}", f"{p.prompt_rate:,.0f}",
                _shown(ratios.get(f"{run.name} prompt {number}")), f"{p.decode_rate:,.1f}",
                _shown(ratios.get(f"{run.name} decode")), str(len(how)),
                str(run.counts[Namespace.PROMPT.value]["seeded"]) if number == 1 else "",
                str(how.count("replayed")), str(how.count("direct")),
            )  # fmt: skip
    table.caption = "seen: prompt observations. decode x off: median step, both passes."
    table.caption_justify = "left"
    return table


def _print_observations(runs: Sequence[PolicyRun]) -> None:
    off = next((run for run in runs if run.name == "off"), None)
    for run in runs:
        pair = paired_step_ms(off, run) if off is not None and run is not off else None
        if pair is not None:
            out.print(
                f"median prompt observation, same chunks: direct (off) {pair[0]:.2f} ms, replayed "
                f"({run.name}) {pair[1]:.2f} ms: {pair[0] / pair[1]:.2f}x"
            )


def _print_policy(run: PolicyRun) -> None:
    out.print(f"\n[bold]policy {run.name}[/]")
    held = [row for row in run.rows.values() if row.num_seeded]
    if held:
        table = _table(
            "", "graph", "tokens", "nodes", "MiB", "capture ms", "instantiate ms", "seeded",
            "replayed", "direct",
        )  # fmt: skip
        for row in held:
            table.add_row(*_identity_cells(row))
        out.print(table)
    for event in run.released:
        if event.cause is not Cause.SHUTDOWN:
            out.print(
                f"released {event.num_entries} {event.namespace.value} graphs "
                f"({event.cause.value}): {event.bytes_held / 2**20:.1f} MiB held, "
                f"{event.bytes_returned / 2**20:.1f} MiB came back, {event.elapsed_ns / 1e6:.2f} ms"
            )
    for line in run.summary:
        out.print(line)
    for message in run.alarms:
        out.print(f"alarm: {message}")


def _identity_cells(row: IdentityRow) -> tuple[str, ...]:
    identity = row.identity
    return (
        identity.namespace.value, str(identity.get("tokens")), str(row.num_nodes),
        f"{row.num_bytes / 2**20:.1f}", f"{row.capture_ms:.2f}", f"{row.instantiate_ms:.2f}",
        str(row.num_seeded), str(row.num_replayed), str(row.num_direct),
    )  # fmt: skip


def _digest_table(runs: Sequence[PolicyRun]) -> Table:
    table = _table(
        "SHA-256 of all logits and all valid written KV rows", "policy", "pass", "logits", "KV"
    )
    for run in runs:
        for number, p in enumerate(run.passes, 1):
            table.add_row(run.name, str(number), p.logits_sha256[:32], p.kv_sha256[:32])
    return table


def _print_cpu_note() -> None:
    out.print(
        "\nThis ran on a CPU: there the arithmetic is the wall clock, not the submission, so "
        "replay saves little and the ratios above are as they are, below one included."
    )
    figures = json.loads(
        files("graphseed.cli.demo").joinpath("data/gpu_figures.json").read_text(encoding="utf-8")
    )
    if not figures:
        return
    table = _table(
        "the same demo on a GPU (committed results), multiples of policy off", "model", "device",
        "prompt", "replayed chunk", "seed", "resident 2nd", "decode", "bytes",
    )  # fmt: skip
    for row in figures:
        ratios = row["multiples"]
        table.add_row(
            row["model"], row["device_name"], str(row["prompt_tokens"]),
            _shown(ratios["seed replayed observation"]), _shown(ratios["seed prompt 2"]),
            _shown(ratios["resident prompt 2"]), _shown(ratios["seed decode"]),
            "equal" if row["equal_bytes"] else "DIFFER",
        )  # fmt: skip
    out.print(table)


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _policy_record(run: PolicyRun) -> dict[str, object]:
    return {
        "policy": run.name,
        "counts": run.counts,
        "passes": [asdict(p) | {"text": None, "how": None} for p in run.passes],
        "decode_step_ms": run.decode_step_ms(),
        "identities": [
            {
                "identity": str(row.identity), "nodes": row.num_nodes, "bytes": row.num_bytes,
                "capture_ms": row.capture_ms, "instantiate_ms": row.instantiate_ms,
                "seeded": row.num_seeded, "replayed": row.num_replayed, "direct": row.num_direct,
            }
            for row in run.rows.values()
        ],
        "released": [
            {
                "cause": event.cause.name, "namespace": event.namespace.value,
                "entries": event.num_entries, "bytes_held": event.bytes_held,
                "bytes_returned": event.bytes_returned, "ms": event.elapsed_ns / 1e6,
            }
            for event in run.released
        ],
        "refused": [f"{event.reason.value}: {event.detail}" for event in run.refused],
        "alarms": run.alarms,
    }  # fmt: skip

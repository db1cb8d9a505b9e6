"""How a proof is shown.

Owns the tables, the verdict and the JSON record of `graphseed verify`. Proves nothing.
"""

import sys
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphseed.capture import Counts, Driver, Namespace
from graphseed.measure.provenance import provenance
from graphseed.measure.verify.against_hf import AgainstHf
from graphseed.measure.verify.proof import REFERENCE, PolicyResult, Verification, VerifySettings
from graphseed.models.model import Model

MAX_TOKENS_SHOWN: Final = 20
_COUNTED: Final = ("seeded", "replayed", "refused", "released")


def _console() -> Console:
    """Bound at each call, as sys.stdout is then."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def print_head(model: Model, driver: Driver, settings: VerifySettings) -> None:
    """Say what will be proven."""
    out = _console()
    out.print(
        f"model:  {model.name} ({model.num_parameters / 1e6:.0f} M parameters, {model.dtype})"
    )
    out.print(f"device: {driver.device}, {driver.description}")
    out.print(
        f"proof:  graphs disabled beside {', '.join(settings.policies)}; {settings.num_rounds} "
        f"rounds of fresh random tokens (--seed {settings.seed}), ubatch {settings.num_ubatch}, "
        f"{settings.num_parallel} sequences"
    )


def print_report(result: Verification, against: AgainstHf | None) -> list[str]:
    """Print every table and the verdict; return the findings, empty when the proof holds."""
    out = _console()
    out.print(_digest_table(result))
    out.print(_policy_table(result))
    for name, policy in result.policies.items():
        for refusal in _refusals(policy):
            out.print(f"refused under {name}: {escape(refusal)}")
    for difference in result.differences:
        out.print(f"[bold red]difference:[/] {escape(str(difference))}")
    num_more = result.num_differences - len(result.differences)
    if num_more:
        out.print(f"... and {num_more} more differences")
    if against is not None:
        _print_against(out, against)
    findings = result.findings()
    if against is not None and not against.is_close:
        findings.append(
            f"the logits are {against.largest_share:.2g} of their scale from the plain Hugging "
            f"Face forward, more than {against.tolerance:g}"
        )
    _print_verdict(out, result, findings)
    return findings


def as_record(
    model: Model,
    driver: Driver,
    result: Verification,
    against: AgainstHf | None,
    findings: Sequence[str],
) -> dict[str, object]:
    """The whole result as one JSON line."""
    settings = result.settings
    return provenance(driver.device, driver.description) | {
        "benchmark": "verify",
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "is_equal": result.is_equal,
        "num_cases": len(result.cases),
        "rounds": settings.num_rounds,
        "num_steps": result.num_steps,
        "num_ubatch": settings.num_ubatch,
        "num_parallel": settings.num_parallel,
        "max_tokens": settings.max_tokens,
        "context_len": result.config.context_len,
        "seed": settings.seed,
        "policies": {name: _policy_record(policy) for name, policy in result.policies.items()},
        "unproven": [f"{name} {n.value}" for name, n in result.unproven()],
        "num_differences": result.num_differences,
        "differences": [difference.as_record() for difference in result.differences],
        "digests": {row.name: row.digests.get(REFERENCE) for row in result.cases},
        "against_hf": None if against is None else against.as_record(),
        "findings": list(findings),
    }


def _policy_record(policy: PolicyResult) -> dict[str, object]:
    """Prompt graphs first, as they are what is asked about; decode graphs beside them."""

    def counts(namespace: Namespace) -> dict[str, object]:
        held = policy.counts[namespace]
        return {name: getattr(held, name) for name in _COUNTED} | {
            "deferred": held.deferred,
            "identities": policy.num_identities[namespace],
            "replayed_identities": policy.num_replayed_identities[namespace],
        }

    return counts(Namespace.PROMPT) | {
        "decode": counts(Namespace.DECODE),
        "refusals": _refusals(policy),
    }


def _refusals(policy: PolicyResult) -> list[str]:
    return [said for namespace in Namespace for said in policy.refusals[namespace]]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _digest_table(result: Verification) -> Table:
    names = (REFERENCE, *result.policies)
    table = _table(
        "SHA-256 of the logits and KV rows of each case's last round", "case", "observations",
        *names, "equal",
    )  # fmt: skip
    for row in result.cases:
        if not row.digests:
            continue
        shown = [row.digests[name][:8] for name in names]
        equal = "yes" if not row.differing else f"[bold red]no: {', '.join(sorted(row.differing))}"
        table.add_row(escape(row.name), str(row.num_observations), *shown, equal)
    table.caption = (
        "observations: steps of all rounds, under each policy; equal: every byte of all of them."
    )
    table.caption_justify = "left"
    return table


def _policy_table(result: Verification) -> Table:
    table = _table(
        "what replayed", "policy", "graphs", "identities", "of these replayed", "seeded",
        "replayed", "released", "deferred", "refused",
    )  # fmt: skip
    for name, policy in result.policies.items():
        for namespace in Namespace:
            counts: Counts = policy.counts[namespace]
            table.add_row(
                name, namespace.value, str(policy.num_identities[namespace]),
                str(policy.num_replayed_identities[namespace]), str(counts.seeded),
                str(counts.replayed), str(counts.released), str(counts.deferred),
                str(counts.refused),
            )  # fmt: skip
    return table


def _print_against(out: Console, against: AgainstHf) -> None:
    experts = f", {against.experts} experts" if against.experts else ""
    out.print(
        f"\nplain Hugging Face forward ({against.attention} attention{experts}): "
        f"{against.num_rows} rows of logits of the first round, the largest difference is "
        f"{against.largest:.3g}; at most {against.largest_share:.2g} of a row's largest logit, "
        f"tolerance {against.tolerance:g} ({escape(against.worst_case)}, position "
        f"{against.worst_position})"
    )
    out.print(f"greedy tokens that differ: {len(against.tokens)} of {against.num_rows}")
    for token in against.tokens[:MAX_TOKENS_SHOWN]:
        out.print(
            f"  {escape(token.case)}, position {token.position}: token {token.token}, plain "
            f"forward {token.hf_token}; its margin {token.margin:.3g}, ours is {token.gap:.3g} "
            "below its best"
        )
    if len(against.tokens) > MAX_TOKENS_SHOWN:
        out.print(f"  ... and {len(against.tokens) - MAX_TOKENS_SHOWN} more")


def _print_verdict(out: Console, result: Verification, findings: Sequence[str]) -> None:
    for finding in findings:
        out.print(f"[bold red]finding:[/] {escape(finding)}")
    if findings:
        return
    unproven = result.unproven()
    for (name, namespace), refusals in unproven.items():
        out.print(
            f"[bold yellow]nothing proven[/] of {namespace.value} graphs under policy {name}: they "
            f"were refused for the reasons above ({len(refusals)}), and ran direct"
        )
    for name, policy in result.policies.items():
        for namespace in Namespace:
            num_left = policy.num_identities[namespace] - policy.num_replayed_identities[namespace]
            if policy.num_replayed_identities[namespace] and num_left:
                out.print(f"under {name}, {num_left} {namespace.value} identities never replayed")
    out.print(
        f"[bold green]verdict:[/] equal bytes in all {result.num_steps} steps, under "
        f"{', '.join(result.policies)}, replayed as often as the table says"
    )

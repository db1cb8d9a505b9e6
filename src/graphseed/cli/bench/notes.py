"""What is said under a benchmark's table: how to read it, losses, and what it does not show.

Owns sentences that follow from figures. Prints nothing and measures nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from graphseed.cli.bench.flags import BenchRequest
from graphseed.measure.bench.rows import BenchRow, mean_and_sd

REPLAYING: Final = ("seed", "resident")
QUIET_SD: Final = 0.05  # of the mean; above it, ratios near 1 are said to be noise
Labelled = Sequence[tuple[str, BenchRow]]  # rows with the model's name and dtype


def legend(request: BenchRequest) -> tuple[str, ...]:
    """How to read the columns."""
    return (
        f"t/s: mean ± sample standard deviation of {request.num_repetitions}. prompt x, decode x: "
        "ratios of median times to policy off of the same row.",
        "hits: replayed share of the prompt's timed observations (of the decode's in a tg row). "
        "capt + inst: each of the row's graphs once. MiB: held at most.",
        "bytes: SHA-256 of every step's logits and of the K/V written, of two more repetitions, "
        "each with the same fresh tokens under every policy.",
        "ceiling: least time at the measured rates / median time; weights that stay in a cache "
        "can pass 100 %.",
    )


def notes(rows: Labelled, device: str) -> list[str]:
    """What the figures say in words, findings and losses first."""
    found = [*_differences(rows), *_losses(rows), *_refusals(rows)]
    found += _decodes(rows)
    found += _released_between(rows)
    found += _one_after_another(rows)
    found += _noise(rows)
    if rows and device == "cpu":
        found.append(
            "note: this ran on a CPU: of any but a tiny model the arithmetic is the wall clock "
            "there, not the submission, so replay has little to save"
        )
    return found


def _differences(rows: Labelled) -> Iterator[str]:
    for label, row in rows:
        for difference in row.differences:
            yield f"finding: {_where(label, row)}: bytes differ from policy off's: {difference}"


def _losses(rows: Labelled) -> Iterator[str]:
    """Every figure of a policy that replays prompts which reads less than 1.00."""
    for label, row in rows:
        for policy in REPLAYING:
            if policy not in row.figures:
                continue
            halves = []
            for half, ratio in (
                ("prompt", row.prompt_multiple(policy)), ("decode", row.decode_ratio(policy)),
            ):  # fmt: skip
                if ratio is not None and round(ratio, 2) < 1:
                    halves.append(f"{half} {ratio:.2f}x")
            if halves:
                yield f"loss: {_where(label, row)} under {policy}: {', '.join(halves)}"


def _refusals(rows: Labelled) -> Iterator[str]:
    for label, row in rows:
        for policy, figures in row.figures.items():
            for refusal in figures.refusals:
                yield f"note: {_where(label, row)} under {policy}: refused {refusal}"


def _decodes(rows: Labelled) -> Iterator[str]:
    """Where a prompt row's decode ratio comes from."""
    sources = dict.fromkeys(
        row.decode_of for _, row in rows if row.test.prompt_len and not row.test.new_len
    )
    for source in sources:
        yield f"note: decode x of pp rows: of {source}, measured apart from the prompt"


def _released_between(rows: Labelled) -> Iterator[str]:
    """What a prompt row under `seed` leaves out."""
    seeds = [row for _, row in rows if "seed" in row.figures and row.test.num_parallel == 1]
    if any(not row.test.new_len and row.figures["seed"].hit_rate for row in seeds):
        yield (
            "note: no decode stands between the prompts of a pp row. Under seed the first "
            "batch-one decode releases the prompt graphs, so a prompt of one chunk that replays "
            "here is seeded anew in traffic with decodes between, and gains nothing: see pg rows "
            "(-pg), or resident"
        )
    lost = [
        row.test.name for row in seeds
        if row.test.prompt_len and row.test.new_len and not row.figures["seed"].hit_rate
    ]  # fmt: skip
    if lost:
        yield (
            f"note: seed replayed nothing in {', '.join(dict.fromkeys(lost))}: each prompt is "
            "seeded again, and pays for it"
        )


def _one_after_another(rows: Labelled) -> Iterator[str]:
    names = [f"{_where(label, row)}" for label, row in rows if not row.is_side_by_side]
    if names:
        yield (
            f"note: memory did not hold all policies at once; one after another ran "
            f"{', '.join(names)}, so drift of the device is in these ratios"
        )


def _noise(rows: Labelled) -> Iterator[str]:
    noisy = {}
    for label, row in rows:
        spreads = [sd / mean for mean, sd in (mean_and_sd(f.rates) for f in row.figures.values())]
        if max(spreads) > QUIET_SD:
            noisy[_where(label, row)] = max(spreads)
    if noisy:
        yield (
            f"note: rates vary by more than {QUIET_SD:.0%} (standard deviation) in {len(noisy)} of "
            f"{len(rows)} tests, most in {max(noisy, key=lambda name: noisy[name])} "
            f"({max(noisy.values()):.0%}): ratios nearer to 1 than that say little"
        )


def _where(label: str, row: BenchRow) -> str:
    """A row in words."""
    test = row.test
    parts = [label, test.name]
    parts += [f"(-ub {test.pass_len})"] if test.pass_len != 512 else []
    parts += [f"(-np {test.num_parallel})"] if test.num_parallel > 1 else []
    return " ".join(parts)

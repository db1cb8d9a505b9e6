"""Many clients at once, in closed loop: what a reader waits for, and whether the bytes are equal.

Question: with 1, 8 and 32 clients, how long does a request wait for its slot and for its first
token, how fast do tokens come, how many observations replay, and are the recorded plans of the
whole load the same bytes with graphs disabled? Also: how much does the engine add to the bare step
for one client's 512-token prompt (TTFT through Engine.stream against its own step, on the device's
clock)?

    python benchmarks/many.py -m random:smollm2-135m --device cuda --json FILE
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from graphseed.capture import Driver, GraphseedError, Namespace
from graphseed.cli import options
from graphseed.cli.records import append_record
from graphseed.drivers import open_driver
from graphseed.engine import BadParameter, EngineConfig
from graphseed.measure import load
from graphseed.measure.first_token import measure_first_token
from graphseed.measure.provenance import provenance
from graphseed.models import Model, load_model

POLICIES: Final = ("off", "seed", "resident")
TOKEN_IDS: Final = range(256)
NUM_UBATCH: Final = 512
REST_SECONDS: Final = 0.02  # of the second first-token measurement


def measured(
    policy: str, model: Model, driver: Driver, args: argparse.Namespace, num_clients: int
) -> dict[str, object]:
    """One policy at one number of clients: the timed load, then a part of it on record."""
    config = EngineConfig(
        context_len=args.ctx_size, num_ubatch=NUM_UBATCH, num_parallel=args.parallel
    )
    mix = load.Mix(TOKEN_IDS)
    jobs = load.workload(num_clients, args.requests, mix)
    result = load.measure_load(
        policy, model, driver, config, jobs, num_clients,
        warm_up=load.warm_up_of(num_clients, num_clients, mix), num_proven=args.proven,
    )  # fmt: skip
    run, proof = result.run, result.proof
    figures = {
        "queue_ms": load.spread_of(run.queue_ms).p50,
        "prompt_ms": load.spread_of(run.prompt_ms).p50,
        "ttft_ms": load.spread_of(run.ttft_ms).p50,
        "decode_tokens_per_second": load.spread_of(run.decode_rates).p50,
        "all_tokens_per_second": run.all_rate,
    }
    hits = {space.value: result.hit_rate(space) for space in Namespace}
    longest_ms = result.longest_capture_beside_stream_ms
    print(
        f"{policy:>9} {num_clients:>3} clients: queue {figures['queue_ms']:8.2f} ms, prompt "
        f"{figures['prompt_ms']:8.2f} ms, decode {figures['decode_tokens_per_second']:7.1f} tok/s, "
        f"hits {hits['prompt']:.2f}/{hits['decode']:.2f}, longest capture beside a stream "
        f"{longest_ms:.0f} ms, {proof.num_steps} plans {'equal' if proof.is_equal else 'DIFFER'}, "
        f"{result.num_proven_replays} of their prompt steps replayed"
    )
    return {
        "kind": "load", "policy": policy, "clients": num_clients, "requests": len(jobs),
        "figures": figures, "hit_rate": hits, "longest_capture_beside_a_stream_ms": longest_ms,
        "recorded_steps": proof.num_steps, "recorded_prompt_replays": result.num_proven_replays,
        "equal_bytes": proof.is_equal,
    }  # fmt: skip


def first_tokens(
    model: Model, driver: Driver, num_rounds: int, rest_seconds: float
) -> dict[str, object]:
    """TTFT of one client's 512-token prompt through Engine.stream, against its own step."""
    row: dict[str, object] = {
        "kind": "first token", "prompt_tokens": NUM_UBATCH, "rest_ms": 1e3 * rest_seconds
    }  # fmt: skip
    for policy in POLICIES:
        figures = measure_first_token(
            policy, model, driver, num_rounds=num_rounds, token_ids=TOKEN_IDS,
            prompt_len=NUM_UBATCH, rest_seconds=rest_seconds,
        )  # fmt: skip
        row[policy] = asdict(figures)
        print(
            f"{policy:>9} first token of {NUM_UBATCH}, {1e3 * rest_seconds:.0f} ms after the last "
            f"answer: {figures.ttft_ms:.2f} ms, its step {figures.step_ms:.2f} ms, added "
            f"{figures.added_ms:.2f} ms; to a bare step of {figures.bare_ms:.2f} ms "
            f"{figures.added_to_bare_ms:.2f} ms; {figures.hit_rate:.0%} replayed"
        )
    return row


def rows(model: Model, driver: Driver, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every measurement, one by one."""
    for rest_seconds in (0.0, REST_SECONDS):
        yield first_tokens(model, driver, args.rounds, rest_seconds)
    for num_clients in args.clients:
        for policy in POLICIES:
            yield measured(policy, model, driver, args, num_clients)


def numbers(text: str) -> list[int]:
    """Whole numbers above 0 of a list; none of an empty one."""
    found = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in found):
        raise ValueError(text)
    return found


def check(args: argparse.Namespace) -> None:
    """Raise BadParameter, and SelectorError where every graph is turned off (I12)."""
    options.require_graphs("benchmarks/many.py")
    longest = max(load.PROMPT_LENS) + load.NUM_NEW_TOKENS
    for flag, value, least in (
        ("-c", args.ctx_size, longest), ("-np", args.parallel, 1), ("--rounds", args.rounds, 1),
        ("--requests", args.requests, max(args.clients, default=1)), ("--proven", args.proven, 1),
    ):  # fmt: skip
        if value < least:
            raise BadParameter(flag, value, f"at least {least}")
    if args.json is not None and not args.json.parent.is_dir():
        raise BadParameter("--json", str(args.json), "a file in a folder that exists")


def flags() -> argparse.ArgumentParser:
    """The flags of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-c", "--ctx-size", type=int, default=4096)
    parser.add_argument("-np", "--parallel", type=int, default=32)
    parser.add_argument(
        "--clients", type=numbers, default="1,8,32", help="empty: first tokens alone"
    )
    parser.add_argument("--requests", type=int, default=96, help="of each measured load")
    parser.add_argument("--proven", type=int, default=32, help="of the load that is recorded")
    parser.add_argument("--rounds", type=int, default=30, help="of the first-token measurement")
    parser.add_argument("--json", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = flags().parse_args(argv)
    try:
        check(args)
        driver = open_driver(args.device)
    except GraphseedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = load_model(args.model, device=driver.device, bf16_is_fast=driver.computes_bf16_fast)
    source = provenance(driver.device, driver.description, program="python benchmarks/many.py")
    source |= {"benchmark": "many", "model": model.name}
    are_equal = True
    for row in rows(model, driver, args):  # each is kept as soon as it is there
        are_equal &= bool(row.get("equal_bytes", True))
        if args.json is not None:
            append_record(args.json, source | row)
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())

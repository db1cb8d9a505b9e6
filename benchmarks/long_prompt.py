"""One executable for every position: a very long prompt, and two ways in which that can be lost.

Question: does a prompt of 131,072 tokens in chunks of 512 seed once and replay 255 times; what
happens when the identity holds the address of the chunk's first KV block; and what when prompt and
decode share one namespace? Prints a table, appends one JSON line for each variant to --json.

    python benchmarks/long_prompt.py -m random:llama3.2-1b --device cuda --prompt-tokens 131072
"""

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from graphseed.capture import (
    Budget,
    Driver,
    Event,
    GraphIdentity,
    LogLines,
    Namespace,
    Policy,
    Selection,
)
from graphseed.capture.events import Alarm
from graphseed.drivers import open_driver
from graphseed.engine import EngineConfig, EngineCore, SamplingParams
from graphseed.engine.plan import StepPlan
from graphseed.engine.step import IdentityHook
from graphseed.measure.provenance import provenance
from graphseed.models import Model, load_model


def with_address(base: int, block_bytes: int, block_len: int) -> IdentityHook:
    """A broken identity, for the alarm: it holds the address of the chunk's first KV block."""

    def change(identity: GraphIdentity, plan: StepPlan) -> GraphIdentity:
        if identity.namespace is not Namespace.PROMPT:
            return identity
        part = plan.parts[0]
        address = base + int(part.table.ids[part.start // block_len]) * block_bytes
        structure = (*identity.structure, ("first_kv_block", address))
        return GraphIdentity(identity.namespace, identity.device, identity.first_node, structure)

    return change


def in_one_namespace(identity: GraphIdentity, plan: StepPlan) -> GraphIdentity:
    """A broken identity: prompt and decode graphs in one namespace."""
    return GraphIdentity(Namespace.PROMPT, identity.device, identity.first_node, identity.structure)


def run(
    name: str,
    model: Model,
    driver: Driver,
    args: argparse.Namespace,
    *,
    policy: Policy,
    num_tokens: int,
    num_requests: int = 1,
    new: int = 4,
    hook: Callable[[EngineCore], IdentityHook] | None = None,
    budgets: dict[Namespace, Budget] | None = None,
) -> dict[str, object]:
    """Answer requests of one length under one variant and return what was counted."""
    prompt = random.Random(1).choices(range(256), k=num_tokens)
    config = EngineConfig(
        context_len=num_tokens + 64, num_ubatch=args.ubatch_size, reuses_prefixes=False
    )
    selection = Selection(policy, was_asked=True, source="benchmark")
    engine = EngineCore(model, driver, config, selection, budgets=budgets)
    if hook is not None:
        engine.runner.identity_hook = hook(engine)
    alarms: list[Alarm] = []

    def note(event: Event) -> None:
        if isinstance(event, Alarm):
            alarms.append(event)

    engine.log.subscribe(note)
    engine.log.subscribe(LogLines())
    engine.warm_up()
    digests = set()
    start = time.perf_counter()
    for _ in range(num_requests):
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        for delta in engine.stream(prompt, params, kv_digest=True):
            if delta.kv_digest is not None:
                digests.add(delta.kv_digest)
    seconds = time.perf_counter() - start
    lines, _ = engine.finish()
    counts = {
        namespace.value: {
            field: getattr(engine.tally.counts[namespace], field)
            for field in ("candidates", "seeded", "replayed", "direct", "released", "refused")
        }
        for namespace in Namespace
    }
    engine.close()
    print(f"\n{name}: {num_requests} x {num_tokens} tokens, policy {policy.value}, {seconds:.2f} s")
    print("\n".join(lines))
    for alarm in alarms:
        print(f"alarm: {alarm.message}")
    return {
        "variant": name, "policy": policy.value, "prompt_tokens": num_tokens,
        "requests": num_requests, "counts": counts, "seconds": round(seconds, 3),
        "kv_sha256": sorted(digests), "alarms": [alarm.message for alarm in alarms],
        "alarm_fields": [alarm.field for alarm in alarms],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="random:llama3.2-1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=131072)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    driver = open_driver(args.device)
    model = load_model(args.model, device=driver.device, bf16_is_fast=driver.computes_bf16_fast)
    one_each = {namespace: Budget(max_entries=1) for namespace in Namespace}
    short = {"policy": Policy.RESIDENT, "num_tokens": args.ubatch_size, "num_requests": 6}

    def addresses(engine: EngineCore) -> IdentityHook:
        cache = engine.runner.kv.k[0]
        return with_address(cache.data_ptr(), cache[0].nbytes, engine.config.block_len)

    long = {"num_tokens": args.prompt_tokens}
    rows = [
        run("long prompt, policy off", model, driver, args, policy=Policy.OFF, **long),
        run("long prompt", model, driver, args, policy=Policy.SEED, **long),
        run("address in the identity", model, driver, args, policy=Policy.SEED, hook=addresses,
            **long),
        run("own namespaces", model, driver, args, budgets=one_each, **short),
        run("shared namespace", model, driver, args, budgets=one_each,
            hook=lambda engine: in_one_namespace, **short),
    ]  # fmt: skip
    if args.json is not None:
        source = provenance(driver.device, driver.description, "python benchmarks/long_prompt.py")
        with args.json.open("a", encoding="utf-8") as out:
            for row in rows:
                record = source | {"benchmark": "long_prompt", "model": model.name} | row
                out.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Many clients at once, in closed loop: what a reader waits for, and whether the bytes are equal.

Question: with 1, 8 and 32 clients, how long does a request wait for its slot and for its first
token, how fast do tokens come, how many observations replay, and are the recorded plans of the
whole load the same bytes with graphs disabled? Also: how much does the engine add to the bare step
for one client's 512-token prompt (TTFT through Engine.stream against the step's own time)?

    python benchmarks/many.py -m random:smollm2-135m --device cuda --json FILE
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from graphseed.capture import Driver, Namespace, Policy, Selection
from graphseed.cli.provenance import provenance
from graphseed.drivers import open_driver
from graphseed.engine import Engine, EngineConfig, EngineCore, Request, SamplingParams
from graphseed.engine.plan import StepPlan
from graphseed.engine.record import PlanRecorder, replay
from graphseed.models import Model, load_model

POLICIES = {
    "off": Selection(),
    "seed": Selection(Policy.SEED, was_asked=True, source="benchmark"),
    "resident": Selection(Policy.RESIDENT, was_asked=True, source="benchmark"),
}


@dataclass
class Load:
    """What the clients of one run saw."""

    requests: list[Request] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Medians over the requests, in milliseconds, and the rate of all tokens together."""
        queue = [(r.timings.started_ns - r.timings.submitted_ns) / 1e6 for r in self.requests]
        prompt = [r.timings.prompt_ms for r in self.requests]
        decode = [
            1e3 * (len(r.output_ids) - 1) / r.timings.decode_ms
            for r in self.requests
            if len(r.output_ids) > 1
        ]
        tokens = sum(len(r.output_ids) for r in self.requests)
        return {
            "queue_ms": statistics.median(queue),
            "prompt_ms": statistics.median(prompt),
            "ttft_ms": statistics.median(q + p for q, p in zip(queue, prompt, strict=True)),
            "decode_tokens_per_second": statistics.median(decode),
            "all_tokens_per_second": tokens / self.seconds,
        }


def workload(number: int, num_requests: int, vocab: int) -> list[tuple[list[int], SamplingParams]]:
    """Mixed lengths, a shared prefix in every fourth, some sampled: the same for each policy."""
    rng = random.Random(number)
    base = rng.choices(range(vocab), k=512)
    load = []
    for index in range(num_requests):
        length = rng.choice((16, 32, 96, 128, 384, 512, 1024, 2048))
        prompt = rng.choices(range(vocab), k=length)
        if index % 4 == 0:
            prompt[: min(length - 1, 256)] = base[: min(length - 1, 256)]
        sampled = {"temperature": 0.8, "top_k": 40, "seed": index} if index % 3 == 0 else {}
        load.append((prompt, SamplingParams(max_tokens=32, ignore_eos=True, **sampled)))
    return load


def run_load(
    engine: Engine, load: list[tuple[list[int], SamplingParams]], num_clients: int
) -> Load:
    """Each client sends its next request when its last one ended."""
    result, lock, waiting = Load(), threading.Lock(), iter(load)

    def client() -> None:
        while True:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            handle = engine.submit(*job)
            for _ in handle:
                pass
            with lock:
                result.requests.append(handle.request)

    clients = [threading.Thread(target=client) for _ in range(num_clients)]
    start = time.perf_counter()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    result.seconds = time.perf_counter() - start
    return result


def measure(
    name: str, model: Model, driver: Driver, args: argparse.Namespace, num_clients: int
) -> dict[str, object]:
    """One policy at one number of clients: the timed load, then the same load on record."""
    config = EngineConfig(context_len=args.ctx_size, num_ubatch=512, num_parallel=args.parallel)
    load = workload(num_clients, args.requests, 256)
    engine = Engine(EngineCore(model, driver, config, POLICIES[name]))
    try:
        run_load(engine, load[:8], num_clients)  # not measured: the first of everything
        figures = run_load(engine, load, num_clients).figures()
        counts = engine.core.tally.counts
        hits = {
            space.value: counts[space].replayed / max(1, counts[space].candidates)
            for space in Namespace
        }
        longest = engine.core._settler.longest_streaming_ms
    finally:
        engine.close()
    equal, steps = proven(name, model, driver, config, load[: args.proven], num_clients)
    print(
        f"{name:>9} {num_clients:>3} clients: queue {figures['queue_ms']:8.2f} ms, prompt "
        f"{figures['prompt_ms']:8.2f} ms, decode {figures['decode_tokens_per_second']:7.1f} tok/s, "
        f"hits {hits['prompt']:.2f}/{hits['decode']:.2f}, longest capture beside a stream "
        f"{longest:.0f} ms, {steps} plans {'equal' if equal else 'DIFFER'}"
    )
    return {
        "policy": name, "clients": num_clients, "requests": len(load), "figures": figures,
        "hit_rate": hits, "longest_capture_beside_a_stream_ms": longest,
        "recorded_steps": steps, "equal_bytes": equal,
    }  # fmt: skip


def proven(
    name: str,
    model: Model,
    driver: Driver,
    config: EngineConfig,
    load: list[tuple[list[int], SamplingParams]],
    num_clients: int,
) -> tuple[bool, int]:
    """Record a load's plans, run them again with graphs disabled: equal bytes, steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.jsonl"
        core = EngineCore(model, driver, config, POLICIES[name])
        recorder = PlanRecorder(path, core)
        core.observer = recorder
        engine = Engine(core)
        try:
            run_load(engine, load, num_clients)
            engine.call(recorder.close)
        finally:
            engine.close()
        report = replay(path, model, driver)
        return report.is_equal, report.num_steps


class StepTimer:
    """Times each step from before it is submitted to the end of its work."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._start_ns = 0
        self.ms: list[float] = []

    def before(self, plan: StepPlan) -> None:
        self._start_ns = time.perf_counter_ns()

    def after(self, plan: StepPlan, logits: object) -> None:
        self._driver.synchronize()
        if plan.namespace is Namespace.PROMPT:
            self.ms.append((time.perf_counter_ns() - self._start_ns) / 1e6)


def first_token(model: Model, driver: Driver, args: argparse.Namespace) -> dict[str, object]:
    """TTFT of one client's 512-token prompt through Engine.stream, against the bare step."""
    config = EngineConfig(context_len=1024, num_ubatch=512, reuses_prefixes=False)
    rng, timer = random.Random(5), StepTimer(driver)
    row: dict[str, object] = {"prompt_tokens": 512}
    for name, selection in POLICIES.items():
        engine = Engine(EngineCore(model, driver, config, selection))
        ttft_ms: list[float] = []
        try:
            for number in range(args.rounds + 3):
                prompt = rng.choices(range(256), k=512)
                start = time.perf_counter_ns()
                stream = engine.stream(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
                next(stream)
                if number >= 3:
                    ttft_ms.append((time.perf_counter_ns() - start) / 1e6)
                stream.close()  # type: ignore[attr-defined]
                time.sleep(0.02)  # idle: what was observed is captured
            timer.ms.clear()
            engine.core.observer = timer
            for _ in range(args.rounds):
                prompt = rng.choices(range(256), k=512)
                list(engine.stream(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        finally:
            engine.close()
        step_ms = statistics.median(timer.ms)
        row[name] = {"ttft_ms": statistics.median(ttft_ms), "step_ms": step_ms}
        print(
            f"{name:>9} first token of 512: {row[name]['ttft_ms']:.2f} ms, its step "
            f"{step_ms:.2f} ms, added {row[name]['ttft_ms'] - step_ms:.2f} ms"
        )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-c", "--ctx-size", type=int, default=4096)
    parser.add_argument("-np", "--parallel", type=int, default=32)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--requests", type=int, default=96, help="of each measured load")
    parser.add_argument("--proven", type=int, default=32, help="of the load that is recorded")
    parser.add_argument("--rounds", type=int, default=30, help="of the first-token measurement")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    driver = open_driver(args.device)
    model = load_model(args.model, device=driver.device, bf16_is_fast=driver.computes_bf16_fast)
    source = provenance(driver.device, driver.description)
    arguments = str(source["command"]).removeprefix("graphseed")
    source |= {"benchmark": "many", "model": model.name}
    source["command"] = f"python benchmarks/many.py{arguments}"
    rows = [{"kind": "first token"} | first_token(model, driver, args)]
    for num_clients in (int(part) for part in args.clients.split(",")):
        for name in POLICIES:
            rows.append({"kind": "load"} | measure(name, model, driver, args, num_clients))
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps(source | row) + "\n")
    return 0 if all(row.get("equal_bytes", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The same prompts through HTTP and through Engine.stream: what a server adds to the first token.

Question: how long does a client of `graphseed serve` wait for its first token, and how many prompt
tokens a second does it get, under off, seed and resident, for short and long prompts, alone and
beside others; and how much of that is HTTP's? Server and client are two processes that talk over
loopback; for one client the same prompts run once more in this process, through Engine.stream.
Prompts are texts, which either way are made tokens first, in what is timed; or with --ids they are
token ids, which have to be read from JSON over HTTP alone. Answers of one client must be the same
tokens by either way and under each policy.

    python benchmarks/over_http.py -m random:smollm2-135m --device cuda --json FILE
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from serving.client import Answer, Load, request_of, run_clients
from serving.process import ServerFailed, serving

from graphseed.capture import Driver, GraphseedError
from graphseed.cli import options
from graphseed.drivers import open_driver
from graphseed.engine import BadParameter, Engine, EngineConfig, EngineCore, SamplingParams
from graphseed.measure.load import spread_of
from graphseed.measure.policies import POLICIES
from graphseed.measure.provenance import provenance
from graphseed.models import Model, load_model

MEASURED: Final = "off,seed,resident"
TOKEN_IDS: Final = range(256)
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz "  # a token each, to the tokenizer of random models
WARM_UP_SEED: Final = 1 << 32
NUM_WARM_UP: Final = 4  # requests before each measured load, for each client
REST_SECONDS: Final = 0.1  # after a warm-up: what `resident` has observed is captured then

Prompts = list[str | list[int]]
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """One load: so many clients, prompts of one length."""

    prompt_len: int
    num_clients: int
    num_requests: int
    has_ids: bool  # prompts of token ids, not of text

    def prompts(self, seed: int = 0) -> Prompts:
        """Fresh random prompts, the same for the same seed."""
        rng = random.Random(seed + self.prompt_len)
        if self.has_ids:
            return [rng.choices(TOKEN_IDS, k=self.prompt_len) for _ in range(self.num_requests)]
        return ["".join(rng.choices(LETTERS, k=self.prompt_len)) for _ in range(self.num_requests)]

    def warm_up(self) -> Prompts:
        """Prompts of the same length that are not measured."""
        return self.prompts(WARM_UP_SEED)[: NUM_WARM_UP * self.num_clients]


@dataclass(frozen=True, slots=True)
class Direct:
    """The prompts of a case through Engine.stream, one after the other."""

    ttft_ms: tuple[float, ...]  # from the prompt to the first token in the reader's hands
    engine_ms: tuple[float, ...]  # of these, what the engine says was queue and prompt
    token_ids: tuple[tuple[int, ...], ...]


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine's sizes: those that the server makes of `serve_flags`."""
    context_len = max(args.prompts) + args.new_tokens
    return EngineConfig(
        context_len=context_len, num_ubatch=args.ubatch_size, num_parallel=args.parallel,
        reuses_prefixes=False,
    )  # fmt: skip


def serve_flags(policy: str, args: argparse.Namespace) -> list[str]:
    """The flags of `graphseed serve` for one policy."""
    config = config_of(args)
    return [
        "-m", args.model, "--device", args.device, "--prompt-graphs", policy,
        "-c", str(config.context_len * config.num_parallel), "-np", str(config.num_parallel),
        "-ub", str(config.num_ubatch), "--no-cache-prompt",
    ]  # fmt: skip


def run_direct(
    policy: str, model: Model, driver: Driver, cases: Sequence[Case], args: argparse.Namespace
) -> list[Direct]:
    """Each case through Engine.stream, by one client."""
    core = EngineCore(model, driver, config_of(args), POLICIES[policy])
    # As the server understands ignore_eos: an end of sequence is not even sampled.
    biases = tuple((token_id, -inf) for token_id in sorted(model.eos_ids))
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, logit_bias=biases)
    found = []
    with Engine(core) as engine:
        for case in cases:
            _streamed(engine, model, case.warm_up(), params)
            time.sleep(REST_SECONDS)
            found.append(_streamed(engine, model, case.prompts(), params))
    return found


def _streamed(engine: Engine, model: Model, prompts: Prompts, params: SamplingParams) -> Direct:
    ttft_ms, engine_ms, token_ids = [], [], []
    for prompt in prompts:
        start_ns = time.perf_counter_ns()
        ids = model.encode(prompt) if isinstance(prompt, str) else prompt
        stream = engine.stream(ids, params)
        first = next(stream)
        ttft_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
        token_ids.append(tuple(delta.token_id for delta in (first, *stream)))
        timings = stream.request.timings
        engine_ms.append((timings.first_token_ns - timings.submitted_ns) / 1e6)
    return Direct(tuple(ttft_ms), tuple(engine_ms), tuple(token_ids))


def measured(policy: str, case: Case, port: int, direct: Direct | None, num_new: int) -> Row:
    """One case over HTTP, beside the same through Engine.stream where that was run."""
    run_clients(port, [request_of(p, num_new) for p in case.warm_up()], case.num_clients)
    time.sleep(REST_SECONDS)
    load = run_clients(port, [request_of(p, num_new) for p in case.prompts()], case.num_clients)
    row = row_of(policy, case, load)
    if direct is not None:
        row |= beside(direct, load.answers)
    print(told(row), flush=True)
    return row


def row_of(policy: str, case: Case, load: Load) -> Row:
    """What the clients of one load saw. Medians over its requests."""
    timings = [answer.timings for answer in load.answers]
    num_observations = sum(each["prompt_observations"] for each in timings)
    ttft = spread_of([answer.ttft_ms for answer in load.answers])
    num_tokens = case.prompt_len * case.num_requests
    return {
        "policy": policy, "clients": case.num_clients, "prompt_tokens": case.prompt_len,
        "requests": case.num_requests, "ttft_ms": ttft.p50, "ttft_p95_ms": ttft.p95,
        "queue_ms": statistics.median(each["queue_ms"] for each in timings),
        "prompt_ms": statistics.median(each["prompt_ms"] for each in timings),
        "outside_engine_ms": statistics.median(a.ttft_ms - a.engine_ms for a in load.answers),
        "prompt_tokens_per_second": statistics.median(e["prompt_per_second"] for e in timings),
        "all_prompt_tokens_per_second": num_tokens / load.seconds,
        "decode_tokens_per_second": statistics.median(e["predicted_per_second"] for e in timings),
        "hit_rate": sum(each["prompt_replayed"] for each in timings) / num_observations,
    }  # fmt: skip


def beside(direct: Direct, answers: Sequence[Answer]) -> Row:
    """How one client's answers compare with the same through Engine.stream."""
    stream_ms = statistics.median(direct.ttft_ms)
    outside_ms = statistics.median(
        ttft - own for ttft, own in zip(direct.ttft_ms, direct.engine_ms, strict=True)
    )
    http_outside_ms = statistics.median(answer.ttft_ms - answer.engine_ms for answer in answers)
    return {
        "stream_ttft_ms": stream_ms,
        "stream_outside_engine_ms": outside_ms,
        "added_ms": statistics.median(answer.ttft_ms for answer in answers) - stream_ms,
        "added_outside_engine_ms": http_outside_ms - outside_ms,
        "equal_answers": [answer.token_ids for answer in answers] == list(direct.token_ids),
    }


def told(row: Row) -> str:
    """A row as a line of text."""
    line = (
        f"{row['policy']:>9} {row['clients']} x {row['prompt_tokens']:>5}: first token "
        f"{row['ttft_ms']:8.2f} ms (queue {row['queue_ms']:7.2f}, prompt {row['prompt_ms']:8.2f}, "
        f"outside {row['outside_engine_ms']:5.2f}), {row['all_prompt_tokens_per_second']:8.0f} "
        f"prompt tok/s, decode {row['decode_tokens_per_second']:6.1f} tok/s, hits "
        f"{row['hit_rate']:.2f}"
    )
    if "added_ms" in row:
        equal = "equal" if row["equal_answers"] else "DIFFER"
        line += f"; Engine.stream {row['stream_ttft_ms']:.2f}, HTTP adds {row['added_ms']:.2f} ms "
        line += f"({row['added_outside_engine_ms']:.2f} outside the engine)"
        line += f", answers {equal}"
    return line


def rows(model: Model, driver: Driver, args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Every measurement, one by one."""
    first: dict[Case, tuple[tuple[int, ...], ...]] = {}
    for policy in args.policies:
        alone = [Case(length, 1, args.requests, args.ids) for length in args.prompts]
        found = dict(zip(alone, run_direct(policy, model, driver, alone, args), strict=True))
        gc.collect()  # the server has the device for itself
        log = folder / f"serve_{policy}.log"
        with serving(serve_flags(policy, args), log, start_seconds=args.start_seconds) as port:
            for num_clients in args.clients:
                for length in args.prompts:
                    case = Case(length, num_clients, args.requests, args.ids)
                    direct = found.get(case)
                    row = measured(policy, case, port, direct, args.new_tokens)
                    if direct is not None:
                        want = first.setdefault(case, direct.token_ids)
                        row["equal_to_off"] = want == direct.token_ids
                    yield row


def numbers(text: str) -> list[int]:
    """Whole numbers above 0 of a list."""
    found = [int(part) for part in text.split(",")]
    if any(number < 1 for number in found):
        raise ValueError(text)
    return found


def policies(text: str) -> list[str]:
    """Names of policies of a list."""
    names = text.split(",")
    if not set(names) <= set(MEASURED.split(",")):
        raise ValueError(text)
    return names


def flags() -> argparse.ArgumentParser:
    """The flags of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=numbers, default="32,512,8192", help="lengths")
    parser.add_argument("--ids", action="store_true", help="prompts of token ids, not of text")
    parser.add_argument("--clients", type=numbers, default="1,8")
    parser.add_argument("--policies", type=policies, default=MEASURED, help="some of these")
    parser.add_argument("--requests", type=int, default=32, help="of each load")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("-np", "--parallel", type=int, default=8)
    parser.add_argument("--start-seconds", type=float, default=120.0, help="for each server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="a folder for what the servers say")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise BadParameter, and SelectorError where every graph is turned off (I12)."""
    options.require_graphs("benchmarks/over_http.py")
    for flag, value, least in (
        ("--new-tokens", args.new_tokens, 2), ("-ub", args.ubatch_size, 1),
        ("-np", args.parallel, 1), ("--requests", args.requests, max(args.clients)),
    ):  # fmt: skip
        if value < least:
            raise BadParameter(flag, value, f"at least {least}")
    for flag, path in (("--json", args.json and args.json.parent), ("--logs", args.logs)):
        if path is not None and not path.is_dir():
            raise BadParameter(flag, str(path), "a folder that exists")


def main(argv: Sequence[str] | None = None) -> int:
    args = flags().parse_args(argv)
    try:
        check(args)
        driver = open_driver(args.device)
    except GraphseedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = load_model(args.model, device=driver.device, bf16_is_fast=driver.computes_bf16_fast)
    source = provenance(driver.device, driver.description, program="python benchmarks/over_http.py")
    source |= {"benchmark": "over_http", "model": model.name, "new_tokens": args.new_tokens}
    source["prompts"] = "token ids" if args.ids else "text"
    are_equal = True
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in rows(model, driver, args, args.logs or Path(folder)):
                are_equal &= bool(row.get("equal_answers", True) and row.get("equal_to_off", True))
                if args.json is not None:  # each is kept as soon as it is there
                    with args.json.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(source | row) + "\n")
        except ServerFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())

"""The same prompts through HTTP and through Engine.stream: what a server adds to the first token.

Question: how long does a client of `graphseed serve` wait for its first token, and how many prompt
tokens a second does it get, under off, seed and resident, for short and long prompts, alone and
beside others; and how much of that is HTTP's? Server and client are two processes that talk over
loopback. For one client each prompt runs in this process too, through Engine.stream, in turn with
the server, so that both meet the same machine. Prompts are texts, which either way are made tokens
first, in what is timed; or with --ids they are token ids, which have to be read from JSON over HTTP
alone. Answers of one client must be the same tokens by either way and under each policy.

    python benchmarks/over_http.py -m random:smollm2-135m --device cuda --json FILE
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serving.client import Answer, Load, ask, connected, request_of, run_clients
from serving.direct import Direct, Streamed, streaming
from serving.process import ServerFailed, serving

from graphseed.capture import Driver, GraphseedError
from graphseed.cli import options
from graphseed.cli.records import append_record
from graphseed.drivers import open_driver
from graphseed.engine import BadParameter, EngineConfig
from graphseed.measure.load import spread_of
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


def in_turn(case: Case, direct: Direct, port: int, num_new: int) -> tuple[list[Streamed], Load]:
    """Each prompt through Engine.stream and over HTTP; every other one over HTTP first."""
    streamed, answers = [], []
    with connected(port) as connection:
        for prompt in case.warm_up():
            direct.ask(prompt)
            ask(connection, request_of(prompt, num_new))
        time.sleep(REST_SECONDS)
        for number, prompt in enumerate(case.prompts()):
            request = request_of(prompt, num_new)
            if number % 2:
                answers.append(ask(connection, request))
            streamed.append(direct.ask(prompt))
            if not number % 2:
                answers.append(ask(connection, request))
    return streamed, Load(tuple(answers), sum(answer.total_ms for answer in answers) / 1e3)


def at_once(case: Case, port: int, num_new: int) -> Load:
    """Several clients over HTTP."""
    run_clients(port, [request_of(p, num_new) for p in case.warm_up()], case.num_clients)
    time.sleep(REST_SECONDS)
    return run_clients(port, [request_of(p, num_new) for p in case.prompts()], case.num_clients)


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


def beside(streamed: Sequence[Streamed], answers: Sequence[Answer]) -> Row:
    """How one client's answers compare with the same through Engine.stream, prompt by prompt."""
    pairs = list(zip(streamed, answers, strict=True))
    outside_ms = [
        (http.ttft_ms - http.engine_ms) - (own.ttft_ms - own.engine_ms) for own, http in pairs
    ]
    return {
        "stream_ttft_ms": statistics.median(own.ttft_ms for own in streamed),
        "added_ms": statistics.median(http.ttft_ms - own.ttft_ms for own, http in pairs),
        "added_outside_engine_ms": statistics.median(outside_ms),
        "equal_answers": all(own.token_ids == http.token_ids for own, http in pairs),
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
    first: dict[Case, list[tuple[int, ...]]] = {}
    num_new = args.new_tokens
    for policy in args.policies:
        log = folder / f"serve_{policy}.log"
        with (
            streaming(policy, model, driver, config_of(args), num_new) as direct,
            serving(serve_flags(policy, args), log, start_seconds=args.start_seconds) as port,
        ):
            for num_clients in args.clients:
                for length in args.prompts:
                    case = Case(length, num_clients, args.requests, args.ids)
                    if num_clients > 1:
                        row = row_of(policy, case, at_once(case, port, num_new))
                    else:
                        streamed, load = in_turn(case, direct, port, num_new)
                        row = row_of(policy, case, load) | beside(streamed, load.answers)
                        tokens = [own.token_ids for own in streamed]
                        row["equal_to_off"] = first.setdefault(case, tokens) == tokens
                    print(told(row), flush=True)
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
    source |= {"prompts": "token ids" if args.ids else "text", "compared": "prompt by prompt"}
    are_equal = True
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in rows(model, driver, args, args.logs or Path(folder)):
                are_equal &= bool(row.get("equal_answers", True) and row.get("equal_to_off", True))
                if args.json is not None:  # each is kept as soon as it is there
                    append_record(args.json, source | row)
        except ServerFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())

"""What every peer process shares: its flags, its model, its clock, its last line.

Owns how a peer is timed: from an idle device to an idle device, by the host's clock, the same for
all of them, with the same random tokens. A peer says how its prompt and its decode step are run.
Does not know the peers, or what becomes of their figures.
"""

import argparse
import inspect
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

NUM_WARM_UP = 3  # torch.compile's graphs run, record, and replay: the third call is the usual one
NUM_WARM_UP_STEPS = 4


class Steps(Protocol):
    """One sequence under one peer. Made, used and dropped by one process."""

    def reset(self) -> None:
        """Forget the sequence. Not timed."""

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Run a whole prompt into an empty sequence, up to the logits of its last token."""

    def decode(self, token_id: int) -> None:
        """Run one more token, up to its logits."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every peer takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    return parser


def run(measure: Callable[[argparse.Namespace], dict[str, Any]], args: argparse.Namespace) -> None:
    """Measure, and print the figures as the last line; or why there are none, and exit 1."""
    try:
        figures = measure(args)
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        print(json.dumps({"error": f"{type(error).__name__}: {reason}"}), flush=True)
        sys.exit(1)
    print(json.dumps(figures), flush=True)


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The driver and the model that graphseed itself would run: same weights, same dtype."""
    from graphseed.drivers import open_driver
    from graphseed.models.load import load_model

    driver = open_driver(args.device)
    model = load_model(
        args.model, device=driver.device, dtype=args.dtype, progress=False,
        bf16_is_fast=driver.computes_bf16_fast,
    )  # fmt: skip
    return driver, model


def dtype_of(model: Any) -> str:
    """The dtype of a model's weights, as records write it."""
    return str(model.dtype).removeprefix("torch.")


def cache_argument(module: Any) -> str:
    """What a Hugging Face model calls the cache that its forward takes (5.24 renamed it)."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def tokens(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Fresh random token ids; the same for each peer, which all begin with the same seed."""
    return rng.choices(range(vocab_size), k=num_tokens)


def measure_steps(
    steps: Steps,
    synchronize: Callable[[], object],
    vocab_size: int,
    args: argparse.Namespace,
    setup_start: float,
) -> dict[str, Any]:
    """Time prompts alone, then decode steps alone. Each kind is warmed up before it is timed.

    `setup_start` is when the peer began to get ready (time.perf_counter); what it did since and the
    warm-up, compilation included, are its setup.
    """
    rng = random.Random(17)

    def seconds(work: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - start

    def one_prompt() -> float:
        steps.reset()
        token_ids = tokens(rng, vocab_size, args.prompt_tokens)
        return seconds(partial(steps.prompt, token_ids))

    def one_decode(num_steps: int) -> float:
        one_prompt()
        token_ids = tokens(rng, vocab_size, num_steps)
        return sum(seconds(partial(steps.decode, token_id)) for token_id in token_ids)

    for _ in range(NUM_WARM_UP):
        one_prompt()
    setup = time.perf_counter() - setup_start
    prompt_rates = [args.prompt_tokens / one_prompt() for _ in range(args.repetitions)]
    warm_up_start = time.perf_counter()
    one_decode(min(args.new_tokens, NUM_WARM_UP_STEPS))
    setup += time.perf_counter() - warm_up_start
    decode_rates = [args.new_tokens / one_decode(args.new_tokens) for _ in range(args.repetitions)]
    return rates(prompt_rates, decode_rates) | {"setup_seconds": setup}


def rates(prompt_rates: Sequence[float], decode_rates: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation of tokens a second, one value for each repetition."""
    return {
        "prompt_tokens_per_second": statistics.mean(prompt_rates),
        "prompt_stddev": statistics.stdev(prompt_rates) if len(prompt_rates) > 1 else 0.0,
        "decode_tokens_per_second": statistics.mean(decode_rates),
        "decode_stddev": statistics.stdev(decode_rates) if len(decode_rates) > 1 else 0.0,
    }

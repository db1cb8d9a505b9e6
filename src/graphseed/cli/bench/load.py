"""`graphseed bench --load`: closed-loop clients under every policy, TTFT in its two halves.

Owns the flags of --load, their checks and the flow. What is measured is in measure/load, how it is
shown in load_report. The other flags of `graphseed bench` are read, not owned.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphseed.capture import Selection
from graphseed.cli import options
from graphseed.cli.records import append_record, check_writable

if TYPE_CHECKING:
    from graphseed.capture import Driver
    from graphseed.measure.load import LoadResult, OnEnd
    from graphseed.models.model import Model

DEFAULT_CLIENTS: Final = "1,8,32"
DEFAULT_POLICIES: Final = "off,seed,resident"
DEFAULT_PROMPT_LENS: Final = "16,32,96,128,384,512,1024,2048"
OUTPUTS: Final = ("md", "json", "jsonl")
NUM_PROVEN: Final = 32  # requests that run once more with their plans on record


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What --load was asked for, checked."""

    policies: tuple[str, ...]
    clients: tuple[int, ...]
    num_requests: int
    num_parallel: int
    context_len: int
    num_ubatch: int
    prompt_lens: tuple[int, ...]
    num_new_tokens: int
    output: str
    json: Path | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of --load to those of `graphseed bench`."""
    group = parser.add_argument_group(
        "closed-loop clients",
        "With --load, clients that each send their next request when the last one has ended; "
        f"then -np are the slots (default: the largest number of clients), --policies is "
        f"{DEFAULT_POLICIES} where not given, -o is md, json or jsonl, and -r is not read.",
    )
    group.add_argument("--load", action="store_true", help="measure a load of clients instead")
    group.add_argument(
        "--clients", default=DEFAULT_CLIENTS, metavar="LIST",
        help="numbers of clients, a load for each (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--requests", type=int, default=96, metavar="N",
        help="requests of each measured load (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--load-prompt-lens", default=DEFAULT_PROMPT_LENS, metavar="LIST",
        help="lengths that prompts are drawn from, each as often (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--load-new-tokens", type=int, default=32, metavar="N",
        help="new tokens of each request (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "-c", "--ctx-size", type=int, default=0, metavar="N",
        help="tokens of prompt and answer (default: 0 = what the load needs)",
    )  # fmt: skip


def execute(args: argparse.Namespace) -> int:
    """Run the load under every policy: 0 when all bytes are equal, else 1.

    `args` are those of `graphseed bench`, with one model in `model`. Raises GraphseedError, and
    what ended a load.
    """
    settings = checked(args)
    from graphseed.cli.bench import load_report as report

    loaded = options.load(args, Selection())
    model, driver = loaded.model, loaded.driver
    report.print_head(model, driver, settings)
    results = _measured(model, driver, settings, args.quiet)
    findings = report.print_report(settings, results)
    if settings.json is not None:
        record = report.as_record(model, driver, settings, results, findings)
        append_record(settings.json, record)
    return 0 if all(result.proof.is_equal for result in results) else 1


def _measured(
    model: "Model", driver: "Driver", settings: LoadSettings, is_quiet: bool
) -> "list[LoadResult]":
    from graphseed.engine import EngineConfig
    from graphseed.measure import load

    config = EngineConfig(
        context_len=settings.context_len, num_ubatch=settings.num_ubatch,
        num_parallel=settings.num_parallel, max_waiting=max(settings.clients),
    )  # fmt: skip
    mix = load.Mix(load.plain_token_ids(model), settings.prompt_lens, settings.num_new_tokens)
    results = []
    num_loads = len(settings.clients) * len(settings.policies)
    with _progress(num_loads * settings.num_requests, is_quiet) as on_end:
        for num_clients in settings.clients:
            # The seed is the number of clients: every policy gets the same requests.
            jobs = load.workload(num_clients, settings.num_requests, mix)
            warm_up = load.warm_up_of(num_clients, num_clients, mix)
            for policy in settings.policies:
                results.append(
                    load.measure_load(
                        policy, model, driver, config, jobs, num_clients,
                        warm_up=warm_up, num_proven=NUM_PROVEN, on_end=on_end,
                    )
                )  # fmt: skip
    return results


def checked(args: argparse.Namespace) -> LoadSettings:
    """What was asked for. Raises BadParameter before anything is loaded."""
    from graphseed.cli.bench import flags  # which adds our flags to its own
    from graphseed.engine import BadParameter

    _check_read(args)
    clients = flags.numbers("--clients", [args.clients], 1)
    if len(set(clients)) < len(clients):
        raise BadParameter("--clients", args.clients, "each number once")
    prompt_lens = flags.numbers("--load-prompt-lens", [args.load_prompt_lens], 1)
    num_parallel = _number("-np", _sole("-np", args.parallel, max(clients)), 1)
    num_ubatch = min(
        _number("-ub", _sole("-ub", args.ubatch_size, 512), 1),
        _number("-b", _sole("-b", args.batch_size, 2048), 1),
    )
    # Every client has work, and a decode rate needs a second token.
    num_requests = _number("--requests", args.requests, max(clients))
    num_new_tokens = _number("--load-new-tokens", args.load_new_tokens, 2)
    needed = max(prompt_lens) + num_new_tokens
    context_len = _number("-c", args.ctx_size, 0) or needed
    if context_len < needed:
        expected = (
            f"0 (what the load needs) or at least {needed}, the longest prompt and its answer"
        )
        raise BadParameter("-c", context_len, expected)
    output = _sole("-o", args.output, OUTPUTS[0])
    if output not in OUTPUTS:
        raise BadParameter("-o", output, f"{', '.join(OUTPUTS)} with --load")
    check_writable("--json", args.json)
    return LoadSettings(
        _policies(args.policies), clients, num_requests, num_parallel, context_len, num_ubatch,
        prompt_lens, num_new_tokens, output, args.json,
    )  # fmt: skip


def _check_read(args: argparse.Namespace) -> None:
    """Refuse what was given and would not be looked at."""
    from graphseed.engine import BadParameter

    for flag, given, instead in (
        ("-p", args.n_prompt, "the prompts are drawn from --load-prompt-lens"),
        ("-n", args.n_gen, "the answers have --load-new-tokens"),
        ("-pg", args.pg, "a request is always a prompt and its answer"),
        ("-d", args.n_depth, "a prompt begins an empty slot"),
        ("--plot", args.plot and str(args.plot), "only prompt rows without --load are drawn"),
        ("--no-warmup", args.no_warmup, "a load is warmed up by requests of its own"),
        ("--delay", args.delay, "loads follow each other at once"),
    ):
        if given:
            raise BadParameter(flag, given, f"nothing with --load: {instead}")


def _policies(given: str | None) -> tuple[str, ...]:
    from graphseed.engine import BadParameter
    from graphseed.measure.policies import POLICIES

    names = tuple((given or DEFAULT_POLICIES).split(","))
    if any(name not in POLICIES for name in names) or len(set(names)) < len(names):
        expected = f"some of {', '.join(POLICIES)}, comma-separated, each once"
        raise BadParameter("--policies", given, expected)
    return names


def _sole(flag: str, given: object, default: object) -> str:
    """The one value of a flag that takes lists elsewhere; None and an empty list: not given."""
    from graphseed.engine import BadParameter

    value = given
    while isinstance(value, list | tuple) and len(value) <= 1:
        value = value[0] if value else None
    if isinstance(value, list | tuple):
        raise BadParameter(flag, given, "one value with --load")
    return str(default if value is None else value)


def _number(flag: str, given: int | str, least: int) -> int:
    from graphseed.engine import BadParameter

    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if number < least:
        raise BadParameter(flag, given, f"a whole number, at least {least}")
    return number


@contextmanager
def _progress(num_requests: int, is_quiet: bool) -> "Iterator[OnEnd]":
    """A bar over all measured requests on stderr, where a person watches."""
    from rich.console import Console
    from rich.progress import Progress

    err = Console(stderr=True, highlight=False)
    # Drawn once a second: drawing takes time from the threads that are measured. Stdout is left
    # alone: it may be a file.
    bar = Progress(
        console=err, disable=is_quiet or not err.is_terminal, refresh_per_second=1,
        transient=True, redirect_stdout=False,
    )  # fmt: skip
    with bar:
        task = bar.add_task("requests", total=num_requests)
        yield lambda request: bar.advance(task)

"""`graphseed demo`: one long prompt under every policy, with the bytes compared.

Owns the flow: load once, run the same prompt twice under each policy, report, judge. What was
measured is in measure/demo.py, how it is shown in report.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphseed.capture import Selection
from graphseed.cli import options
from graphseed.cli.records import append_record, check_writable
from graphseed.measure.policies import POLICIES

if TYPE_CHECKING:
    from graphseed.engine import Delta
    from graphseed.measure.demo import PolicyRun
    from graphseed.models.model import Model

SUMMARY: Final = "Run one long prompt under every policy, compare bytes and speed."
QUESTION: Final = (
    "\n\nAnswer in one sentence: what was the name of the goat that rode on the first train?"
)
# Prompt length where the text can be repeated without meaning lost: random weights.
RANDOM_PROMPT_TOKENS: Final = 8192
CPU_RANDOM_PROMPT_TOKENS: Final = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.add_model_flags(parser)
    parser.add_argument(
        "-n", "--predict", type=int, default=48, metavar="N",
        help="new tokens at most (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, metavar="N",
        help="cut or repeat the text to N prompt tokens (default: the text once; 8192 for random "
        "weights on a GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", default=",".join(POLICIES), metavar="LIST",
        help="which to run, in order (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the result as one JSON line"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command: 0 when bytes are equal and what should replay did, else 1."""
    names = _checked(args)
    from graphseed.cli.demo import report
    from graphseed.engine import SamplingParams
    from graphseed.measure.demo import measure_policy

    loaded = options.load(args, Selection())
    model, driver = loaded.model, loaded.driver
    is_random = model.name.startswith("random:")
    prompt_ids = _prompt(model, args, driver.device)
    params = SamplingParams(max_tokens=args.predict, ignore_eos=is_random)
    config = options.engine_config(args, context_len=len(prompt_ids) + args.predict)
    # The second pass runs the same prompt: it must be computed again.
    config = replace(config, reuses_prefixes=False)
    report.print_head(model, driver, config, len(prompt_ids))
    runs: list[PolicyRun] = []
    for name in names:
        show = _printer() if not runs and not is_random else None
        with report.working(f"policy {name}", is_shown=show is None):
            runs.append(
                measure_policy(
                    name, POLICIES[name], model, driver, config, prompt_ids, params, show
                )
            )
    findings = report.print_report(model, driver, runs)
    if args.json is not None:
        append_record(args.json, report.as_record(model, driver, config, runs, findings))
    return 1 if findings else 0


def _checked(args: argparse.Namespace) -> list[str]:
    """The policies to run; raises GraphseedError before anything is loaded."""
    options.require_graphs("demo")
    from graphseed.engine import BadParameter

    names: list[str] = args.policies.split(",")
    if any(name not in POLICIES for name in names) or len(set(names)) < 2:
        expected = f"at least two of {', '.join(POLICIES)}, comma-separated"
        raise BadParameter("--policies", args.policies, expected)
    if args.predict < 1:
        raise BadParameter("-n", args.predict, "at least 1 new token")
    if args.prompt_tokens < 0:
        raise BadParameter("--prompt-tokens", args.prompt_tokens, "0 (the text once) or more")
    check_writable("--json", args.json)
    return names


def _prompt(model: "Model", args: argparse.Namespace, device: str) -> list[int]:
    text = files("graphseed.cli.demo").joinpath("data/harbour.txt").read_text(encoding="utf-8")
    wanted = args.prompt_tokens
    if not wanted and model.name.startswith("random:"):
        wanted = CPU_RANDOM_PROMPT_TOKENS if device == "cpu" else RANDOM_PROMPT_TOKENS
    prompt_ids: list[int] = model.chat([{"role": "user", "content": text + QUESTION}])
    if not wanted:
        return prompt_ids
    question = model.encode(QUESTION)
    body: list[int] = model.encode(text)
    room = max(0, wanted - len(question))
    repeated = (body * (room // len(body) + 1))[:room]
    cut: list[int] = (repeated + question)[:wanted]
    return cut


def _printer() -> "Callable[[Delta], None]":
    print("\nanswer: ", end="")

    def show(delta: "Delta") -> None:
        print(delta.text, end="", flush=True)
        if delta.request.finish_reason is not None:
            print("\n")

    return show

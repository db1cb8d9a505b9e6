"""`graphseed verify`: every policy against graphs disabled on the user's own model, byte for byte.

Owns the command's flags, its progress bar and its exit code. What is proven is measure.verify's,
how it is shown report's.
"""

import argparse
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphseed.capture import Selection
from graphseed.cli import options
from graphseed.cli.records import append_record, check_writable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from graphseed.measure.verify.proof import VerifySettings

SUMMARY: Final = "Prove on this model and device that every policy computes the same bytes."
POLICIES: Final = "off,seed,resident"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.add_model_flags(parser)
    parser.add_argument(
        "-np", "--parallel", type=int, default=4, metavar="N",
        help="sequences at once: the largest packed prompt and decode batch (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", default=POLICIES, metavar="LIST",
        help="which to compare with graphs disabled (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=2048, metavar="N",
        help="the longest prompt; the context may allow less (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N",
        help="times that every case runs: seeded, replayed, and again after a release in every "
        "second round (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=-1, help="of the tokens; -1: random (default)")
    parser.add_argument(
        "--against", choices=("hf",), metavar="hf",
        help="compare with the plain Hugging Face forward too, within a tolerance",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the result as one JSON line"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command: 0 when the proof holds, 1 on any finding. Raises GraphseedError."""
    settings = _checked(args)
    from graphseed.cli.verify import report
    from graphseed.measure.verify.against_hf import compare_with_hf
    from graphseed.measure.verify.proof import Progress, verify

    loaded = options.load(args, Selection())
    model, driver = loaded.model, loaded.driver
    report.print_head(model, driver, settings)
    with _bar("verifying") as bar:

        def show(progress: Progress) -> None:
            what = f"round {progress.round_number}, {progress.case}"
            bar.update(
                bar.task_ids[0], description=what, completed=progress.num_done,
                total=progress.num_cases,
            )  # fmt: skip

        result = verify(model, driver, settings, show)
    against = None
    if args.against == "hf":
        with _bar("plain forwards") as bar:
            against = compare_with_hf(
                model,
                driver,
                result.reads,
                lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total),
            )
    findings = report.print_report(result, against)
    if args.json is not None:
        record = report.as_record(model, driver, result, against, findings)
        append_record(args.json, record)
    return 1 if findings else 0


def _checked(args: argparse.Namespace) -> "VerifySettings":
    """What is to be proven; raises GraphseedError before anything is loaded."""
    options.require_graphs("verify")
    from graphseed.engine import BadParameter
    from graphseed.measure.verify.proof import VerifySettings

    if args.seed < -1:
        raise BadParameter("--seed", args.seed, "-1 (random) or more")
    if args.batch_size < 1:
        raise BadParameter("-b", args.batch_size, "at least 1")
    settings = VerifySettings(
        policies=tuple(args.policies.split(",")), max_tokens=args.max_tokens,
        num_rounds=args.rounds, num_ubatch=min(args.batch_size, args.ubatch_size),
        num_parallel=args.parallel,
        context_len=args.ctx_size, seed=secrets.randbits(32) if args.seed == -1 else args.seed,
        keeps_reads=args.against == "hf",
    )  # fmt: skip
    check_writable("--json", args.json)
    return settings


@contextmanager
def _bar(what: str) -> "Iterator[Bar]":
    """A progress bar of one task on stderr; nothing is drawn where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    is_watched = sys.stderr.isatty()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not is_watched) as bar:
        bar.add_task(what, total=None)
        yield bar

"""The flags of `graphseed bench`, named as llama-bench names them, and their checks.

Owns the grammar of lists and ranges, and BenchRequest: what was asked for, checked before anything
is loaded. The flags of --load are load's. Does not measure.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphseed.cli.bench import load
from graphseed.cli.records import check_writable

if TYPE_CHECKING:
    from graphseed.measure.bench.grid import BenchTest

OUTPUTS: Final = ("md", "json", "jsonl", "csv")
DEFAULT_POLICIES: Final = "disabled,off,seed,resident"
DEFAULT_MODEL: Final = "smollm2"
BASELINE: Final = "off"
# What a flag is without being given: columns for these appear when they are not so.
DEFAULTS: Final = {"-p": 512, "-n": 128, "-d": 0, "-b": 2048, "-ub": 512, "-np": 1}
MAX_VALUES: Final = 4096  # of one flag: a range with a slip in it would run for days

_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?")
_GRAMMAR: Final = "numbers, lists a,b and ranges first-last, first-last+step, first-last*factor"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What was asked for, checked."""

    models: tuple[str, ...]
    groups: tuple[tuple["BenchTest", ...], ...]  # rows of a group differ in prompt and answer only
    listed: frozenset[str]  # flags that have a column
    policies: tuple[str, ...]
    num_repetitions: int
    warms_up: bool
    delay_s: float
    output: str
    json: Path | None
    plot: Path | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command, those of --load too."""
    parser.add_argument(
        "-m", "--model", action="append", metavar="LIST",
        help="smollm2, a Hugging Face directory or hub id, a GGUF file, or random:PRESET "
        f"(default: {DEFAULT_MODEL})",
    )  # fmt: skip
    for flag, name, text in (
        ("-p", "--n-prompt", "tokens of a prompt, timed without a decode; 0: no such row"),
        ("-n", "--n-gen", "tokens decoded, timed without a prompt; 0: no such row"),
        ("-d", "--n-depth", "tokens of context before a test, not timed"),
        ("-b", "--batch-size", "a forward pass sees no more tokens than the smaller of -b and -ub"),
        ("-ub", "--ubatch-size", "tokens that one forward pass sees"),
        ("-np", "--parallel", "sequences at once, each with -p and -n tokens: prompts share a "
         "forward pass where they fit, and each decode step takes one token of every sequence; "
         "tokens per second count all of them"),
    ):  # fmt: skip
        parser.add_argument(
            flag, name, action="append", metavar="LIST", help=f"{text} (default: {DEFAULTS[flag]})"
        )
    parser.add_argument(
        "-pg", action="append", metavar="PP,TG", default=[],
        help="a prompt of PP tokens and then TG decoded ones, timed together; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "-r", "--repetitions", type=int, default=5, metavar="N",
        help="timed repetitions of each test (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", metavar="LIST",
        help=f"which stand side by side, {BASELINE} among them (default: {DEFAULT_POLICIES})",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, bf16, fp16, fp32 (default: auto)")
    parser.add_argument(
        "--no-warmup", action="store_true",
        help="time the first repetition too: captures of seed are then in it",
    )  # fmt: skip
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="S",
        help="seconds to rest before each test (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="md|json|jsonl|csv",
        help="form of the result; json is one document, the last line (default: md)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the result, one JSON line for each model"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg",
        help="draw prompt tokens per second and multiples over two or more prompt lengths",
    )  # fmt: skip
    parser.add_argument(
        "--progress", action="store_true", help="a line on stderr for each test, beside the bar"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log debug lines too")
    parser.add_argument("-q", "--quiet", action="store_true", help="no bar, log warnings only")
    load.add_flags(parser)


def checked(args: argparse.Namespace) -> BenchRequest:
    """What was asked for. Raises BadParameter before anything is loaded."""
    from graphseed.engine import BadParameter

    if args.repetitions < 1:
        raise BadParameter("-r", args.repetitions, "at least 1 repetition")
    if not 0 <= args.delay <= 3600:
        raise BadParameter("--delay", args.delay, "0 to 3600 seconds")
    if args.ctx_size:
        raise BadParameter("-c", args.ctx_size, "nothing without --load: tests set it themselves")
    output = args.output or OUTPUTS[0]
    if output not in OUTPUTS:
        raise BadParameter("-o", output, f"one of {', '.join(OUTPUTS)}")
    groups = _groups(args)
    if args.plot is not None:
        _check_plot(args.plot, groups)
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        check_writable(flag, path)
    return BenchRequest(
        models=models_of(args),
        groups=groups,
        listed=_listed(groups),
        policies=_policies(args.policies),
        num_repetitions=args.repetitions,
        warms_up=not args.no_warmup,
        delay_s=args.delay,
        output=output,
        json=args.json,
        plot=args.plot,
    )


def models_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The models of -m, each once. Raises BadParameter for an empty name."""
    from graphseed.engine import BadParameter

    given = args.model or [DEFAULT_MODEL]
    names = [name for text in given for name in text.split(",")]
    if not all(names):
        raise BadParameter("-m", ",".join(given), "names of models, comma-separated")
    return tuple(dict.fromkeys(names))


def numbers(flag: str, texts: Sequence[str], least: int) -> tuple[int, ...]:
    """The numbers of a flag that was given once or more, in order. Raises BadParameter."""
    from graphseed.engine import BadParameter

    found: list[int] = []
    for text in texts:
        for item in text.split(","):
            try:
                found += _range(item)
            except ValueError as error:
                raise BadParameter(flag, text, f"{_GRAMMAR}; {error}") from None
            if len(found) > MAX_VALUES:
                raise BadParameter(flag, text, f"at most {MAX_VALUES} values")
    if min(found) < least:
        raise BadParameter(flag, min(found), f"at least {least}")
    return tuple(found)


def _range(item: str) -> Sequence[int]:
    """The numbers of one item, MAX_VALUES and one at most. Raises ValueError, with the reason."""
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} is none of them")
    first, last = int(match[1]), int(match[2] or match[1])
    step = int(match[4] or 1)
    if last < first:
        raise ValueError(f"the range {item} ends before it begins")
    if match[3] == "*":
        if step < 2 or not first:
            raise ValueError(f"the range {item} never reaches its end")
        values = [first]
        while values[-1] * step <= last:
            values.append(values[-1] * step)
        return values
    if not step:
        raise ValueError(f"the range {item} never reaches its end")
    return range(first, last + 1, step)[: MAX_VALUES + 1]


def _groups(args: argparse.Namespace) -> "tuple[tuple[BenchTest, ...], ...]":
    from graphseed.engine import BadParameter
    from graphseed.measure.bench.grid import grid

    def of(flag: str, given: list[str] | None, least: int) -> tuple[int, ...]:
        return numbers(flag, given or [str(DEFAULTS[flag])], least)

    groups = grid(
        prompt_lens=of("-p", args.n_prompt, 0),
        new_lens=of("-n", args.n_gen, 0),
        pairs=[_pair(text) for text in args.pg],
        depth_lens=of("-d", args.n_depth, 0),
        num_batches=of("-b", args.batch_size, 1),
        num_ubatches=of("-ub", args.ubatch_size, 1),
        num_parallels=of("-np", args.parallel, 1),
    )
    if not groups[0]:
        raise BadParameter("-p and -n", 0, "some tokens in one of -p, -n and -pg")
    return tuple(groups)


def _pair(text: str) -> tuple[int, int]:
    from graphseed.engine import BadParameter

    match = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if match is None or not int(match[1]) + int(match[2]):
        raise BadParameter("-pg", text, "two numbers PP,TG, not both 0, e.g. 512,128")
    return int(match[1]), int(match[2])


def _policies(given: str | None) -> tuple[str, ...]:
    from graphseed.engine import BadParameter
    from graphseed.measure.policies import POLICIES

    names = (given or DEFAULT_POLICIES).split(",")
    is_known = all(name in POLICIES for name in names)
    if not is_known or BASELINE not in names or len(set(names)) < len(names):
        expected = f"some of {', '.join(POLICIES)}, each once; {BASELINE} is what multiples are of"
        raise BadParameter("--policies", given, expected)
    return tuple(name for name in POLICIES if name in names)


def _listed(groups: "Sequence[Sequence[BenchTest]]") -> frozenset[str]:
    values = {
        "-b": {group[0].num_batch for group in groups},
        "-ub": {group[0].num_ubatch for group in groups},
        "-np": {group[0].num_parallel for group in groups},
    }
    return frozenset(flag for flag, found in values.items() if found != {DEFAULTS[flag]})


def _check_plot(path: Path, groups: "Sequence[Sequence[BenchTest]]") -> None:
    from graphseed.cli.bench.plot import require_library
    from graphseed.engine import BadParameter

    if path.suffix != ".svg":
        raise BadParameter("--plot", str(path), "a file whose name ends in .svg")
    lens = {test.prompt_len for test in groups[0] if test.prompt_len and not test.new_len}
    if len(lens) < 2:
        expected = f"two or more prompt lengths to draw over (-p 64,512), got {len(lens)}"
        raise BadParameter("--plot", str(path), expected)
    require_library()

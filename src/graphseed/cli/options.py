"""The flags that several commands share, named as llama.cpp names them.

Owns the parser pieces and what turns them into a driver, a model, and parameters. Does not run
anything.
"""

import argparse
import os
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphseed.capture import Selection, SelectorError, read_selectors
from graphseed.capture.selector import DISABLE_VARIABLE

if TYPE_CHECKING:
    from graphseed.capture import Driver
    from graphseed.engine import EngineConfig, SamplingParams
    from graphseed.models.model import Model


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a command runs on."""

    driver: "Driver"
    model: "Model"
    selection: Selection


def add_model_flags(parser: argparse.ArgumentParser, default: str | None = "smollm2") -> None:
    """Add -m, --device, --dtype and the sizes of an engine."""
    parser.add_argument(
        "-m", "--model", default=default, metavar="MODEL",
        help="smollm2, a Hugging Face directory or hub id, a GGUF file, or random:PRESET "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, bf16, fp16, fp32 (default: auto)")
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=0, metavar="N",
        help="tokens of prompt and answer (default: 0 = the model's)",
    )  # fmt: skip
    parser.add_argument(
        "-ub", "--ubatch-size", type=int, default=512, metavar="N",
        help="tokens of one forward pass (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-b", "--batch-size", type=int, default=2048, metavar="N",
        help="as llama.cpp: a forward pass takes the smaller of -b and -ub (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="log debug lines too")
    parser.add_argument("-q", "--quiet", action="store_true", help="log warnings only")


def add_policy_flag(parser: argparse.ArgumentParser) -> None:
    """Add --prompt-graphs."""
    parser.add_argument(
        "--prompt-graphs", default=None, metavar="off|seed|resident",
        help="when prompt graphs are captured; seed is also GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED=1 "
        "(default: off)",
    )  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add -n and the sampling flags; what is not given comes from the model."""
    number = "the model's generation_config"
    parser.add_argument(
        "-n", "--predict", "--n-predict", type=int, default=128, metavar="N",
        help="new tokens, -1: until the context is full (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--temp", type=float, help=f"0: greedy (default: {number})")
    parser.add_argument("--top-k", type=int, help=f"0: all (default: {number})")
    parser.add_argument("--top-p", type=float, help=f"(default: {number})")
    parser.add_argument("--min-p", type=float, help=f"(default: {number})")
    parser.add_argument("--typical", type=float, default=1.0, metavar="P", help="1.0: off")
    parser.add_argument(
        "--repeat-last-n", type=int, default=64, metavar="N",
        help="tokens that penalties look back on; -1: all (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--repeat-penalty", type=float, metavar="X", help=f"(default: {number})")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="0: off")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="0: off")
    parser.add_argument(
        "-l", "--logit-bias", action="append", default=[], type=parse_bias, metavar="ID(+/-)BIAS",
        help="make a token more or less likely, e.g. 15043+1 or 15043-inf",
    )  # fmt: skip
    parser.add_argument("-s", "--seed", type=int, default=-1, help="-1: random (default)")
    parser.add_argument(
        "-r", "--reverse-prompt", action="append", default=[], metavar="TEXT", dest="stop",
        help="stop at this text; may be given several times",
    )  # fmt: skip
    parser.add_argument("--ignore-eos", action="store_true", help="go on after end of sequence")


def parse_bias(text: str) -> tuple[int, float]:
    """Parse llama.cpp's TOKEN_ID(+/-)BIAS."""
    found = re.fullmatch(r"(\d+)([+-](?:\d+(?:\.\d*)?|\.\d+|inf))", text)
    if found is None or found[2] == "+inf":
        raise argparse.ArgumentTypeError(f"{text!r} is no bias; expected e.g. 15043+1 or 15043-inf")
    return int(found[1]), float(found[2])


def load(
    args: argparse.Namespace, selection: Selection, *, takes_rerankers: bool = False
) -> Loaded:
    """Open the driver and make the model ready. Raises GraphseedError."""
    from graphseed.drivers import open_driver
    from graphseed.models.load import load_model

    driver = open_driver(args.device)
    model = load_model(
        args.model,
        device=driver.device,
        dtype=args.dtype,
        bf16_is_fast=driver.computes_bf16_fast,
        takes_rerankers=takes_rerankers,
    )
    return Loaded(driver, model, selection)


def selection_of(args: argparse.Namespace) -> Selection:
    """Read the selectors of the command line and the environment. Raises SelectorError."""
    return read_selectors(os.environ, args.prompt_graphs)


def require_graphs(command: str) -> None:
    """Refuse a command that sets its policies itself while every graph is turned off (I12).

    Raises SelectorError.
    """
    if DISABLE_VARIABLE in os.environ:
        raise SelectorError(
            f"{DISABLE_VARIABLE} is set, which turns every graph off, and {command} compares "
            "graphs with none: unset it for this command"
        )


def engine_config(args: argparse.Namespace, context_len: int = 0) -> "EngineConfig":
    """The engine's sizes from -c, -b and -ub; `context_len` stands in when -c was not given."""
    from graphseed.engine import BadParameter, EngineConfig

    if args.batch_size < 1:
        raise BadParameter("-b", args.batch_size, "at least 1")
    num_ubatch = min(args.batch_size, args.ubatch_size)
    return EngineConfig(context_len=args.ctx_size or context_len, num_ubatch=num_ubatch)


def sampling_params(args: argparse.Namespace, model: "Model") -> "SamplingParams":
    """The request's parameters: flags first, then the model's own defaults."""
    from graphseed.engine import SamplingParams

    own = model.sampling

    def pick(given: float | None, default: float) -> float:
        return default if given is None else given

    return SamplingParams(
        temperature=pick(args.temp, own.temperature if own.do_sample else 0.0),
        top_k=int(pick(args.top_k, own.top_k)),
        top_p=pick(args.top_p, own.top_p),
        min_p=pick(args.min_p, own.min_p),
        seed=secrets.randbits(32) if args.seed == -1 else args.seed,
        max_tokens=args.predict,
        typical_p=args.typical,
        repeat_last_n=args.repeat_last_n,
        repeat_penalty=pick(args.repeat_penalty, own.repetition_penalty),
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=tuple(args.logit_bias),
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )

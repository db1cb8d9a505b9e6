"""`graphseed run`: one prompt in, its answer streamed out.

Owns the command alone; the engine does the work.
"""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphseed.capture import GraphseedError, LogLines, Policy, Selection
from graphseed.cli import options

if TYPE_CHECKING:
    from graphseed.engine import EngineCore, Request
    from graphseed.engine.record import PlanRecorder
    from graphseed.models.model import Model

SUMMARY: Final = "Answer one prompt."

logger = logging.getLogger("graphseed.run")


class BadInput(GraphseedError):
    """The prompt could not be read."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.add_model_flags(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="a file with the prompt")
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="a system message")
    parser.add_argument(
        "-no-cnv", "--no-conversation", action="store_true",
        help="use the prompt as it is, without the model's chat template",
    )  # fmt: skip
    parser.add_argument(
        "--record-plans", type=Path, metavar="FILE",
        help="write every step's plan, for `graphseed replay-plans`; slows the run down",
    )  # fmt: skip
    options.add_policy_flag(parser)
    options.add_sampling_flags(parser)


def execute(args: argparse.Namespace) -> int:
    """Run the command. Raises GraphseedError."""
    selection = options.selection_of(args)
    announce(selection)
    text = _read(args)
    from graphseed.engine import EngineCore

    loaded = options.load(args, selection)
    params = options.sampling_params(args, loaded.model)
    engine = EngineCore(loaded.model, loaded.driver, options.engine_config(args), selection)
    engine.log.subscribe(LogLines())
    try:
        prompt_ids = _encode(args, loaded.model, text)
        stream = engine.stream(prompt_ids, params)
        engine.warm_up()
        recorder = _recorder(args, engine)
        request = None
        for delta in stream:
            print(delta.text, end="", flush=True)
            request = delta.request
        print(flush=True)
        if recorder is not None:
            recorder.close()
        if request is not None:
            _report(request)
    finally:
        _summarise(engine)
        engine.close()
    return 0


def announce(selection: Selection) -> None:
    """Log what selected the policy, and what defeats it (I10)."""
    logger.info("prompt graphs: policy=%s selected by %s", selection.prompt.value, selection.source)
    if selection.decode is Policy.OFF:
        logger.info("decode graphs: off")
    for name, value in selection.read:
        logger.debug("selector %s: %r", name, value)
    for warning in selection.warnings:
        logger.warning("%s", warning)


def _recorder(args: argparse.Namespace, engine: "EngineCore") -> "PlanRecorder | None":
    if args.record_plans is None:
        return None
    from graphseed.engine.record import PlanRecorder

    try:
        recorder = PlanRecorder(args.record_plans, engine)
    except OSError as error:
        raise BadInput(f"--record-plans {args.record_plans} cannot be written: {error}") from None
    engine.observer = recorder
    return recorder


def _read(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    try:
        return str(args.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"prompt file {args.file} cannot be read as UTF-8 text: {error}") from None


def _encode(args: argparse.Namespace, model: "Model", text: str) -> list[int]:
    if args.no_conversation:
        return model.encode(text)
    messages = [{"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    return model.chat(messages)


def _report(request: "Request") -> None:
    timings, new = request.timings, len(request.output_ids)
    reason = request.finish_reason.value if request.finish_reason else "?"
    logger.info(
        "prompt: %d tokens in %.2f ms (%.2f tokens per second)", len(request.prompt_ids),
        timings.prompt_ms, 1e3 * len(request.prompt_ids) / max(timings.prompt_ms, 1e-9),
    )  # fmt: skip
    if new > 1:
        logger.info(
            "decode: %d tokens in %.2f ms (%.2f tokens per second)", new - 1, timings.decode_ms,
            1e3 * (new - 1) / max(timings.decode_ms, 1e-9),
        )  # fmt: skip
    logger.info("answer: %d tokens, ended by %s, seed %d", new, reason, request.params.seed)


def _summarise(engine: "EngineCore") -> None:
    lines, no_effect = engine.finish()
    for line in lines:
        logger.info("%s", line)
    if no_effect is not None:
        logger.warning("%s", no_effect)

"""`graphseed attribute`: where the host's time goes, and what replay would save.

Owns the flow: measure the direct path, profile it in a process of its own and print the prediction,
then replay and print both; or sample running processes. Owns that process: it loads the model
anew, says nothing, and does not outlive this one. What is measured is in measure/attribute, how it
is shown in report.
"""

import argparse
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graphseed.capture import GraphseedError, Selection
from graphseed.cli import options
from graphseed.cli.records import append_record, check_writable

if TYPE_CHECKING:
    from graphseed.measure.attribute.attribution import ChunkGrid, Profiled

SUMMARY: Final = "Say where a prompt's host time goes and predict what replay saves."
DEFAULT_MODEL: Final = "smollm2"
CHUNKS: Final = (32, 128, 512)
CUDA_CHUNKS: Final = (*CHUNKS, 2048)
MAX_SECONDS: Final = 600
GRACE_S: Final = 60  # for a process with nothing left to do to end
# Without it torch 2.13's profiler writes two lines on stderr each time it starts and stops.
LOG_LEVEL_VARIABLE: Final = "KINETO_LOG_LEVEL"

logger = logging.getLogger("graphseed.attribute")


class ProfilingFailed(GraphseedError, RuntimeError):
    """The process that profiles ended without an answer."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the direct path could not be profiled in a process of its own: {why}")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the process that profiles is to do; plain, for it crosses to that process."""

    model: str
    device: str
    dtype: str
    grid: "ChunkGrid"
    nums: tuple[int, ...]  # how often each cell is profiled
    trace: Path | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "-m", "--model", metavar="MODEL",
        help="smollm2, a Hugging Face directory or hub id, a GGUF file, or random:PRESET "
        f"(default: {DEFAULT_MODEL})",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", metavar="LIST",
        help="chunk sizes in tokens (default: 32,128,512, on a GPU 2048 too)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", metavar="LIST",
        help="tokens before the chunk, random ones, prefilled and not timed (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=0, metavar="N",
        help="tokens of the engine's context, on which kernel plans depend (default: 0 = the "
        "longest of --contexts and the largest of --chunks)",
    )  # fmt: skip
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument("--dtype", help="auto, bf16, fp16, fp32 (default: auto)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="write a Chrome trace of one profiled direct chunk, the first",
    )  # fmt: skip
    parser.add_argument(
        "--pid", type=int, action="append", metavar="PID",
        help="instead of -m: sample a running graphseed process; may be given several times",
    )  # fmt: skip
    parser.add_argument("--seconds", type=int, metavar="N", help="of --pid (default: 5)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the result as one JSON line"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log debug lines too")
    parser.add_argument("-q", "--quiet", action="store_true", help="no bar, log warnings only")


def execute(args: argparse.Namespace) -> int:
    """Run the command: 0, or 1 where a chunk was not replayed. Raises GraphseedError."""
    _check_together(args)
    for flag, path in (("--json", args.json), ("--trace", args.trace)):
        check_writable(flag, path)
    return _sample(args) if args.pid else _attribute(args)


def _attribute(args: argparse.Namespace) -> int:
    options.require_graphs("attribute")
    contexts = _numbers("--contexts", args.contexts or "0")
    chunks = _numbers("--chunks", args.chunks) if args.chunks is not None else CHUNKS
    from graphseed.cli.attribute import report
    from graphseed.drivers import open_driver
    from graphseed.measure.attribute.attribution import Cell, ChunkGrid, predict
    from graphseed.measure.attribute.decoders import DEPTHS
    from graphseed.measure.attribute.runs import measure_direct, measure_replay, num_profiled

    args.model, args.device = args.model or DEFAULT_MODEL, args.device or "auto"
    args.dtype = args.dtype or "auto"
    grid = ChunkGrid(chunks, contexts, args.ctx_size)
    if args.chunks is None and open_driver(args.device).device != "cpu":
        grid = ChunkGrid(CUDA_CHUNKS, contexts, args.ctx_size)
    loaded = options.load(args, Selection())
    model, driver = loaded.model, loaded.driver
    report.print_head(model, driver, grid)
    num_steps = grid.num_cells + len(contexts)
    with _progress("direct path", num_steps + len(DEPTHS), args.quiet) as watch:
        times, timed = measure_direct(model, driver, grid, watch)
    nums = tuple(map(num_profiled, timed))
    asked = Asked(args.model, driver.device, args.dtype, grid, nums, args.trace)
    with _progress("profile", num_steps + len(DEPTHS) + 1, args.quiet) as watch:
        gap, directs = predict(times, timed, profile_apart(asked, watch))
    report.print_direct(directs, driver.device)
    report.print_prediction(directs, gap)
    with _progress("replay", num_steps, args.quiet) as watch:
        replays = measure_replay(model, driver, grid, watch)
    cells = [Cell(d, r) for d, r in zip(directs, replays, strict=True)]
    sentences = report.print_outcome(cells, driver.device)
    if args.trace is not None:
        logger.info("trace of one chunk in %s", args.trace)
    if args.json is not None:
        append_record(args.json, report.as_record(model, driver, grid, gap, cells, sentences))
    return 1 if any(cell.multiple is None for cell in cells) else 0


def profile_apart(asked: Asked, watch: Callable[[str], None]) -> "Profiled":
    """Profile in a process that has ended when this returns or raises. Raises ProfilingFailed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(theirs,), name="graphseed profile", daemon=True)
    try:
        process.start()
        theirs.close()
        watch("loading the model")
        found = _hear(ours, process, asked, watch)
        process.join(GRACE_S)  # its memory is free only then
        return found
    finally:
        ours.close()
        if process.pid is not None:
            process.kill()
            process.join()


def _hear(
    pipe: Connection, process: BaseProcess, asked: Asked, watch: Callable[[str], None]
) -> "Profiled":
    try:
        pipe.send(asked)
        while True:
            kind, value = pipe.recv()
            if kind == "found":
                found: Profiled = value
                return found
            if kind == "failed":
                raise ProfilingFailed(value)
            watch(value)
    except (EOFError, OSError):
        process.join(GRACE_S)
        raise ProfilingFailed(_death(process.exitcode or 0)) from None


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; a system that is out of memory does that" if name == "SIGKILL" else ""
    return f"it was ended by {name}{hint}"


def _answer(pipe: Connection) -> None:
    """The whole of the process that profiles."""
    # Ctrl-C reaches every process of a terminal; it is the parent that ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault(LOG_LEVEL_VARIABLE, "9")
    # What there is to say of this model was said when the parent loaded it.
    logging.getLogger("graphseed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        told: tuple[str, Any] = ("found", _profile(pipe.recv(), lambda text: pipe.send(("", text))))
    except Exception as error:
        told = ("failed", _words(error))
    pipe.send(told)


def _profile(asked: Asked, watch: Callable[[str], None]) -> "Profiled":
    from graphseed.drivers import open_driver
    from graphseed.measure.attribute.runs import profile_direct
    from graphseed.models.load import load_model

    driver = open_driver(asked.device)
    model = load_model(
        asked.model, device=driver.device, dtype=asked.dtype,
        bf16_is_fast=driver.computes_bf16_fast, progress=False,
    )  # fmt: skip
    return profile_direct(model, driver, asked.grid, asked.nums, watch, asked.trace)


def _words(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "no reason given")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory, as the model is loaded a second time there: {text}"
    return text if isinstance(error, GraphseedError) else f"{type(error).__name__}: {text}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _sample(args: argparse.Namespace) -> int:
    from graphseed.cli.attribute import report
    from graphseed.measure.attribute.sampling_profile import sample_processes

    seconds = args.seconds or 5
    processes = sample_processes(args.pid, seconds)
    report.print_samples(processes, seconds)
    if args.json is not None:
        append_record(args.json, report.samples_record(processes, seconds))
    return 0


def _check_together(args: argparse.Namespace) -> None:
    """Raise BadParameter for flags that contradict each other."""
    from graphseed.engine import BadParameter

    if not args.pid:
        if args.seconds is not None:
            raise BadParameter("--seconds", args.seconds, "--pid beside it, or no --seconds")
        return
    for flag, given in (
        ("-m", args.model), ("--chunks", args.chunks), ("--contexts", args.contexts),
        ("-c", args.ctx_size or None), ("--device", args.device), ("--dtype", args.dtype),
        ("--trace", args.trace and str(args.trace)),
    ):  # fmt: skip
        if given is not None:
            raise BadParameter(flag, given, "nothing beside --pid: the process has its own model")
    if min(args.pid) < 1 or len(set(args.pid)) < len(args.pid):
        raise BadParameter("--pid", args.pid, "ids of different running graphseed processes")
    if args.seconds is not None and not 1 <= args.seconds <= MAX_SECONDS:
        raise BadParameter("--seconds", args.seconds, f"1 to {MAX_SECONDS} seconds")


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    from graphseed.engine import BadParameter

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadParameter(flag, text, "whole numbers, comma-separated") from None


@contextmanager
def _progress(what: str, num_steps: int, is_quiet: bool) -> "Iterator[Callable[[str], None]]":
    """A bar on stderr, where a person watches, told what comes next."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    err = Console(stderr=True, highlight=False)
    # Drawn seldom, and stdout left alone: it may be a file.
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err,
        disable=is_quiet or not err.is_terminal, refresh_per_second=2, transient=True,
        redirect_stdout=False,
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=num_steps)

        def watch(text: str) -> None:
            bar.update(task, advance=1, description=f"{what}: {text}")

        yield watch

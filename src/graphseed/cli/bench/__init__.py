"""`graphseed bench`: llama-bench for this engine, the policies side by side.

Owns the flow: the ceiling of the device first, then every model, every test under every policy, and
the exit code. What is measured is in measure/bench, how it is shown in output; `--load` is
load's.
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from graphseed.cli import options
from graphseed.cli.bench import flags, load
from graphseed.cli.bench.flags import BenchRequest
from graphseed.cli.records import append_record

if TYPE_CHECKING:
    from graphseed.capture import Driver
    from graphseed.measure.bench.ceiling import Ceiling
    from graphseed.measure.bench.grid import BenchTest
    from graphseed.measure.bench.rows import BenchRow
    from graphseed.models.model import Model

SUMMARY: Final = "Measure prompt and decode under every policy, as llama-bench does."

logger = logging.getLogger("graphseed.bench")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags.add_flags(parser)


def execute(args: argparse.Namespace) -> int:
    """Run the command: 0 when all bytes are equal, else 1. Raises GraphseedError."""
    options.require_graphs("bench")
    if args.load:
        return load.execute(_for_load(args))
    request = flags.checked(args)
    import torch

    from graphseed.cli.bench.output import Output, Subject
    from graphseed.cli.bench.plot import draw
    from graphseed.drivers import open_driver
    from graphseed.measure.bench.ceiling import measure_ceiling
    from graphseed.models.load import load_model, parse_dtype

    drivers = {name: open_driver(args.device) for name in request.policies}
    driver = drivers[flags.BASELINE]
    dtype = parse_dtype(args.dtype, driver.computes_bf16_fast)
    bench = _Bench(request, drivers, measure_ceiling(driver, (torch.bfloat16, dtype)), args)
    done: list[tuple[Subject, list[BenchRow]]] = []
    with _said_once(), Output(request, driver, dtype, bench.ceiling) as output:
        for name in request.models:
            model = load_model(
                name, device=driver.device, dtype=args.dtype,
                bf16_is_fast=driver.computes_bf16_fast,
            )  # fmt: skip
            subject, rows = Subject.of(model, driver), []
            for group in bench.groups(model):
                output.rows(subject, group)
                rows += group
            del model  # the next one may need its memory
            done.append((subject, rows))
            if request.json is not None:
                append_record(request.json, output.record(subject, rows))
    if request.plot is not None:
        draw(request.plot, done)
        logger.info("drawn in %s", request.plot)
    return 0 if all(row.is_equal for _, rows in done for row in rows) else 1


@contextmanager
def _said_once() -> Iterator[None]:
    """Every engine warns of a context above the trained one; a row opens one for each policy."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        is_known = record.getMessage() in said
        said.add(record.getMessage())
        return not is_known

    engine = logging.getLogger("graphseed.engine.config")
    engine.addFilter(is_new)
    try:
        yield
    finally:
        engine.removeFilter(is_new)


def _for_load(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments as the load reads them: one model."""
    from graphseed.engine import BadParameter

    models = flags.models_of(args)
    if len(models) > 1:
        raise BadParameter("-m", ",".join(models), "one model with --load")
    return argparse.Namespace(**{**vars(args), "model": models[0]})


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all models are measured with."""

    request: BenchRequest
    drivers: "Mapping[str, Driver]"
    ceiling: "Ceiling"
    args: argparse.Namespace

    def groups(self, model: "Model") -> "Iterator[list[BenchRow]]":
        """Measure one model: the rows of each group, when the group is done."""
        from graphseed.measure.bench.rows import with_decode_beside
        from graphseed.measure.bench.runs import BenchSettings, measure_test, num_runs

        request = self.request
        settings = BenchSettings(request.policies, request.num_repetitions, request.warms_up)
        for number, tests in enumerate(request.groups):
            has_decode_row = any(not test.prompt_len for test in tests)
            needs = [not test.new_len and not has_decode_row for test in tests]
            runs = [num_runs(t, settings, n) for t, n in zip(tests, needs, strict=True)]
            rows = []
            with self._progress(model.name, sum(runs)) as (begin, tick):
                for index, (test, needs_decode) in enumerate(zip(tests, needs, strict=True)):
                    begin(test, number * len(tests) + index)
                    time.sleep(request.delay_s)
                    rows.append(
                        measure_test(
                            model, self.drivers, test, settings, self.ceiling,
                            needs_decode=needs_decode, tick=tick,
                        )
                    )  # fmt: skip
            yield with_decode_beside(rows)

    @contextmanager
    def _progress(
        self, name: str, num_runs: int
    ) -> "Iterator[tuple[Callable[[BenchTest, int], None], Callable[[], None]]]":
        """A bar over the repetitions of a group on stderr, where a person watches."""
        from rich.console import Console
        from rich.progress import Progress

        err = Console(stderr=True, highlight=False)
        num_tests = sum(map(len, self.request.groups))
        is_shown = err.is_terminal and not self.args.quiet
        # Drawn seldom, and stdout left alone: it may be a file.
        bar = Progress(
            console=err, disable=not is_shown, refresh_per_second=2, transient=True,
            redirect_stdout=False,
        )  # fmt: skip
        with bar:
            task = bar.add_task(name, total=num_runs)

            def begin(test: "BenchTest", number: int) -> None:
                text = f"{name}: {test.name} ({number + 1} of {num_tests})"
                bar.update(task, description=text)
                if self.args.progress:
                    err.print(text)

            yield begin, lambda: bar.advance(task)

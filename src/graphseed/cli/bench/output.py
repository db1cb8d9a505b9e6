"""How a benchmark is shown: llama-bench's table, JSON, JSON lines, CSV, and the record.

Owns the columns, the fields and the notes under the table. What a program reads is on stdout alone;
with any other form than the table, everything else goes to stderr. Measures nothing.
"""

import csv
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch

from graphseed.capture import Driver
from graphseed.cli.bench.flags import BenchRequest
from graphseed.cli.bench.notes import legend, notes
from graphseed.measure.bench.ceiling import Ceiling
from graphseed.measure.bench.rows import BenchRow, PolicyFigures, mean_and_sd
from graphseed.measure.provenance import provenance
from graphseed.models.model import Model

_NANOSECONDS: Final = 1e6  # of a millisecond
_SHORT_NAMES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Subject:
    """What rows say of the model and the machine; holds no weights."""

    name: str
    source: str
    dtype: str
    num_bytes: int
    num_parameters: int
    backend: str
    num_threads: int

    @classmethod
    def of(cls, model: Model, driver: Driver) -> "Subject":
        """What is said of a model on a device."""
        return cls(
            model.name, model.source, _name(model.dtype), model.weight_bytes,
            model.num_parameters, torch.device(driver.device).type.upper(),
            torch.get_num_threads(),
        )  # fmt: skip

    @property
    def label(self) -> str:
        """Model and dtype, in short."""
        return f"{self.name} {_SHORT_NAMES[self.dtype]}"


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table: its head, its least width, and a cell."""

    head: str
    width: int
    cell: Callable[[Subject, BenchRow, str], str]
    is_left: bool = False

    def shown(self, text: str) -> str:
        """A cell's text in the column's width."""
        return text.ljust(self.width) if self.is_left else text.rjust(self.width)


class Output(AbstractContextManager["Output"]):
    """Prints a benchmark as it goes. Leaving the block prints what waits for the end.

    A JSON document is whole even where a later model failed.
    """

    def __init__(
        self, request: BenchRequest, driver: Driver, dtype: torch.dtype, ceiling: Ceiling
    ) -> None:
        self._request = request
        self._driver = driver
        self._ceiling = ceiling
        self._provenance = provenance(driver.device, driver.description)
        self._columns = _columns(request, driver, _name(dtype))
        self._records: list[dict[str, Any]] = []
        self._rows: list[tuple[Subject, BenchRow]] = []
        self._csv: Any = None  # the writer, once the first row said which fields there are
        self._say(f"device:  {driver.device}, {driver.description}")
        rates = ", ".join(f"{rate:.3g} TFLOP/s {name}" for name, rate in ceiling.tflops.items())
        self._say(
            f"ceiling: {rates}; {ceiling.gbytes_per_second:.1f} GB/s of a copy, read and written "
            "(medians, measured now)\n"
        )

    def rows(self, subject: Subject, rows: Sequence[BenchRow]) -> None:
        """Show the rows of one group."""
        if not self._rows and self._request.output == "md":
            self._print_line([column.head for column in self._columns])
            bars = [
                "-" * column.width if column.is_left else "-" * (column.width - 1) + ":"
                for column in self._columns
            ]
            self._print_line(bars)
        for row in rows:
            self._rows.append((subject, row))
            for policy in row.figures:
                self._show(subject, row, policy)
        sys.stdout.flush()

    def record(self, subject: Subject, rows: Sequence[BenchRow]) -> dict[str, object]:
        """One model's result as one JSON line."""
        return self._provenance | {
            "benchmark": "bench",
            "model": subject.name,
            "dtype": subject.dtype,
            "ceiling": {
                "tflops": self._ceiling.tflops[subject.dtype],
                "tflops_bfloat16": self._ceiling.tflops["bfloat16"],
                "gbytes_per_second": self._ceiling.gbytes_per_second,
            },
            "rows": [_record_of_row(row) for row in rows],
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        found = notes([(subject.label, row) for subject, row in self._rows], self._driver.device)
        self._say("")
        for line in (*(legend(self._request) if self._rows else ()), *found):
            self._say(line)
        self._say(f"\nbuild: {self._provenance['commit']} ({self._provenance['date']})")
        if self._request.output == "json":
            print(json.dumps(self._records), flush=True)

    def _show(self, subject: Subject, row: BenchRow, policy: str) -> None:
        if self._request.output == "md":
            self._print_line([column.cell(subject, row, policy) for column in self._columns])
            return
        fields = self._fields(subject, row, policy)
        match self._request.output:
            case "jsonl":
                print(json.dumps(fields))
            case "csv":
                flat = {name: value for name, value in fields.items() if not _is_nested(value)}
                if self._csv is None:
                    self._csv = csv.DictWriter(
                        sys.stdout, list(flat), quoting=csv.QUOTE_ALL, lineterminator="\n"
                    )
                    self._csv.writeheader()
                self._csv.writerow(flat)
            case _:
                self._records.append(fields)

    def _print_line(self, cells: Sequence[str]) -> None:
        shown = [column.shown(cell) for column, cell in zip(self._columns, cells, strict=True)]
        print(f"| {' | '.join(shown)} |")

    def _say(self, text: str) -> None:
        print(text, file=sys.stdout if self._request.output == "md" else sys.stderr)

    def _fields(self, subject: Subject, row: BenchRow, policy: str) -> dict[str, Any]:
        """One row under one policy, with llama-bench's names where it has one."""
        test, figures = row.test, row.figures[policy]
        is_cpu = subject.backend == "CPU"
        samples_ns = _ns(figures.samples_ms)
        avg_ns, stddev_ns = mean_and_sd(samples_ns)
        avg_ts, stddev_ts = mean_and_sd(figures.rates)
        return {
            "build_commit": self._provenance["commit"],
            "cpu_info": self._driver.description if is_cpu else "",
            "gpu_info": "" if is_cpu else self._driver.description,
            "backends": subject.backend,
            "model_filename": subject.source,
            "model_type": subject.label,
            "model_size": subject.num_bytes,
            "model_n_params": subject.num_parameters,
            "n_batch": test.num_batch,
            "n_ubatch": test.num_ubatch,
            "n_threads": subject.num_threads,
            "type_k": subject.dtype,
            "type_v": subject.dtype,
            "devices": self._driver.device,
            "n_prompt": test.prompt_len,
            "n_gen": test.new_len,
            "n_depth": test.depth_len,
            "test_time": row.started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "avg_ns": round(avg_ns),
            "stddev_ns": round(stddev_ns),
            "avg_ts": avg_ts,
            "stddev_ts": stddev_ts,
            "n_parallel": test.num_parallel,
            "policy": policy,
            "prompt_multiple": row.prompt_multiple(policy),
            "decode_ratio": row.decode_ratio(policy),
            "decode_of": row.decode_of,
            "hit_rate": figures.hit_rate,
            "num_seeds": figures.num_seeds,
            "capture_ms": figures.capture_ms,
            "instantiate_ms": figures.instantiate_ms,
            "bytes": figures.num_bytes,
            "equal_bytes": row.is_equal,
            "ceiling_share": row.ceiling_share(policy),
            "ceiling_tflops": self._ceiling.tflops[subject.dtype],
            "ceiling_gbytes_per_second": self._ceiling.gbytes_per_second,
            "samples_ns": samples_ns,
            "samples_ts": list(figures.rates),
            "prompt_ns": _ns(figures.prompt_ms),
            "decode_ns": _ns(figures.decode_ms),  # of `decode_of`
        }


def _columns(request: BenchRequest, driver: Driver, dtype: str) -> list[_Column]:
    width = max(len("model"), *(len(f"{name} {_SHORT_NAMES[dtype]}") for name in request.models))
    columns = [
        _Column("model", width, lambda s, r, p: s.label, is_left=True),
        _Column("size", 10, lambda s, r, p: _size(s.num_bytes)),
        _Column("params", 8, lambda s, r, p: _count(s.num_parameters)),
        _Column("backend", 7, lambda s, r, p: s.backend, is_left=True),
    ]
    if torch.device(driver.device).type == "cpu":
        columns.append(_Column("threads", 7, lambda s, r, p: str(s.num_threads)))
    for flag, head, field in (
        ("-b", "n_batch", "num_batch"),
        ("-ub", "n_ubatch", "num_ubatch"),
        ("-np", "n_parallel", "num_parallel"),
    ):
        if flag in request.listed:
            columns.append(_Column(head, len(head), partial(_test_field, field)))
    name_len = max(len(test.name) for tests in request.groups for test in tests)
    return [
        *columns,
        _Column("test", max(5, name_len), lambda s, r, p: r.test.name),
        _Column("policy", 8, lambda s, r, p: p, is_left=True),
        _Column("t/s", 20, lambda s, r, p: _rate(_own(r, p))),
        _Column("prompt x", 8, lambda s, r, p: _times(r.prompt_multiple(p))),
        _Column("decode x", 8, lambda s, r, p: _times(r.decode_ratio(p))),
        _Column("hits", 5, lambda s, r, p: f"{_own(r, p).hit_rate:.0%}"),
        _Column(
            "capt + inst ms", 14,
            lambda s, r, p: f"{_own(r, p).capture_ms:.1f} + {_own(r, p).instantiate_ms:.1f}"
            if _own(r, p).num_seeds else "",
        ),
        _Column(
            "MiB", 7,
            lambda s, r, p: f"{_own(r, p).num_bytes / 2**20:.1f}" if _own(r, p).num_seeds else "",
        ),
        _Column("bytes", 6, lambda s, r, p: "equal" if r.is_equal else "DIFFER"),
        _Column("ceiling", 7, lambda s, r, p: f"{r.ceiling_share(p):.1%}"),
    ]  # fmt: skip


def _record_of_row(row: BenchRow) -> dict[str, object]:
    test = row.test
    return {
        "test": test.name,
        "n_prompt": test.prompt_len,
        "n_gen": test.new_len,
        "n_depth": test.depth_len,
        "n_batch": test.num_batch,
        "n_ubatch": test.num_ubatch,
        "n_parallel": test.num_parallel,
        "equal_bytes": row.is_equal,
        "decode_of": row.decode_of,
        "side_by_side": row.is_side_by_side,
        "policies": {
            name: {
                "tokens_per_second": mean_and_sd(figures.rates)[0],
                "stddev": mean_and_sd(figures.rates)[1],
                "samples_ns": _ns(figures.samples_ms),
                "median_ms": statistics.median(figures.samples_ms),
                "prompt_multiple": row.prompt_multiple(name),
                "decode_ratio": row.decode_ratio(name),
                "hit_rate": figures.hit_rate,
                "num_seeds": figures.num_seeds,
                "capture_ms": figures.capture_ms,
                "instantiate_ms": figures.instantiate_ms,
                "bytes": figures.num_bytes,
                "ceiling_share": row.ceiling_share(name),
                "refused": list(figures.refusals),
            }
            for name, figures in row.figures.items()
        },
    }


def _test_field(field: str, subject: Subject, row: BenchRow, policy: str) -> str:
    return str(getattr(row.test, field))


def _rate(figures: PolicyFigures) -> str:
    mean, sd = mean_and_sd(figures.rates)
    return f"{mean:.2f} ± {sd:.2f}"


def _own(row: BenchRow, policy: str) -> PolicyFigures:
    return row.figures[policy]


def _ns(samples_ms: Sequence[float]) -> list[int]:
    return [round(ms * _NANOSECONDS) for ms in samples_ms]


def _is_nested(value: object) -> bool:
    return isinstance(value, list | dict)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

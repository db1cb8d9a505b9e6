"""Some work under torch's profiler: what the device did, and what the host's time went into.

Owns ChunkProfile and the reading of profiler events. On a GPU the device is busy in the union of
its kernels, copies and fills, and a node of a graph is one of these. A CPU runs a kernel inside the
call that submits it: there "busy" is the time inside operations that a recording keeps as one call
(what composes others, views and allocations are not), and a node is one of those. The profiler
slows the host down, by about as much as an operation costs: its host times are shares, no figures
to compare with a run without it. On a GPU it slows down whatever its process does afterwards, too.
Does not know sessions or predictions.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from graphseed.capture.driver import Driver
from graphseed.capture.errors import GraphseedError

Prepare = Callable[[], Callable[[], object]]  # makes the next piece of work, which submits it

LEAST: Final = 0.0  # ranks of busy time
MEDIAN: Final = 0.5
WHOLE: Final = "graphseed work"  # from an idle device to an idle device
SUBMIT: Final = "graphseed submit"  # of it, until the host has submitted everything
_DRIVER_CALL: Final = re.compile(r"cu(da)?[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx, ...
_NOT_WORK: Final = ("annotation", "sync")  # kinds on the device's timeline that run nothing
_COPY_IN: Final = "HtoD"
_ALLOCATIONS: Final = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "resize_", "_unsafe_view", "result_type")
)


class NothingProfiled(GraphseedError, RuntimeError):
    """The profiler did not see the device."""


class Part(Enum):
    """What a stretch of the host's time went into."""

    PYTHON = "python"  # Python itself, custom operators written in it, Triton's launcher
    DISPATCHER = "dispatcher"  # torch's operators, without what they call of the driver
    DRIVER = "driver"  # calls of the CUDA runtime and driver
    KERNEL = "kernel"  # the arithmetic, where the host is the device


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the host's time."""

    start_ns: int
    end_ns: int
    part: Part


@dataclass(frozen=True, slots=True)
class ChunkProfile:
    """One piece of work under the profiler."""

    host_ms: float  # from the start until everything was submitted, inflated
    python_ms: float  # of host_ms, as are the next three
    dispatcher_ms: float
    driver_ms: float
    kernel_ms: float  # 0 where the device is not the host
    busy_ms: float  # of the device: union of what it did
    copy_in_ms: float  # of busy_ms: copies from the host, which no graph holds
    num_kernels: int
    num_nodes: int  # that a graph of the work would have: kernels, device copies and fills

    @property
    def is_host(self) -> bool:
        """Whether the host is the device."""
        return self.kernel_ms > 0

    def share(self, part: Part) -> float:
        """Part of the host's profiled time, 0 to 1."""
        ms: float = getattr(self, f"{part.value}_ms")
        return ms / self.host_ms


def profile_work(
    driver: Driver, prepare: Prepare, num: int, trace: Path | None = None, rank: float = MEDIAN
) -> ChunkProfile:
    """Profile `num` pieces of work, each from an idle device to an idle device.

    Returns the one at `rank` of busy time, from 0, the least, to 1. One more runs first and is left
    out: it pays for the profiler's own buffers. `trace` is a file for a Chrome trace of one piece,
    which is profiled by itself. Raises NothingProfiled.
    """
    is_host = driver.device == "cpu"
    with _profiling(is_host) as profiler:
        for _ in range(num + 1):
            _run(driver, prepare)
    read = pieces(_events(profiler), is_host)[1:]
    if not read or any(item.num_nodes == 0 for item in read):
        raise NothingProfiled(
            f"torch's profiler saw no work on {driver.device}: it needs a build of torch with "
            "kineto, and on a GPU that no other profiler (nsys, ncu) is attached"
        )
    if trace is not None:
        with _profiling(is_host) as profiler:
            _run(driver, prepare)
        profiler.export_chrome_trace(str(trace))
    # One piece and not a median of each figure, so that its parts add up.
    return sorted(read, key=lambda item: item.busy_ms)[int(rank * (len(read) - 1))]


def pieces(events: Sequence[Any], is_host: bool) -> list[ChunkProfile]:
    """Read kineto's events: one profile for each piece of work in them, in order."""
    return _Reader(events, is_host).read()


def exclusive_ns(spans: Sequence[Span], whole: Span) -> tuple[dict[Part, int], int]:
    """Nanoseconds of each part in `whole`, every instant given to the innermost span around it.

    What is inside a kernel is the kernel's. Also returns the number of outermost kernels.
    """
    times, num_kernels = dict.fromkeys(Part, 0), 0
    stack, now_ns = [whole], whole.start_ns

    def advance(until_ns: int) -> None:
        nonlocal now_ns
        while len(stack) > 1 and stack[-1].end_ns <= until_ns:
            times[stack[-1].part] += max(0, stack[-1].end_ns - now_ns)
            now_ns = max(now_ns, stack.pop().end_ns)
        times[stack[-1].part] += max(0, until_ns - now_ns)
        now_ns = max(now_ns, until_ns)

    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        if not whole.start_ns <= span.start_ns < whole.end_ns:
            continue
        advance(span.start_ns)
        is_inside = stack[-1].part is Part.KERNEL
        num_kernels += span.part is Part.KERNEL and not is_inside
        # Clocks of host and driver agree to a microsecond or so: a child ends with its parent.
        end_ns = min(span.end_ns, stack[-1].end_ns)
        stack.append(Span(span.start_ns, end_ns, Part.KERNEL if is_inside else span.part))
    advance(whole.end_ns)
    return times, num_kernels


def union_ns(intervals: Sequence[tuple[int, int]]) -> int:
    """Nanoseconds covered by at least one (start, end)."""
    total = 0
    until_ns: float = -math.inf
    for start_ns, end_ns in sorted(intervals):
        if end_ns > until_ns:
            total += end_ns - int(max(start_ns, until_ns))
            until_ns = end_ns
    return total


class HostOperators:
    """Which operator is a node of a recording on a host, by what the dispatcher says of it."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}

    def part(self, name: str) -> Part:
        """Kernel for an operator that computes; dispatcher for one that only leads to others."""
        if name not in self._parts:
            self._parts[name] = Part.DISPATCHER if self._leads_on(name) else Part.KERNEL
        return self._parts[name]

    @staticmethod
    def _leads_on(name: str) -> bool:
        if name in _ALLOCATIONS:
            return True
        # Left out: overloads of named tensors, which compose the others, those that write into a
        # given tensor, and TorchScript's, which the dispatcher lacks.
        schemas = [
            schema
            for schema in torch._C._jit_get_schemas_for_operator(name)
            if "Dimname" not in str(schema)
            and "out" not in schema.overload_name
            and torch._C._dispatch_has_kernel(_full_name(schema))
        ]
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        composes = all(has_kernel(_full_name(s), "CompositeImplicitAutograd") for s in schemas)
        aliases = [out.alias_info for schema in schemas for out in schema.returns]
        return composes or any(alias is not None and not alias.is_write for alias in aliases)


class _Reader:
    """Cuts one profile into its pieces of work."""

    def __init__(self, events: Sequence[Any], is_host: bool) -> None:
        self._is_host = is_host
        self._operators = HostOperators()
        self._spans: list[Span] = []
        self._device: list[tuple[int, int, str]] = []
        self._wholes: list[Span] = []
        self._submits: list[Span] = []
        for event in events:
            self._take(event)

    def read(self) -> list[ChunkProfile]:
        """Each piece, in order."""
        wholes = sorted(self._wholes, key=lambda s: s.start_ns)
        submits = sorted(self._submits, key=lambda s: s.start_ns)
        # The clocks of host and device agree only roughly; the device is idle between two pieces,
        # so the middle of that pause parts them.
        middles = [
            (one.end_ns + other.start_ns) // 2
            for one, other in zip(wholes, wholes[1:], strict=False)
        ]
        bounds = [-math.inf, *middles, math.inf]
        return [
            self._piece(submit, [d for d in self._device if first <= d[0] < last])
            for submit, first, last in zip(submits, bounds, bounds[1:], strict=False)
        ]

    def _take(self, event: Any) -> None:
        name, start_ns, end_ns = event.name(), event.start_ns(), event.end_ns()
        if event.device_type() != DeviceType.CPU:
            kind = event.activity_type() if hasattr(event, "activity_type") else ""
            if name not in (WHOLE, SUBMIT) and not any(word in kind for word in _NOT_WORK):
                self._device.append((start_ns, end_ns, name))
        elif name == WHOLE:
            self._wholes.append(Span(start_ns, end_ns, Part.PYTHON))
        elif name == SUBMIT:
            self._submits.append(Span(start_ns, end_ns, Part.PYTHON))
        elif _DRIVER_CALL.match(name):
            self._spans.append(Span(start_ns, end_ns, Part.DRIVER))
        elif "::" in name:
            self._spans.append(Span(start_ns, end_ns, self._part(name)))

    def _part(self, name: str) -> Part:
        if self._is_host:
            return self._operators.part(name)
        # What is not torch's own is a custom operator, whose body is Python.
        return Part.DISPATCHER if name.startswith("aten::") else Part.PYTHON

    def _piece(self, submit: Span, did: list[tuple[int, int, str]]) -> ChunkProfile:
        times, num_kernels = exclusive_ns(self._spans, submit)
        num_nodes, busy_ns, copy_in_ns = num_kernels, times[Part.KERNEL], 0
        if not self._is_host:
            busy_ns = union_ns([(start, end) for start, end, _ in did])
            copy_in_ns = union_ns([(start, end) for start, end, name in did if _COPY_IN in name])
            num_nodes = sum(_COPY_IN not in name for *_, name in did)
            num_kernels = sum(not name.startswith(("Memcpy", "Memset")) for *_, name in did)
        return ChunkProfile(
            host_ms=(submit.end_ns - submit.start_ns) / 1e6,
            python_ms=times[Part.PYTHON] / 1e6,
            dispatcher_ms=times[Part.DISPATCHER] / 1e6,
            driver_ms=times[Part.DRIVER] / 1e6,
            kernel_ms=times[Part.KERNEL] / 1e6,
            busy_ms=busy_ns / 1e6,
            copy_in_ms=copy_in_ns / 1e6,
            num_kernels=num_kernels,
            num_nodes=num_nodes,
        )


@contextmanager
def _profiling(is_host: bool) -> Iterator[profile]:
    activities = (
        [ProfilerActivity.CPU] if is_host else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    )
    with warnings.catch_warnings():
        # torch 2.11 warns of profilers of several cycles; each here has one. acc_events would keep
        # it quiet too, at 44 us for each event.
        warnings.filterwarnings("ignore", message=".*clears events", category=UserWarning)
        with profile(activities=activities) as profiler:
            yield profiler


def _run(driver: Driver, prepare: Prepare) -> None:
    work = prepare()
    driver.synchronize()
    with record_function(WHOLE):
        with record_function(SUBMIT):
            work()
        driver.synchronize()


def _events(profiler: profile) -> Sequence[Any]:
    """Raw events: making torch's own event objects of them takes far longer than the run."""
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events: Sequence[Any] = results.events() if results is not None else ()
    return events


def _full_name(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)

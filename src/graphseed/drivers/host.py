"""The host driver: capture, instantiate and launch on the CPU, without a GPU.

Owns the arena, its executables and what a mark means here. A capture is a tape, an executable is a
straight-line function over fixed buffers. Work on the host is done when it returns, so a mark is
done at once. Does not know identities or policies, nor how a tape is recorded or laid out.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.utils._pytree as pytree

from graphseed.capture.driver import Definition, Executable, Mark, Work
from graphseed.capture.errors import CannotCapture, Closed, Reason
from graphseed.capture.identity import FirstNode, Namespace
from graphseed.drivers.layout import Memory
from graphseed.drivers.lowering import generate, lower
from graphseed.drivers.recorder import record
from graphseed.drivers.refusals import first_line, refusal_of
from graphseed.drivers.tape import Tape, Window

_ALLOCATOR: Final = "DefaultCPUAllocator"  # torch's word in its untyped out-of-memory error


class HostMark:
    """A point in time: what was submitted before it on this thread is done."""

    def __init__(self, timed: bool) -> None:
        self._at_ns = time.perf_counter_ns() if timed else None

    def is_done(self) -> bool:
        """True: the host runs its work at once."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def ms_since(self, earlier: Mark) -> float:
        """Milliseconds since an earlier mark. Raises ValueError unless both are timed."""
        start = earlier._at_ns if isinstance(earlier, HostMark) else None
        if start is None or self._at_ns is None:
            raise ValueError("ms_since needs two marks of the host made with timed=True")
        return (self._at_ns - start) / 1e6


class HostDefinition:
    """A tape. Owned by whoever captured it; may be instantiated more than once."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    @property
    def num_nodes(self) -> int:
        """Recorded operations that do work somebody sees."""
        return len(self.tape.nodes)

    @property
    def first_node(self) -> FirstNode | None:
        """Operation, shape and dtype that the tape begins with."""
        return self.tape.first_node

    @property
    def root(self) -> str:
        """Full name of the first operation, e.g. "aten.embedding.default"."""
        return str(self.tape.nodes[0].op)

    @property
    def externals(self) -> tuple[torch.Tensor, ...]:
        """The caller's tensors that the step was seen to use: weights, caches, static buffers."""
        return self.tape.externals


class HostExecutable:
    """A tape in fixed buffers. Owned by its arena, which releases it; engine thread only.

    Keeps every tensor of the caller that it reads or writes alive until it is released.
    """

    def __init__(self, tape: Tape) -> None:
        memory = Memory(tape)
        calls = lower(memory, tape.result_roots)
        leaves = [memory.tensor(leaf) if isinstance(leaf, Window) else leaf for leaf in tape.result]
        self.num_nodes = len(calls)
        self.num_bytes = memory.num_bytes
        self.externals = tape.externals
        self._result: object = pytree.tree_unflatten(leaves, tape.result_spec)
        self._run: Callable[[], None] | None = generate(calls)

    @property
    def result(self) -> object:
        """What the step returned: the same buffers at every launch. Raises Closed if released."""
        self._require_held()
        return self._result

    @property
    def is_released(self) -> bool:
        """Whether its buffers were given up."""
        return self._run is None

    def launch(self) -> None:
        """Run the tape once. Raises Closed if released, and what an operation raises."""
        run = self._require_held()
        with torch.inference_mode():  # spares each call the layers of autograd
            run()

    def release(self) -> None:
        """Give up buffers and operands. May be called twice."""
        self._run, self._result, self.externals = None, None, ()

    def _require_held(self) -> Callable[[], None]:
        if self._run is None:
            raise Closed("this executable was released; capture the step again")
        return self._run


class HostArena:
    """Executables of one generation of one namespace. Owned and closed by the cache."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._executables: dict[int, HostExecutable] = {}
        self._is_closed = False

    def capture(self, work: Work) -> HostDefinition:
        """Record `work` without executing it (I1). Raises CannotCapture; then nothing is left."""
        self._require_open()
        outcome = _record(work)
        if isinstance(outcome, HostDefinition):
            return outcome
        # Raised here, where no frame of the step is: a stored refusal must not keep its tensors.
        raise CannotCapture(*outcome)

    def instantiate(self, definition: Definition) -> HostExecutable:
        """Lay a tape out in fixed buffers. Raises CannotCapture."""
        self._require_open()
        if not isinstance(definition, HostDefinition):
            raise TypeError(
                f"expected a definition captured by the host driver, got a "
                f"{type(definition).__name__}"
            )
        outcome = _instantiate(definition.tape)
        if isinstance(outcome, HostExecutable):
            self._executables[id(outcome)] = outcome
            return outcome
        raise CannotCapture(*outcome)

    def discard(self, definition: Definition) -> None:
        """Nothing to destroy: a tape holds no buffers of its own."""

    def launch(self, executable: Executable) -> None:
        """Run one executable of this arena; done when it returns."""
        self._require_open()
        self._mine(executable).launch()

    def release(self, executable: Executable) -> None:
        """Give up one executable's buffers. One that was released already is left as it is."""
        if isinstance(executable, HostExecutable) and executable.is_released:
            return
        mine = self._mine(executable)
        del self._executables[id(mine)]
        mine.release()

    def close(self) -> int:
        """Release all; return the bytes of the executables that were held. May be called twice."""
        num_bytes = sum(item.num_bytes for item in self._executables.values())
        for executable in self._executables.values():
            executable.release()
        self._executables.clear()
        self._is_closed = True
        return num_bytes

    def _require_open(self) -> None:
        if self._is_closed:
            raise Closed(f"this arena of the {self.namespace.value} namespace was closed")

    def _mine(self, executable: Executable) -> HostExecutable:
        if isinstance(executable, HostExecutable) and executable.is_released:
            raise Closed("this executable was released; capture the step again")
        mine = self._executables.get(id(executable))
        if mine is None:
            raise ValueError(
                f"a {type(executable).__name__} that this arena did not instantiate; "
                "use the arena that made it"
            )
        return mine


class HostDriver:
    """The CPU of this machine. Holds nothing; any thread may make one, one thread uses an arena."""

    @property
    def device(self) -> str:
        """Name of the device as torch writes it."""
        return "cpu"

    def open(self, namespace: Namespace) -> HostArena:
        """New arena."""
        return HostArena(namespace)

    def mark(self, timed: bool = False) -> HostMark:
        """Mark the present point: everything before it is done."""
        return HostMark(timed)

    @property
    def computes_bf16_fast(self) -> bool:
        """Whether the CPU has instructions for bfloat16 products."""
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        questions = [getattr(torch.cpu, name, None) for name in names]  # not in every version
        return any(question is not None and question() for question in questions)

    @property
    def description(self) -> str:
        """Name of the CPU and number of threads, for logs and results."""
        threads = torch.get_num_threads()
        return f"{_cpu_name()}, {threads} thread{'' if threads == 1 else 's'}"

    @property
    def num_sms(self) -> int:
        """1: kernel plans are not split over processors here."""
        return 1

    def free_bytes(self) -> int:
        """Memory that could be allocated without swapping."""
        for line in _lines_of("/proc/meminfo"):
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # the kernel writes kB and means KiB
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def synchronize(self) -> None:
        """Return at once: nothing is in flight on the host."""

    def is_lost(self, error: BaseException) -> bool:
        """False: an error on the host leaves it usable."""
        return False

    def prime(self, dtype: str) -> None:
        """Return at once: no library of the host has to be initialised before a capture."""


def _record(work: Work) -> HostDefinition | tuple[Reason, str]:
    try:
        tape = record(work)
    except Exception as error:  # whatever the step raises is an answer (I8)
        return refusal_of(error)
    if not tape.nodes:
        return Reason.EMPTY_GRAPH, "the step does no work whose outcome anybody sees"
    return HostDefinition(tape)


def _instantiate(tape: Tape) -> HostExecutable | tuple[Reason, str]:
    try:
        # Buffers made in inference mode could not be written outside it.
        with torch.inference_mode(False), torch.no_grad():
            return HostExecutable(tape)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Reason.OUT_OF_MEMORY, first_line(error)
    except Exception as error:  # a node that cannot be laid out is an answer too (I8)
        is_memory = _ALLOCATOR in str(error)
        reason = Reason.OUT_OF_MEMORY if is_memory else Reason.UNSUPPORTED_NODE
        return reason, f"cannot be laid out: {first_line(error)}"


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not on this system
        return []


def _cpu_name() -> str:
    for line in _lines_of("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

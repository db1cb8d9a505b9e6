"""The CUDA driver: torch.cuda.CUDAGraph behind the Driver protocol. The only file that says
torch.cuda.

Owns one capture stream for each namespace, the memory pool of each arena, and the repair of failed
captures. `torch.cuda.graph` is not used: it synchronises the device and flushes the allocator at
each capture. Does not know identities, states or policies.
"""

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.cuda import _POOL_HANDLE

from graphseed.capture.driver import Definition, Executable, Mark, Work
from graphseed.capture.errors import CannotCapture, Closed, DeviceLost, LaunchFailed, Reason
from graphseed.capture.identity import FirstNode, Namespace
from graphseed.drivers import nodes

logger = logging.getLogger(__name__)

TORCH: Final = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# Before 2.13 a failed capture_end leaves the allocator believing that a capture is under way;
# before 2.14 the pool of a failed capture is never released (pytorch #180395, #190348).
_ENDS_ALLOCATION_ITSELF: Final = TORCH >= (2, 13)
_RELEASES_POOL_ITSELF: Final = TORCH >= (2, 14)
# On 2.12-2.14 resetting one graph frees the cuBLAS workspace of its stream, which the others
# captured there still use (pytorch #193402): there only whole generations are reset.
_RESET_HURTS_OTHERS: Final = (2, 12) <= TORCH <= (2, 14)
MEMORY_FLOOR_BYTES: Final = 256 << 20  # capture refuses to leave the device with less than this

# What torch says, in order of precedence; the first that occurs in the message decides.
_REASONS: Final = (
    ("NOT_INITIALIZED", Reason.NOT_INITIALISED),
    ("CUDNN_STATUS", Reason.NOT_INITIALISED),
    ("Cannot copy between CPU and CUDA tensors", Reason.HOST_MEMORY),
    ("Offset increment outside graph capture", Reason.RANDOM),
    ("registered with the CUDA graph", Reason.RANDOM),
    ("during capture to the graph", Reason.RANDOM),
    ("previous error during capture", Reason.INTERFERENCE),
    ("StreamCaptureInvalidated", Reason.INTERFERENCE),
    ("when stream is capturing", Reason.HOST_SYNC),
    ("StreamCapture", Reason.HOST_SYNC),
)


class CudaMark:
    """A CUDA event recorded in the stream that was current."""

    def __init__(self, device: torch.device, timed: bool) -> None:
        self._event = _new_event(timed)
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        return bool(_or_lost(self._event.query))

    def wait(self) -> None:
        _or_lost(self._event.synchronize)

    def ms_since(self, earlier: Mark) -> float:
        if not isinstance(earlier, CudaMark):
            raise TypeError(f"expected a mark of the CUDA driver, got {type(earlier).__name__}")
        return float(earlier._event.elapsed_time(self._event))


@dataclass(slots=True)
class CudaDefinition:
    """A captured, not instantiated graph, and what its work returned in the arena's memory."""

    graph: torch.cuda.CUDAGraph
    num_nodes: int
    root: str
    result: object
    free_bytes_before: int
    first_node: FirstNode | None = None  # CUDA knows kernels, not operations: `root` is compared


@dataclass(slots=True)
class CudaExecutable:
    """An instantiated graph. Owned by its arena, destroyed by the engine's thread only."""

    graph: torch.cuda.CUDAGraph
    num_nodes: int
    num_bytes: int
    result: object
    last_launch: torch.cuda.Event | None = field(default=None)


class CudaArena:
    """One generation of a namespace: a pool of its own, captured on the namespace's stream.

    Opened by CudaDriver, closed by the cache; the engine's thread only.
    """

    def __init__(self, driver: "CudaDriver", stream: torch.cuda.Stream) -> None:
        self._driver = driver
        self._stream = stream
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._executables: list[CudaExecutable] = []
        # Every graph that counts as a user of the pool, instantiated or not.
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Work) -> CudaDefinition:
        pool = self._open_pool()
        free_bytes = self._driver.free_bytes()
        if free_bytes < self._driver.memory_floor_bytes:
            raise CannotCapture(
                Reason.MEMORY_FLOOR,
                f"{free_bytes >> 20} MiB are free; capture needs at least "
                f"{self._driver.memory_floor_bytes >> 20} MiB",
            )
        try:
            graph, result = self._record(work, pool, "thread_local")
        except CannotCapture as refusal:
            if refusal.reason is not Reason.NOT_INITIALISED:
                raise
            # A throw-away capture in relaxed mode initialises what the primer did not know of,
            # without executing anything.
            self._forget(self._record(work, pool, "relaxed")[0])
            graph, result = self._record(work, pool, "thread_local")
        num_nodes, root = nodes.count_and_root(graph.raw_cuda_graph())
        if num_nodes == 0:
            raise CannotCapture(Reason.EMPTY_GRAPH, "the step recorded no work on this device")
        return CudaDefinition(graph, num_nodes, root, result, free_bytes)

    def instantiate(self, definition: Definition) -> CudaExecutable:
        if not isinstance(definition, CudaDefinition):
            raise TypeError(f"expected a CudaDefinition, got {type(definition).__name__}")
        try:
            definition.graph.instantiate()
            nodes.upload(definition.graph.raw_cuda_graph_exec(), self._stream.cuda_stream)
        except torch.OutOfMemoryError as error:
            raise CannotCapture(Reason.OUT_OF_MEMORY, _first_line(error)) from None
        except RuntimeError as error:
            reason = Reason.OUT_OF_MEMORY if "out of memory" in str(error) else None
            raise CannotCapture(reason or Reason.UNSUPPORTED_NODE, _first_line(error)) from None
        num_bytes = max(0, definition.free_bytes_before - self._driver.free_bytes())
        executable = CudaExecutable(
            definition.graph, definition.num_nodes, num_bytes, definition.result
        )
        self._executables.append(executable)
        return executable

    def launch(self, executable: Executable) -> None:
        if not isinstance(executable, CudaExecutable) or self._pool is None:
            raise LaunchFailed("the executable does not belong to an open arena of this driver")
        try:
            executable.graph.replay()
        except RuntimeError as error:
            if self._driver.is_lost(error):
                raise DeviceLost(_lost_message(error)) from error
            raise LaunchFailed(_first_line(error)) from None
        if executable.last_launch is None:
            executable.last_launch = _new_event(timed=False)
        executable.last_launch.record(torch.cuda.current_stream(self._driver.torch_device))

    def release(self, executable: Executable) -> None:
        if not isinstance(executable, CudaExecutable):
            raise TypeError(f"expected a CudaExecutable, got {type(executable).__name__}")
        executable.result = None
        if _RESET_HURTS_OTHERS:
            return  # kept, unused, until the whole generation goes
        self._wait_for(executable)
        self._forget(executable.graph)
        self._executables = [kept for kept in self._executables if kept is not executable]

    def close(self) -> int:
        pool, self._pool = self._pool, None
        if pool is None:
            return 0
        for executable in self._executables:
            self._wait_for(executable)
        free_before = self._driver.free_bytes()
        for executable in self._executables:
            executable.result = None
        for graph in self._graphs:
            graph.reset()
        self._executables.clear()
        self._graphs.clear()
        self._driver.drop(pool)
        del pool  # the last reference: its memory goes back to the device
        return max(0, self._driver.free_bytes() - free_before)

    def _record(
        self, work: Work, pool: torch.cuda.MemPool, mode: str
    ) -> tuple[torch.cuda.CUDAGraph, object]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        result: object = None
        raised: BaseException | None = None
        end_error: RuntimeError | None = None
        with _gc_paused(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=_POOL_HANDLE(pool.id), capture_error_mode=mode)
            try:
                result = work()
            except BaseException as error:
                raised = error
            try:
                graph.capture_end()  # always, or the stream would go on capturing
            except RuntimeError as error:
                end_error = error
        if end_error is None:
            self._graphs.append(graph)
        if raised is None and end_error is None:
            return graph, result
        if end_error is not None:
            self._driver.repair(graph, pool)
        else:
            self._forget(graph)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        refusal = _refusal(raised, end_error)
        for failure in (raised, end_error):
            if failure is not None:  # a stored traceback keeps the tensors of the capture alive
                traceback.clear_frames(failure.__traceback__)
        raise refusal from None

    def _open_pool(self) -> torch.cuda.MemPool:
        if self._pool is None:
            raise Closed("the arena is closed")
        return self._pool

    def _forget(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.reset()
        self._graphs = [kept for kept in self._graphs if kept is not graph]

    @staticmethod
    def _wait_for(executable: CudaExecutable) -> None:
        if executable.last_launch is not None:
            _or_lost(executable.last_launch.synchronize)


class CudaDriver:
    """One CUDA device. Owned by whoever composed the engine; the engine's thread uses it."""

    def __init__(self, index: int = 0, memory_floor_bytes: int = MEMORY_FLOOR_BYTES) -> None:
        self.torch_device = torch.device("cuda", index)
        self.memory_floor_bytes = memory_floor_bytes
        torch.cuda.set_device(self.torch_device)
        self._properties = torch.cuda.get_device_properties(self.torch_device)
        self._streams: dict[Namespace, torch.cuda.Stream] = {}
        # Failed graphs are never freed where torch cannot unwind them: the pinned-host allocator
        # keeps a pointer to each (pytorch #190308).
        self._graveyard: list[torch.cuda.CUDAGraph] = []
        self._kept_pools: list[torch.cuda.MemPool] = []

    @property
    def device(self) -> str:
        return str(self.torch_device)

    @property
    def description(self) -> str:
        return f"{self._properties.name}, CUDA {torch.version.cuda}"

    @property
    def computes_bf16_fast(self) -> bool:
        return bool(self._properties.major >= 8)

    @property
    def num_sms(self) -> int:
        return int(self._properties.multi_processor_count)

    def open(self, namespace: Namespace) -> CudaArena:
        return CudaArena(self, self._stream_of(namespace))

    def mark(self, timed: bool = False) -> CudaMark:
        return CudaMark(self.torch_device, timed)

    def prime(self, dtype: str) -> None:
        # cuBLAS handles belong to a thread, its 32 MiB workspaces to a thread and stream. Made
        # here, on the capture streams, they lie in the ordinary pool; made inside a capture they
        # would fail, or lie in a graph's private pool and die with it.
        for namespace in Namespace:
            with torch.cuda.stream(self._stream_of(namespace)):
                self._run_primer(getattr(torch, dtype))
        self._run_primer(getattr(torch, dtype))
        self.synchronize()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def synchronize(self) -> None:
        _or_lost(lambda: torch.cuda.synchronize(self.torch_device))

    def is_lost(self, error: BaseException) -> bool:
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            return False
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError:
            return True
        return False

    def repair(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool) -> None:
        """Undo what a capture that could not be ended left behind (torch < 2.14)."""
        index = self.torch_device.index
        if not _ENDS_ALLOCATION_ITSELF:
            torch._C._cuda_endAllocateToPool(index, pool.id)
        if not _RELEASES_POOL_ITSELF:
            torch._C._cuda_releasePool(index, pool.id)
            self._graveyard.append(graph)
        # The default generator still believes it is capturing, and would refuse to draw.
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())

    def drop(self, pool: torch.cuda.MemPool) -> None:
        """Let a pool go, unless somebody else still counts as its user.

        torch ends the process when a pool is destroyed that a graph still uses; a pool that leaks
        is the lesser harm, and is said.
        """
        if pool.use_count() != 1:
            logger.error(
                "a graph memory pool is still in use (%d users) and is kept", pool.use_count()
            )
            self._kept_pools.append(pool)

    def _stream_of(self, namespace: Namespace) -> torch.cuda.Stream:
        if namespace not in self._streams:
            self._streams[namespace] = _new_stream(self.torch_device)
        return self._streams[namespace]

    def _run_primer(self, dtype: torch.dtype) -> None:
        for kind in {dtype, torch.float32}:
            a = torch.ones(16, 64, dtype=kind, device=self.torch_device)
            b = torch.ones(64, 64, dtype=kind, device=self.torch_device)
            bias = torch.ones(64, dtype=kind, device=self.torch_device)
            torch.mm(a, b)
            torch.nn.functional.linear(a, b, bias)
            torch.bmm(a[None], b[None])


def _new_event(timed: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _gc_paused() -> Iterator[None]:
    """A collection inside a capture could destroy another graph or unload a module there."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refusal(raised: BaseException | None, end_error: RuntimeError | None) -> CannotCapture:
    error = raised or end_error
    if isinstance(error, torch.OutOfMemoryError):
        return CannotCapture(Reason.OUT_OF_MEMORY, _first_line(error))
    text = str(error)
    for needle, reason in _REASONS:
        if needle in text:
            return CannotCapture(reason, _first_line(error))
    reason = Reason.INTERFERENCE if raised is None else Reason.WORK_RAISED
    return CannotCapture(reason, f"{type(error).__name__}: {_first_line(error)}")


def _or_lost(call: Callable[[], object]) -> object:
    try:
        return call()
    except RuntimeError as error:
        raise DeviceLost(_lost_message(error)) from error


def _lost_message(error: BaseException) -> str:
    return (
        f"the CUDA context is lost ({_first_line(error)}); nothing more can run in this process: "
        "start it again"
    )


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__

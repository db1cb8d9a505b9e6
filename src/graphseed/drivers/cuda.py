"""The CUDA driver: torch.cuda.CUDAGraph behind the Driver protocol. The only file that says
torch.cuda.

Owns one capture stream for each namespace, the memory pool of each arena, and the repair of failed
captures. `torch.cuda.graph` is not used: it synchronises the device and flushes the allocator at
each capture. Does not know identities, states or policies.
"""

import logging
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.cuda import _POOL_HANDLE

from graphseed.capture.driver import Definition, Executable, Mark, Work
from graphseed.capture.errors import CannotCapture, Closed, DeviceLost, LaunchFailed, Reason
from graphseed.capture.identity import FirstNode, Namespace
from graphseed.drivers import nodes
from graphseed.drivers.cuda_refusals import first_line, lost_message, refusal_of
from graphseed.drivers.cuda_support import MemoryReading, gc_paused

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
class _Pool:
    """A private memory pool and the graphs that count as its users, instantiated or not."""

    memory: torch.cuda.MemPool
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    # torch's pinned-host allocator accepts no further capture into a pool once all its graphs were
    # reset, or once a capture into it could not be ended.
    is_spent: bool = False


@dataclass(slots=True)
class CudaDefinition:
    """A captured, not instantiated graph, and what its work returned in the arena's memory."""

    graph: torch.cuda.CUDAGraph
    num_nodes: int
    root: str
    result: object
    before: MemoryReading
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
    """One generation of a namespace: memory of its own, captured on the namespace's stream.

    Opened by CudaDriver, closed by the cache; the engine's thread only. It holds one pool, and more
    only after a capture that could not be ended.
    """

    def __init__(self, driver: "CudaDriver", stream: torch.cuda.Stream) -> None:
        self._driver = driver
        self._stream = stream
        self._pools: list[_Pool] = []
        self._executables: list[CudaExecutable] = []
        self._is_closed = False

    def capture(self, work: Work) -> CudaDefinition:
        if self._is_closed:
            raise Closed("the arena is closed")
        before = self._driver.memory()
        if before.free_bytes < self._driver.memory_floor_bytes:
            raise CannotCapture(
                Reason.MEMORY_FLOOR,
                f"{before.free_bytes >> 20} MiB are free; capture needs at least "
                f"{self._driver.memory_floor_bytes >> 20} MiB",
            )
        try:
            graph, result = self._record(work, "thread_local")
        except CannotCapture as refusal:
            if refusal.reason is not Reason.NOT_INITIALISED:
                raise
            # A throw-away capture in relaxed mode initialises what the primer did not know of,
            # without executing anything.
            self._forget(self._record(work, "relaxed")[0])
            graph, result = self._record(work, "thread_local")
        try:
            num_nodes, root = nodes.count_and_root(graph.raw_cuda_graph())
            if num_nodes == 0:
                raise CannotCapture(Reason.EMPTY_GRAPH, "the step recorded no work on this device")
        except BaseException:
            self._forget(graph)
            raise
        return CudaDefinition(graph, num_nodes, root, result, before)

    def instantiate(self, definition: Definition) -> CudaExecutable:
        if not isinstance(definition, CudaDefinition):
            raise TypeError(f"expected a CudaDefinition, got {type(definition).__name__}")
        try:
            definition.graph.instantiate()
            nodes.upload(definition.graph.raw_cuda_graph_exec(), self._stream.cuda_stream)
        except RuntimeError as error:
            refusal = refusal_of(None, error)
            if refusal.reason is Reason.INTERFERENCE:  # nothing of the kind can happen here
                refusal = CannotCapture(Reason.UNSUPPORTED_NODE, first_line(error))
            raise refusal from None
        num_bytes = self._driver.memory().taken_since(definition.before)
        executable = CudaExecutable(
            definition.graph, definition.num_nodes, num_bytes, definition.result
        )
        self._executables.append(executable)
        return executable

    def discard(self, definition: Definition) -> None:
        if isinstance(definition, CudaDefinition):
            definition.result = None
            self._forget(definition.graph)

    def launch(self, executable: Executable) -> None:
        if not isinstance(executable, CudaExecutable) or self._is_closed:
            raise LaunchFailed("the executable does not belong to an open arena of this driver")
        try:
            executable.graph.replay()
        except RuntimeError as error:
            if self._driver.is_lost(error):
                raise DeviceLost(lost_message(error)) from error
            raise LaunchFailed(first_line(error)) from None
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
        if self._is_closed:
            return 0
        self._is_closed = True
        for executable in self._executables:
            self._wait_for(executable)
        before = self._driver.memory()
        for executable in self._executables:
            executable.result = None
        self._executables.clear()
        while self._pools:
            pool = self._pools.pop()
            for graph in pool.graphs:
                graph.reset()
            self._driver.drop(pool.memory)
            del pool  # the last reference: the memory goes back to the device
        return before.taken_since(self._driver.memory())

    def _record(self, work: Work, mode: str) -> tuple[torch.cuda.CUDAGraph, object]:
        pool = self._open_pool()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        result: object = None
        raised: BaseException | None = None
        end_error: RuntimeError | None = None
        with gc_paused(), torch.cuda.stream(self._stream):
            self._begin(graph, pool, mode)
            try:
                result = work()
            except BaseException as error:
                raised = error
            try:
                # Always, or the stream would go on capturing. torch warns of an empty graph, which
                # we find ourselves; turned into an error the warning would leave the end undone.
                with warnings.catch_warnings(action="ignore", category=UserWarning):
                    graph.capture_end()
            except RuntimeError as error:
                end_error = error
        if end_error is None:
            pool.graphs.append(graph)
            if raised is None:
                return graph, result
            self._forget(graph)
        else:
            pool.is_spent = True
            self._driver.repair(graph, pool.memory)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        refusal = refusal_of(raised, end_error)
        for failure in (raised, end_error):
            if failure is not None:  # a stored traceback keeps the tensors of the capture alive
                traceback.clear_frames(failure.__traceback__)
        raise refusal from None

    def _begin(self, graph: torch.cuda.CUDAGraph, pool: _Pool, mode: str) -> None:
        try:
            graph.capture_begin(pool=_POOL_HANDLE(pool.memory.id), capture_error_mode=mode)
        except RuntimeError as error:
            pool.is_spent = True  # half begun: nothing may be captured into it, nor may it be freed
            self._driver.keep(graph, pool.memory)
            raise CannotCapture(Reason.INTERFERENCE, first_line(error)) from None

    def _open_pool(self) -> _Pool:
        if not self._pools or self._pools[-1].is_spent:
            try:
                self._pools.append(_Pool(torch.cuda.MemPool()))
            except RuntimeError as error:  # the cudaMallocAsync backend has no pools of its own
                raise CannotCapture(Reason.ALLOCATOR, first_line(error)) from None
        return self._pools[-1]

    def _forget(self, graph: torch.cuda.CUDAGraph) -> None:
        """Destroy one graph, and its pool's memory with the last of them."""
        pool = next(pool for pool in self._pools if graph in pool.graphs)
        graph.reset()
        pool.graphs.remove(graph)
        if not pool.graphs:
            self._pools.remove(pool)
            self._driver.drop(pool.memory)

    @staticmethod
    def _wait_for(executable: CudaExecutable) -> None:
        if executable.last_launch is not None:
            _or_lost(executable.last_launch.synchronize)


class CudaDriver:
    """One CUDA device. Owned by whoever composed the engine; the engine's thread uses it."""

    def __init__(self, index: int = 0, memory_floor_bytes: int = MEMORY_FLOOR_BYTES) -> None:
        self.torch_device = torch.device("cuda", index)
        self.memory_floor_bytes = memory_floor_bytes
        self._entered = threading.local()
        self._enter_thread()
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
        self._enter_thread()
        return CudaArena(self, self._stream_of(namespace))

    def mark(self, timed: bool = False) -> CudaMark:
        self._enter_thread()
        return CudaMark(self.torch_device, timed)

    def prime(self, dtype: str) -> None:
        self._enter_thread()
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

    def memory(self) -> MemoryReading:
        """Read both figures now."""
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return MemoryReading(self.free_bytes(), int(reserved))

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
        if _RELEASES_POOL_ITSELF:
            graph.reset()
        else:
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

    def keep(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool) -> None:
        """Keep for good what torch can neither use nor free safely."""
        logger.error("a capture could not begin; its memory pool is kept")
        self._graveyard.append(graph)
        self._kept_pools.append(pool)

    def _enter_thread(self) -> None:
        """The current device belongs to a thread, and Triton launches on the current one."""
        if not getattr(self._entered, "is_done", False):
            torch.cuda.set_device(self.torch_device)
            self._entered.is_done = True

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


def _or_lost(call: Callable[[], object]) -> object:
    try:
        return call()
    except RuntimeError as error:
        raise DeviceLost(lost_message(error)) from error

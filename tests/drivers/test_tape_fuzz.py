"""Random graphs: whatever the tape makes of a step must leave the bytes of the direct run."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphseed.capture.errors import CannotCapture, Reason
from tests.drivers.replaying import check_replays

MAX_ELEMENTS = 512


@dataclass
class World:
    """The caller's tensors of one random step."""

    dtype: torch.dtype
    inputs: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.inputs = [torch.empty(s, dtype=self.dtype) for s in ((4, 6), (6, 4), (4, 6))]
        self.states = [torch.zeros(4, 6, dtype=self.dtype), torch.zeros(48, dtype=self.dtype)]
        self.indices = torch.zeros(3, dtype=torch.int32)
        self.renew(0)

    @property
    def externals(self) -> list[torch.Tensor]:
        return [*self.inputs, *self.states, self.indices]

    def renew(self, launch: int) -> None:
        for tensor in self.inputs:
            drawn = torch.randn(tensor.shape, generator=self.generator)
            tensor.copy_(drawn if self.dtype.is_floating_point else drawn * 8)
        self.indices.copy_(torch.randint(0, 2, (3,), generator=self.generator))


class Machine:
    """Runs one program over a growing pool of tensors; every operation is total."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pool = [*world.inputs, *world.states, world.states[1][24:].view(4, 6)]

    def pick(self, number: int) -> torch.Tensor:
        return self.pool[-1 - number % len(self.pool)]

    def like(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        same = [t for t in self.pool if t.shape == tensor.shape and t.dtype == tensor.dtype]
        return same[number % len(same)] if same else tensor

    def run(self, program: list[tuple[str, int, int]]) -> None:
        for name, a, b in program:
            made = OPERATIONS[name](self, self.pick(a), b)
            for tensor in made if isinstance(made, tuple | list) else (made,):
                if 0 < tensor.numel() <= MAX_ELEMENTS:
                    self.pool.append(tensor)


def _writable(machine: Machine, x: torch.Tensor) -> torch.Tensor:
    return x if 0 not in x.stride() else x.clone()


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[0] if x.dim() else 1, -1)


def _mm(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    left = _matrix(x)
    fits = [t for t in machine.pool if t.dim() == 2 and t.shape[0] == left.shape[1]]
    fits = [t for t in fits if t.dtype == left.dtype] or [left.t()]
    return left @ fits[b % len(fits)]


def _select(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    if x.dim() == 0 or x.shape[b % x.dim()] < 2:
        return x + 1
    return x.index_select(b % x.dim(), machine.world.indices)


def _embedding(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    if x.dim() != 2 or x.shape[0] < 2 or not x.dtype.is_floating_point:
        return x * 3
    shape = [(3,), (3, 1), (1, 3)][b % 3]
    return torch.nn.functional.embedding(machine.world.indices.view(shape), x)


def _slice(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    if x.dim() == 0:
        return x
    dim = b % x.dim()
    start = b % max(1, x.shape[dim] - 1)
    return x[(slice(None),) * dim + (slice(start, None, 1 + b % 2),)]


def _reshape(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    shapes = [(-1,), (1, -1), (-1, 2) if x.numel() % 2 == 0 else (-1, 1)]
    return x.reshape(shapes[b % 3])


def _cat(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    left = x if x.dim() else x.reshape(1)
    return torch.cat([left, machine.like(left, b)], b % left.dim())


def _split(machine: Machine, x: torch.Tensor, b: int) -> tuple[torch.Tensor, ...]:
    return x.split(2, b % x.dim()) if x.dim() else (x,)


def _softmax(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    return x.softmax(-1) if x.dtype.is_floating_point and x.dim() else x - 2


def _topk(machine: Machine, x: torch.Tensor, b: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.topk(1 + b % x.shape[-1], -1)) if x.dim() else (x,)


def _add_in_place(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    x = _writable(machine, x)
    other = machine.like(x, b)
    return x.add_(other.clone() if _overlaps(x, other) else other)


def _overlaps(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _copy_to_static(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    state = machine.world.states[b % 2]
    if x.shape == state.shape and not _overlaps(x, state):
        return state.copy_(x)
    return state.mul_(2)


def _out_form(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.add(x, machine.like(x, b), out=out)
    return out


def _written_factory(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: torch.zeros(x.shape, dtype=x.dtype),
        lambda: torch.full(x.shape, 3, dtype=x.dtype),
        lambda: torch.ones_like(x),
        lambda: torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape),
    ]
    made = makers[b % 4]()
    made.reshape(-1)[: 1 + b % made.numel()].add_(1)
    return made.add_(x)


def _partly_written(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    made = torch.empty(2, *x.shape, dtype=x.dtype)
    made[0].copy_(x)
    made[1] = machine.like(x, b)
    return made


def _constant(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    grid = torch.arange(x.numel(), dtype=torch.float32).reshape(x.shape)
    return torch.where(grid * 2 > b, x, torch.tensor(b % 5, dtype=x.dtype))


def _unsqueeze_in_place(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    return x.clone().unsqueeze_(0).add_(1).squeeze_(0) if b % 2 else x.unsqueeze(0)


def _cast(machine: Machine, x: torch.Tensor, b: int) -> torch.Tensor:
    small = x.float().clamp(-100, 100)  # a float out of an integer's range has no defined bytes
    small = small.nan_to_num(0.0)
    return small.to([torch.float32, torch.bfloat16, torch.int64, torch.float64][b % 4])


OPERATIONS: dict[str, Callable[[Machine, torch.Tensor, int], object]] = {
    "add": lambda m, x, b: x + m.like(x, b),
    "mul": lambda m, x, b: x * m.like(x, b),
    "scale": lambda m, x, b: x * 0.5 if x.dtype.is_floating_point else x * 2,
    "rsub": lambda m, x, b: 1 - x,
    "reshape": _reshape,
    "transpose": lambda m, x, b: x.transpose(0, -1) if x.dim() else x,
    "slice": _slice,
    "expand": lambda m, x, b: x.unsqueeze(0).expand(2, *x.shape),
    "contiguous": lambda m, x, b: x.contiguous(),
    "clone": lambda m, x, b: x.clone(),
    "cat": _cat,
    "split": _split,
    "add_": _add_in_place,
    "relu_": lambda m, x, b: _writable(m, x).relu_(),
    "copy_": _copy_to_static,
    "index_select": _select,
    "embedding": _embedding,
    "softmax": _softmax,
    "mm": _mm,
    "sum": lambda m, x, b: x.sum(-1, keepdim=bool(b % 2)) if x.dim() else x,
    "topk": _topk,
    "sort": lambda m, x, b: tuple(x.sort(-1)) if x.dim() else (x,),
    "masked": lambda m, x, b: x.masked_fill(x > 0, 1),
    "cumsum": lambda m, x, b: x.cumsum(-1) if x.dim() else x,
    "out": _out_form,
    "factory": _written_factory,
    "empty": _partly_written,
    "constant": _constant,
    "unsqueeze_": _unsqueeze_in_place,
    "cast": _cast,
}

INSTRUCTION = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 15), st.integers(0, 11))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    program=st.lists(INSTRUCTION, min_size=1, max_size=24),
    returned=st.lists(st.integers(0, 15), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
@example(  # a strided result whose only element lies apart
    program=[("slice", 0, 9), ("add", 0, 0), ("slice", 0, 1)], returned=[0], dtype=torch.float32
)
@example(  # a view of a written factory outlives it, beside a write to the caller's memory
    program=[("factory", 0, 3), ("slice", 0, 1), ("add_", 1, 0), ("copy_", 1, 0), ("mm", 1, 1)],
    returned=[0, 1, 2],
    dtype=torch.float32,
)
def test_launches_of_a_random_graph_leave_the_bytes_of_direct_runs(
    program: list[tuple[str, int, int]], returned: list[int], dtype: torch.dtype
) -> None:
    world = World(dtype)

    def work() -> list[torch.Tensor]:
        machine = Machine(world)
        machine.run(program)
        return [machine.pick(number) for number in returned]

    try:
        check_replays(work, world.externals, world.renew, launches=3)
    except CannotCapture as refusal:
        assert refusal.reason is Reason.EMPTY_GRAPH, refusal  # nothing but views


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_each_operation_of_the_fuzz_alone_leaves_the_same_bytes(
    name: str, dtype: torch.dtype
) -> None:
    world = World(dtype)

    def work() -> list[torch.Tensor]:
        machine = Machine(world)
        machine.run([("scale", 0, 0)])
        first = len(machine.pool)
        machine.run([(name, number, number) for number in range(6)])
        return machine.pool[first - 1 :]

    check_replays(work, world.externals, world.renew, launches=2)

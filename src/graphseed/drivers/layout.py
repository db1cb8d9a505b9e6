"""Where every tensor of a tape lies: constants, one slab of fixed buffers, the caller's memory.

Owns liveness over roots, the plan of the slab and the tensors made of windows. A root's buffer is
taken before the buffers of the node's own inputs are given up, so nothing a node writes can lie
over what it reads. Does not know which kernels fill the buffers: that is `lowering`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from graphseed.drivers.tape import Node, Tape, Window, named_arguments, replaced

_ALIGN: Final = 64  # bytes: a cache line, and what torch's own allocator gives
# Factories whose value depends on the shape of a tensor at most: one value fills the buffer.
# The name of the argument that holds it, or the value itself.
FILLS: Final[dict[str, str | int]] = {
    "aten::zeros": 0,
    "aten::zeros_like": 0,
    "aten::new_zeros": 0,
    "aten::ones": 1,
    "aten::ones_like": 1,
    "aten::new_ones": 1,
    "aten::full": "fill_value",
    "aten::full_like": "fill_value",
    "aten::new_full": "fill_value",
    "aten::scalar_tensor": "s",
}


@dataclass(frozen=True, slots=True)
class Slab:
    """Byte offset of every buffer in one allocation, and its size."""

    offsets: dict[int, int]  # root -> bytes from the start
    num_bytes: int


def plan_slab(nodes: Sequence[Node], sizes: dict[int, int], held: frozenset[int]) -> Slab:
    """Give each root of `sizes` (root -> bytes) a place that nothing alive at the same time has.

    `held` roots keep theirs to the end, and across launches. First fit, in order of birth.
    """
    births, deaths = _lives(nodes, sizes, held)
    offsets: dict[int, int] = {}
    alive: list[tuple[int, int, int]] = []  # (offset, end, root), by offset
    num_bytes = 0
    for idx in range(len(nodes) + 1):
        for root in births.get(idx, ()):
            size = -(-sizes[root] // _ALIGN) * _ALIGN
            offset = _first_gap(alive, size)
            offsets[root] = offset
            alive.append((offset, offset + size, root))
            alive.sort()
            num_bytes = max(num_bytes, offset + size)
        dead = deaths.get(idx)
        if dead:
            alive = [item for item in alive if item[2] not in dead]
    return Slab(offsets, num_bytes)


def _lives(
    nodes: Sequence[Node], sizes: dict[int, int], held: frozenset[int]
) -> tuple[dict[int, list[int]], dict[int, set[int]]]:
    """Roots by the node that first touches them, and by the node that last does."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for idx, node in enumerate(nodes):
        for root in sorted(node.fresh | node.reads):
            if root in sizes:
                first.setdefault(root, idx)
                last[root] = idx
    births: dict[int, list[int]] = {}
    deaths: dict[int, set[int]] = {}
    for root in sizes:  # one that no node touches: memory the step returns as it was allocated
        births.setdefault(first.get(root, len(nodes)), []).append(root)
        if root not in held:
            deaths.setdefault(last.get(root, len(nodes)), set()).add(root)
    return births, deaths


def _first_gap(alive: Sequence[tuple[int, int, int]], size: int) -> int:
    at = 0
    for offset, end, _ in alive:
        if offset - at >= size:
            break
        at = max(at, end)
    return at


class Memory:
    """The tensors of one executable, made of the windows of its tape.

    Owned by the executable; holds the caller's storages as long as it lives. To be made outside
    inference mode, so that its tensors may be written in any mode.
    """

    def __init__(self, tape: Tape) -> None:
        self._storages = {
            idx: root.storage for idx, root in enumerate(tape.roots) if root.storage is not None
        }
        self._sizes = {idx: root.num_bytes for idx, root in enumerate(tape.roots)}
        self._tensors: dict[Window, torch.Tensor] = {}
        self._slab = Slab({}, 0)
        self._slab_storage = _storage(0)
        self.num_bytes = 0
        self.nodes = self._fold_constants(tape)
        self._add_slab(tape)

    def tensor(self, window: Window) -> torch.Tensor:
        """The tensor that a window is, at its final address; the same object every time."""
        made = self._tensors.get(window)
        if made is None:
            at_bytes = self._slab.offsets.get(window.root)
            storage = self._slab_storage if at_bytes is not None else self._storages[window.root]
            offset = window.offset + (at_bytes or 0) // window.dtype.itemsize
            made = torch.empty(0, dtype=window.dtype)
            made.set_(storage, offset, window.shape, window.stride)
            self._tensors[window] = made
        return made

    def resolve(self, value: object) -> object:
        """`value` with the windows in its lists, tuples and dicts made tensors."""
        return replaced(value, Window, self.tensor)

    def _fold_constants(self, tape: Tape) -> tuple[Node, ...]:
        """Run, once, what depends on nothing that can change; return the nodes that remain."""
        written = set(tape.result_roots)  # the caller may write over what it was given
        for node in tape.nodes:
            written |= node.writes
        constant = {idx for idx, root in enumerate(tape.roots) if root.is_constant}
        remaining: list[Node] = []
        for node in tape.nodes:
            if _is_constant(node, constant, written):
                constant |= node.fresh
                self._run_constant(node)
            else:
                remaining.append(node)
        return tuple(remaining)

    def _run_constant(self, node: Node) -> None:
        for root in node.fresh:
            self._storages[root] = _storage(self._sizes[root])
            self.num_bytes += self._sizes[root]
        if node.name in FILLS:  # a tensor among its arguments gives a shape and nothing else
            made: object = fill_value(node)
        else:
            args = [self.resolve(item) for item in node.args]
            made = node.op(*args, **{key: self.resolve(item) for key, item in node.kwargs.items()})
        values = made if isinstance(made, list | tuple) else (made,)
        for window, value in zip(node.outs, values, strict=True):
            if window is not None:
                tensor = self.tensor(window)
                tensor.copy_(value) if isinstance(value, torch.Tensor) else tensor.fill_(value)

    def _add_slab(self, tape: Tape) -> None:
        touched = set(tape.result_roots)
        for node in self.nodes:
            touched |= node.fresh | node.reads
        touched -= self._storages.keys()
        sizes = {root: self._sizes[root] for root in sorted(touched)}
        self._slab = plan_slab(self.nodes, sizes, tape.result_roots)
        self._slab_storage = _storage(self._slab.num_bytes)
        self.num_bytes += self._slab.num_bytes


def fill_value(node: Node) -> object:
    """The value that a factory of FILLS fills its tensor with."""
    value = FILLS[node.name]
    if isinstance(value, str):
        return named_arguments(node.op, node.args, node.kwargs)[value]
    return value


def _storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()


def _is_constant(node: Node, constant: set[int], written: set[int]) -> bool:
    if not node.fresh or node.writes or not written.isdisjoint(node.fresh):
        return False
    if node.name in FILLS:
        return True
    # An operator of somebody else may read what it does not declare.
    return node.op.namespace == "aten" and node.reads <= constant

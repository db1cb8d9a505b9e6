"""A tape: one step's aten operations, written down without executing any of them.

Owns the values: `Root` (a storage), `Window` (a tensor, as a strided view of a root), `Node` (an
operation that does work) and `Tape`, and which nodes are live. Views need no node: a window says
all there is to say. Memory that is only allocated needs none either: its root is born where it is
first touched. Does not know how a tape comes about (`recorder`), where it lies in memory
(`layout`) or what a launch calls (`lowering`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from graphseed.capture.identity import FirstNode


@dataclass(frozen=True, slots=True)
class Root:
    """A storage that windows look at: the caller's memory, or memory of the tape's own."""

    num_bytes: int
    storage: torch.UntypedStorage | None  # the caller's; None for the tape's own
    is_constant: bool = False  # made from host values by the step itself: nobody can change it


@dataclass(frozen=True, slots=True)
class Window:
    """A tensor of the tape: a strided view of one root. Equal windows are the same tensor."""

    root: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of dtype, from the start of the root

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie densely in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True

    def reshaped(self, *shape: int) -> "Window":
        """The same elements of a contiguous window in another contiguous shape."""
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return Window(self.root, self.dtype, shape, stride, self.offset)


@dataclass(frozen=True, slots=True)
class Node:
    """One recorded operation that does work. Windows stand in the place of its tensors."""

    op: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    outs: tuple[Window | None, ...]  # what it returned, in order
    returns_many: bool  # whether that was a tuple or a list
    fresh: frozenset[int]  # roots that begin here
    reads: frozenset[int]  # roots of every tensor handed in, written ones too
    writes: frozenset[int]  # roots handed in and written, directly or through a view

    @property
    def name(self) -> str:
        """Name without the overload, e.g. "aten::embedding"."""
        return str(self.op._schema.name)

    @property
    def has_side_effect(self) -> bool:
        """Whether it gives and writes no tensor, so that it can only be there for an effect."""
        return not self.fresh and not self.writes


@dataclass(frozen=True, slots=True)
class Tape:
    """A whole step: its live nodes in order. Holds the caller's storages, not their values."""

    nodes: tuple[Node, ...]
    roots: tuple[Root, ...]
    result: tuple[object, ...]  # leaves of what the step returned, windows for its tensors
    result_spec: pytree.TreeSpec  # how the leaves make up the whole
    externals: tuple[torch.Tensor, ...]  # the caller's tensors that the step was seen to use

    @property
    def first_node(self) -> FirstNode | None:
        """Operation, shape and dtype of the first node; None where it touches no tensor."""
        first = self.nodes[0]
        window = next((out for out in first.outs if out is not None), None)
        if window is None:
            windows = windows_in((first.args, first.kwargs))
            window = next((w for w in windows if w.root in first.writes), None)
        if window is None:
            return None
        dtype = str(window.dtype).removeprefix("torch.")
        return FirstNode(first.name.replace("::", "."), window.shape, dtype)

    @property
    def result_roots(self) -> frozenset[int]:
        """Roots that what the step returned looks at."""
        return frozenset(leaf.root for leaf in self.result if isinstance(leaf, Window))


def windows_in(value: object) -> Iterator[Window]:
    """Every window inside nested lists, tuples and dicts, in order."""
    if isinstance(value, Window):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from windows_in(item)
    elif isinstance(value, dict):
        yield from windows_in(tuple(value.values()))


def replaced(value: object, kind: type, by: Callable[..., object]) -> object:
    """`value` with every `kind` inside its nested lists, tuples and dicts handed to `by`."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, list):
        return [replaced(item, kind, by) for item in value]
    if isinstance(value, tuple):
        return tuple(replaced(item, kind, by) for item in value)
    if isinstance(value, dict):
        return {key: replaced(item, kind, by) for key, item in value.items()}
    return value


def live_nodes(tape: Tape) -> tuple[Node, ...]:
    """The nodes whose work reaches the caller's memory, the result or another live node."""
    live = {idx for idx, root in enumerate(tape.roots) if root.storage is not None}
    live |= tape.result_roots
    kept: list[Node] = []
    for node in reversed(tape.nodes):
        if node.has_side_effect or not live.isdisjoint(node.fresh | node.writes):
            live |= node.reads
            kept.append(node)
    return tuple(reversed(kept))


def named_arguments(
    op: OpOverload, args: Sequence[object], kwargs: dict[str, object]
) -> dict[str, object]:
    """Arguments of a call by their names in the schema; defaults that were left out stay out."""
    names = [item.name for item in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def written_arguments(
    op: OpOverload, args: Sequence[object], kwargs: dict[str, object]
) -> list[object]:
    """The arguments that the schema says are written."""
    named = named_arguments(op, args, kwargs)
    return [
        named[item.name]
        for item in op._schema.arguments
        if item.alias_info is not None and item.alias_info.is_write and item.name in named
    ]

"""What a launch runs: one call for each node, into fixed buffers, as straight-line Python.

Owns the choice of a form for each operation (in place, `out=`, or call and copy) and the generated
function. A form is taken only where it is the same kernel writing the same bytes for every dtype.
Does not know where the buffers lie: that is `layout`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch._ops import OpOverload

from graphseed.drivers.layout import FILLS, Memory, fill_value
from graphseed.drivers.tape import Node, Window

aten = torch.ops.aten

# Exactly an allocation and a copy_ of their input.
_COPIES: Final = frozenset({"aten::_to_copy", "aten::clone"})
# The same kernels through torch's generated bindings: 0.75 us a call against 1.1 us.
_BINDINGS: Final[dict[OpOverload, Callable[..., object]]] = {
    aten.add.out: torch.add,
    aten.addmm.out: torch.addmm,
    aten.bmm.out: torch.bmm,
    aten.cat.out: torch.cat,
    aten.cos.out: torch.cos,
    aten.div.out: torch.div,
    aten.index_select.out: torch.index_select,
    aten.mean.out: torch.mean,
    aten.mm.out: torch.mm,
    aten.mul.out: torch.mul,
    aten.neg.out: torch.neg,
    aten.pow.Tensor_Scalar_out: torch.pow,
    aten.rsqrt.out: torch.rsqrt,
    aten.sigmoid.out: torch.sigmoid,
    aten.silu.out: torch._C._nn.silu,
    aten.sin.out: torch.sin,
    aten.sub.out: torch.sub,
    aten.tanh.out: torch.tanh,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the launch, and the buffers that its results are copied to."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    copies: tuple[tuple[int | None, torch.Tensor], ...] = ()  # (which result, buffer)


def lower(memory: Memory, results: frozenset[int]) -> tuple[Call, ...]:
    """The calls of one launch, in order. `results` are roots that somebody reads afterwards."""
    read = set(results)
    for node in memory.nodes:
        read |= node.reads
    return tuple(_lower(node, memory, read) for node in memory.nodes)


def generate(calls: Sequence[Call]) -> Callable[[], None]:
    """Straight-line function that makes the calls; every operand is bound to it by closure."""
    names: dict[int, str] = {}
    values: list[object] = []

    def bind(value: object) -> str:
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if id(value) not in names:
            names[id(value)] = f"v{len(values)}"
            values.append(value)  # held, so that its id stays its own
        return names[id(value)]

    lines = []
    for call in calls:
        arguments = [bind(value) for value in call.args]
        arguments += [f"{key}={bind(value)}" for key, value in call.kwargs.items()]
        text = f"{bind(call.function)}({', '.join(arguments)})"
        lines.append(f"r = {text}" if call.copies else text)
        for idx, buffer in call.copies:
            lines.append(f"{bind(buffer.copy_)}(r{'' if idx is None else f'[{idx}]'})")
        if call.copies:
            lines.append("r = None")
    body = "\n  ".join(lines or ["pass"])
    parameters = ", ".join(f"v{idx}" for idx in range(len(values)))
    source = f"def bind({parameters}):\n def run():\n  {body}\n return run\n"
    namespace: dict[str, Callable[..., Callable[[], None]]] = {}
    exec(compile(source, "<graphseed tape>", "exec"), namespace)
    return namespace["bind"](*values)


def _lower(node: Node, memory: Memory, read: set[int]) -> Call:
    if node.name in FILLS and not node.writes:
        return Call(_buffers(node, memory)[0].fill_, (fill_value(node),), {})
    args = tuple(memory.resolve(item) for item in node.args)
    kwargs = {key: memory.resolve(item) for key, item in node.kwargs.items()}
    if not node.fresh:
        return Call(node.op._op, args, kwargs)
    if node.name in _COPIES:
        return Call(_buffers(node, memory)[0].copy_, (args[0],), {})
    if node.op is aten.embedding.default:
        gather = _gather(node, memory)
        if gather is not None:
            return gather
    form = None if node.writes else out_form(node.op)
    if form is not None and len(node.outs) == len(form[1]) and None not in node.outs:
        op, names = form
        outs = dict(zip(names, _buffers(node, memory), strict=True))
        return Call(_BINDINGS.get(op, op._op), args, kwargs | outs)
    copies = tuple(
        (idx if node.returns_many else None, memory.tensor(window))
        for idx, window in enumerate(node.outs)
        if window is not None and window.root in node.fresh and window.root in read
    )
    return Call(node.op._op, args, kwargs, copies)


def _buffers(node: Node, memory: Memory) -> list[torch.Tensor]:
    return [memory.tensor(window) for window in node.outs if window is not None]


def _gather(node: Node, memory: Memory) -> Call | None:
    """An embedding as the index_select that it is, where both sides can be flattened."""
    weight, indices, out = node.args[0], node.args[1], node.outs[0]
    if not (isinstance(indices, Window) and isinstance(out, Window)):
        return None
    if not (indices.is_contiguous and out.is_contiguous):
        return None
    num_rows = math.prod(indices.shape)
    rows = memory.tensor(out.reshaped(num_rows, out.shape[-1]))
    flat = memory.tensor(indices.reshaped(num_rows))
    return Call(torch.index_select, (memory.resolve(weight), 0, flat), {"out": rows})


def out_form(op: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The hand-written overload of `op` that writes into given tensors, and their names.

    Generated overloads are passed over: they run the plain form and copy.
    """
    if any(str(item.type) != "Tensor" for item in op._schema.returns):
        return None  # a list of tensors, however long
    mine = [(item.name, str(item.type)) for item in op._schema.arguments]
    packet = op._overloadpacket
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        other = getattr(packet, name)
        outs = tuple(item.name for item in other._schema.arguments if item.is_out)
        theirs = [
            (item.name, str(item.type)) for item in other._schema.arguments if not item.is_out
        ]
        is_same = theirs == mine and len(outs) == len(op._schema.returns)
        if outs and is_same and torch.Tag.generated not in other.tags:
            return other, outs
    return None

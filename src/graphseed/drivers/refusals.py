"""What a tape cannot hold, and the words for it (I8).

Owns the reads of values on the host, the mapping of torch's errors onto reasons, and the guard for
reads that never reach the dispatcher. Does not know how a tape is recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NoReturn, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from graphseed.capture.errors import CannotCapture, Reason

# Asked on the host and answered from values: recorded, they would freeze one answer.
HOST_ANSWERS: Final = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}
)
NEEDS_VALUES: Final = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
NO_FAKE_KERNEL: Final = (
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)


def refusal_of(error: Exception) -> tuple[Reason, str]:
    """Reason and detail for what came out of `record`; the detail does not hold the error."""
    if isinstance(error, CannotCapture):
        return error.reason, error.detail
    if isinstance(error, NEEDS_VALUES):
        return Reason.HOST_SYNC, first_line(error)
    if isinstance(error, UnsupportedFakeTensorException | UnsupportedOperatorException):
        return Reason.UNSUPPORTED_NODE, first_line(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Reason.OUT_OF_MEMORY, first_line(error)
    return Reason.WORK_RAISED, first_line(error)


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a detail that must not hold the error itself."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor inside nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def has_no_dropout(op: OpOverload, arguments: object) -> bool:
    """Whether a drawing operation will not draw: attention with its dropout at zero."""
    named = cast(dict[str, object], arguments)
    declared = {item.name: item for item in op._schema.arguments}
    if "dropout_p" not in declared:
        return False
    return named.get("dropout_p", declared["dropout_p"].default_value) == 0.0


class HostReads(TorchFunctionMode):
    """Refuses the reads of a tensor's values on the host that never reach the dispatcher."""

    _READS: Final = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
    _COPIES: Final = (torch.tensor, torch.as_tensor, torch.asarray)

    def __init__(self, refuse: Callable[[Reason, str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        is_copy = func in self._COPIES and any(True for _ in tensors_in((args, kwargs)))
        if is_copy or func in self._READS:
            name = getattr(func, "__name__", str(func))
            self._refuse(Reason.HOST_SYNC, f"{name} reads a tensor's values on the host")
        return func(*args, **kwargs)

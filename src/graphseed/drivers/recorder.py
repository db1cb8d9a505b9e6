"""Recording a step: its operations run on fake tensors and are written down as a tape.

Owns `record` and the refusals of what a tape cannot hold: reads of values on the host, random
numbers, other devices, operations without a fake kernel (I8). No kernel runs and nothing real
changes while it records (I1). Does not know what becomes of the tape.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final, NoReturn, cast

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from graphseed.capture.errors import CannotCapture, Reason
from graphseed.drivers.refusals import (
    HOST_ANSWERS,
    NEEDS_VALUES,
    NO_FAKE_KERNEL,
    HostReads,
    first_line,
    has_no_dropout,
    tensors_in,
)
from graphseed.drivers.tape import (
    Node,
    Root,
    Tape,
    Window,
    live_nodes,
    named_arguments,
    replaced,
    windows_in,
    written_arguments,
)

aten = torch.ops.aten

# Views whose schema does not say so. Any other unannotated sharing is a broken fake kernel.
_UNANNOTATED_VIEWS: Final = frozenset(
    {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}
)
_ALLOCATIONS: Final = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
    | {"aten::new_empty_strided", "aten::empty_permuted"}
)
_LIFTS: Final = frozenset({"aten::lift", "aten::lift_fresh"})


def record(work: Callable[[], object]) -> Tape:
    """Record `work` without executing it.

    Raises CannotCapture for what a tape cannot hold; what `work` itself raises comes through.
    Leaves no mode behind, and may be called inside `torch.inference_mode`.
    """
    recorder = _Recorder()
    # Not inference mode: there composite operations would arrive whole, views among them that
    # copy or not as it happens.
    with torch.inference_mode(False), torch.no_grad(), _unversioned():
        try:
            with recorder.fakes, recorder, HostReads(recorder.refuse):
                result = work()
        except Exception:
            recorder.raise_refusal()  # the step may have made another error of it
            raise
        recorder.raise_refusal()  # or caught it
        return recorder.tape(result)


def _unversioned() -> AbstractContextManager[object]:
    """Skip the layer above the modes that would count up the version of what is written."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(key)
    return guard


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of the step, runs it on fake tensors and writes it down."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._refusal: tuple[Reason, str] | None = None
        self._nodes: list[Node] = []
        self._roots: list[Root] = []
        self._root_of: dict[int, int] = {}  # address of a storage's struct -> its root
        self._num_bytes: dict[int, int] = {}  # address of a fake storage's struct -> its size
        self._kept: list[object] = []  # storages and aliases, alive so that the keys stay theirs
        self._externals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> (real, fake)

    # ---- what the step may not do

    def refuse(self, reason: Reason, detail: str) -> NoReturn:
        """Refuse the step, for good: a step that catches this error is refused all the same."""
        self._refusal = self._refusal or (reason, detail)
        raise CannotCapture(reason, detail)

    def raise_refusal(self) -> None:
        """Raise what was refused, if anything."""
        if self._refusal is not None:
            raise CannotCapture(*self._refusal)

    def _refuse_by_schema(self, op: OpOverload, arguments: object) -> None:
        if op._schema.name in HOST_ANSWERS:
            self.refuse(Reason.HOST_SYNC, f"{op} hands a value of the device to the host")
        if torch.Tag.nondeterministic_seeded in op.tags and not has_no_dropout(op, arguments):
            self.refuse(Reason.RANDOM, f"{op} draws random numbers; draw them outside the step")

    def _refuse_unusual(self, op: OpOverload, tensor: torch.Tensor, is_copy: bool) -> None:
        if tensor.device.type != "cpu":
            reason = Reason.HOST_MEMORY if is_copy else Reason.UNSUPPORTED_NODE
            self.refuse(reason, f"{op} gives a tensor on {tensor.device}; a tape is for the cpu")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            detail = f"{op} gives a tensor of layout {tensor.layout} and dtype {tensor.dtype}"
            self.refuse(Reason.UNSUPPORTED_NODE, detail + "; a tape holds plain tensors only")

    # ---- recording

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunction():
            return self._see(func, tuple(args), kwargs or {})

    def _see(self, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if op.namespace == "prim":  # asks for metadata: no kernel
            return op(*cast(tuple[object, ...], self._faked(args)), **kwargs)
        if _is_composite(op):
            with self:  # inference tensors skip the layer that would have decomposed it
                return op.decompose(*args, **kwargs)
        arguments = named_arguments(op, args, kwargs)
        self._refuse_by_schema(op, arguments)
        fake_args, fake_kwargs = self._faked(args), self._faked(kwargs)
        fake_args = cast(tuple[object, ...], fake_args)
        fake_kwargs = cast(dict[str, object], fake_kwargs)
        recorded = tuple(replaced(item, torch.Tensor, self.window_of) for item in fake_args)
        recorded_kwargs = {
            key: replaced(item, torch.Tensor, self.window_of) for key, item in fake_kwargs.items()
        }
        out = self._run_fake(op, fake_args, fake_kwargs)
        if op._schema.is_mutable:
            self._check_written(op, (args, kwargs), (recorded, recorded_kwargs))
        self._write_down(op, recorded, recorded_kwargs, out)
        if not op._schema.is_mutable:
            return out
        # What was written in place is the caller's own object again: `module.count += 1` must
        # not leave a fake tensor in the module.
        given = dict(zip(_ids(fake_args, fake_kwargs), tensors_in((args, kwargs)), strict=True))
        return replaced(out, torch.Tensor, lambda tensor: given.get(id(tensor), tensor))

    def _run_fake(
        self, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if op.namespace != "aten" and op._schema.is_mutable and not op._schema.returns:
            return None  # no shapes to work out, so no fake kernel is asked for
        if op._schema.name in _LIFTS:
            return self._fresh_like(cast(torch.Tensor, args[0]))
        try:
            if op is aten._grouped_mm.default:
                return _fake_grouped_mm(*args, **kwargs)  # type: ignore[arg-type]
            return op(*args, **kwargs)
        except NEEDS_VALUES:
            self.refuse(Reason.HOST_SYNC, f"{op} has an outcome that depends on values")
        except NO_FAKE_KERNEL as error:
            self.refuse(Reason.UNSUPPORTED_NODE, f"{op} cannot be recorded: {first_line(error)}")

    def _write_down(
        self, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], out: object
    ) -> None:
        if torch.Tag.inplace_view in op.tags:
            return  # the tensor's shape changed: its next window says so
        num_roots = len(self._roots)
        values = out if isinstance(out, list | tuple) else () if out is None else (out,)
        windows = tuple(windows_in((args, kwargs)))
        for tensor in tensors_in(values):
            self._refuse_unusual(op, tensor, is_copy=bool(windows))
        outs = tuple(self._out_window(op, value) for value in values)
        fresh = frozenset(range(num_roots, len(self._roots)))
        if op._schema.name in _ALLOCATIONS:
            return
        reads = frozenset(window.root for window in windows)
        self._refuse_unannotated_view(op, outs, fresh)
        writes = frozenset(w.root for w in windows_in(written_arguments(op, args, kwargs)))
        if fresh or writes or not outs:
            if op._schema.name in _LIFTS:
                op = aten.clone.default
            many = isinstance(out, list | tuple)
            self._nodes.append(Node(op, args, kwargs, outs, many, fresh, reads, writes))

    def _out_window(self, op: OpOverload, value: object) -> Window | None:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            detail = f"{op} hands a {type(value).__name__} to the host"
            self.refuse(Reason.HOST_SYNC, detail)
        storage = value.untyped_storage()
        if storage._cdata not in self._root_of:
            self._add_root(storage, Root(storage.nbytes(), None))
        return self.window_of(value)

    def _refuse_unannotated_view(
        self, op: OpOverload, outs: Sequence[Window | None], fresh: frozenset[int]
    ) -> None:
        annotated = any(item.alias_info is not None for item in op._schema.returns)
        if annotated or op._schema.name in _UNANNOTATED_VIEWS:
            return
        if any(window is not None and window.root not in fresh for window in outs):
            detail = f"the fake kernel of {op} returns its input; its schema says it does not"
            self.refuse(Reason.UNSUPPORTED_NODE, detail)

    def _check_written(self, op: OpOverload, given: object, recorded: object) -> None:
        """Refuse a tensor that was resized, or a caller's tensor that was made another view."""
        for tensor, before in zip(tensors_in(given), windows_in(recorded), strict=True):
            real = self._externals.get(id(tensor))
            now = self.window_of(tensor if real is None else real[1])
            storage = (tensor if real is None else real[1]).untyped_storage()
            is_resized = storage.nbytes() != self._num_bytes[storage._cdata]
            is_view_op = torch.Tag.inplace_view in op.tags
            if is_resized or (now != before and (real is not None or not is_view_op)):
                detail = f"{op} changes the shape of a tensor from {before.shape} to {now.shape}"
                self.refuse(Reason.UNSUPPORTED_NODE, detail + "; give it one of the right shape")

    # ---- tensors, fakes and windows

    def window_of(self, tensor: torch.Tensor) -> Window:
        """The window that a tensor of the step is; the caller's own tensors included."""
        fake = tensor if isinstance(tensor, FakeTensor) else self._fake(tensor)
        root = self._root_of.get(fake.untyped_storage()._cdata)
        if root is None or fake.is_conj() or fake.is_neg():
            what = "lazily conjugated or negated" if root is not None else "of another recording"
            self.refuse(Reason.UNSUPPORTED_NODE, f"a tensor {what} of shape {tuple(fake.shape)}")
        shape, stride = tuple(fake.shape), tuple(fake.stride())
        return Window(root, fake.dtype, shape, stride, int(fake.storage_offset()))

    def _faked(self, value: object) -> object:
        return replaced(value, torch.Tensor, self._fake)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._externals.get(id(tensor))
        if known is not None and known[0].data_ptr() == tensor.data_ptr():
            return known[1]
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if is_wrapper or tensor.layout is not torch.strided or tensor.is_quantized:
            what = f"a {type(tensor).__name__} of layout {tensor.layout}"
            self.refuse(Reason.UNSUPPORTED_NODE, f"{what}; a tape holds strided tensors only")
        if tensor.device.type != "cpu":
            detail = f"a tensor on {tensor.device}; a tape holds cpu tensors only"
            self.refuse(Reason.HOST_MEMORY, detail)
        fake = self._fake_external(tensor)
        self._externals[id(tensor)] = (tensor, fake)
        return fake

    def _fake_external(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        geometry = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        with torch._C._DisableTorchDispatch():
            # A plain alias: it is no view, no parameter and no inference tensor.
            alias = torch.empty(0, dtype=tensor.dtype).set_(*geometry)
        fake = self.fakes.from_tensor(alias)
        fake_storage = fake.untyped_storage()
        self._kept.append(alias)
        root = self._root_of.get(storage._cdata)
        if root is None:
            root = self._add_root(storage, Root(storage.nbytes(), storage))
        if self._root_of.setdefault(fake_storage._cdata, root) != root:
            self.refuse(Reason.UNSUPPORTED_NODE, "two storages of the caller share one fake")
        # The fake storage only reaches as far as the views seen of it: each may make it larger.
        self._num_bytes[fake_storage._cdata] = fake_storage.nbytes()
        self._kept.append(fake_storage)
        return fake

    def _fresh_like(self, lifted: torch.Tensor) -> torch.Tensor:
        """Fake of a tensor that the step made from host values, e.g. `torch.tensor([1, 2])`."""
        source = self.window_of(lifted).root
        self._roots[source] = replace(self._roots[source], is_constant=True)
        return torch.empty_strided(lifted.shape, lifted.stride(), dtype=lifted.dtype, device="cpu")

    def _add_root(self, storage: torch.UntypedStorage, root: Root) -> int:
        self._kept.append(storage)
        self._num_bytes[storage._cdata] = storage.nbytes()
        self._roots.append(root)
        self._root_of[storage._cdata] = len(self._roots) - 1
        return len(self._roots) - 1

    # ---- the end

    def tape(self, result: object) -> Tape:
        """The tape of a step that returned `result`, without nodes whose work nobody sees."""
        leaves, spec = pytree.tree_flatten(result)
        windows = tuple(replaced(leaf, torch.Tensor, self.window_of) for leaf in leaves)
        externals = tuple(real for real, _ in self._externals.values())
        tape = Tape(tuple(self._nodes), tuple(self._roots), windows, spec, externals)
        return replace(tape, nodes=live_nodes(tape))


def _is_composite(op: OpOverload) -> bool:
    keys = torch._C.DispatchKey
    has = op.has_kernel_for_dispatch_key
    return has(keys.CompositeImplicitAutograd) and not has(keys.CPU)


def _ids(*values: object) -> list[int]:
    return [id(tensor) for tensor in tensors_in(values)]


def _fake_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shape of a grouped product. torch's own fake kernel takes bfloat16 alone, where the kernel
    of the cpu takes float32 too, and it does not pad rows to 16 bytes as that kernel does."""
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    dtype = out_dtype or mat_a.dtype
    groups: tuple[int, ...] = ()
    if mat_a.dim() == mat_b.dim():
        groups = (mat_a.shape[0],) if mat_a.dim() == 3 or offs is None else (offs.shape[0],)
    align = 16 // dtype.itemsize
    row_stride = -(-columns // align) * align
    stride = (rows * row_stride, row_stride, 1)[-2 - len(groups) :]
    return torch.empty_strided((*groups, rows, columns), stride, dtype=dtype, device="cpu")

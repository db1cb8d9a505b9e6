"""Shared by the tests of the host driver: capture a step, compare its launches with direct runs."""

from collections.abc import Callable, Sequence

import torch
import torch.utils._pytree as pytree

from graphseed.capture.identity import Namespace
from graphseed.drivers.host import HostArena, HostDriver, HostExecutable
from graphseed.testing.bitwise import assert_same_bytes, poison

Work = Callable[[], object]


def open_arena() -> HostArena:
    return HostDriver().open(Namespace.PROMPT)


def captured(work: Work) -> tuple[HostArena, HostExecutable]:
    arena = open_arena()
    return arena, arena.instantiate(arena.capture(work))


def tensors_of(result: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def check_replays(
    work: Work,
    externals: Sequence[torch.Tensor] = (),
    renew: Callable[[int], object] = lambda launch: None,
    launches: int = 5,
) -> HostExecutable:
    """Launch `work` from poisoned outputs and compare result and `externals` with a direct run.

    Both start from the same externals, which capture must leave as they are (I1); `renew` changes
    them before every launch.
    """
    with torch.no_grad():
        before = [(external.clone(), external._version) for external in externals]
        arena, executable = captured(work)
        for external, (want, version) in zip(externals, before, strict=True):
            assert_same_bytes(external, want, "external after capture")
            assert external._version == version, "capture wrote to an external"
        for launch in range(launches):
            renew(launch)
            start = [external.clone() for external in externals]
            want_results = [tensor.clone() for tensor in tensors_of(work())]
            want_externals = [external.clone() for external in externals]
            for external, value in zip(externals, start, strict=True):
                external.copy_(value)
            inputs = {external.untyped_storage().data_ptr() for external in externals}
            for tensor in tensors_of(executable.result):
                if tensor.untyped_storage().data_ptr() not in inputs and tensor.numel():
                    poison(tensor)
            arena.launch(executable)
            got = tensors_of(executable.result)
            for idx, (mine, want) in enumerate(zip(got, want_results, strict=True)):
                assert_same_bytes(mine, want, f"launch {launch}, result {idx}")
            for idx, (mine, want) in enumerate(zip(externals, want_externals, strict=True)):
                assert_same_bytes(mine, want, f"launch {launch}, external {idx}")
    return executable

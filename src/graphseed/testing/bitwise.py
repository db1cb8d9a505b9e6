"""Equality of bytes: what every claim about a replay is tested with.

Owns `assert_bitwise` and the helpers that read and poison a tensor's bytes. Does not know drivers
or caches: what a run does is the caller's.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

_POISON: Final = 0xA5


def assert_bitwise(
    run: Callable[[], object], outputs: Sequence[torch.Tensor], replays: int = 5
) -> None:
    """Check that `run` leaves the same bytes in `outputs` each time, poisoned in between.

    The first run gives the bytes that are expected. Each later one finds 0xA5 in every byte, so an
    output that nobody wrote shows. Raises AssertionError with the replay, output and element.
    """
    run()
    want = [output.clone() for output in outputs]
    for replay in range(replays):
        for output in outputs:
            poison(output)
        run()
        for idx, (output, expected) in enumerate(zip(outputs, want, strict=True)):
            assert_same_bytes(output, expected, f"replay {replay}, output {idx}")


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Raise AssertionError where dtype, shape or any byte differs; NaNs are compared as bytes."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(
            f"{what}: got {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
        )
    differs = (bytes_of(got) != bytes_of(want)).any(-1)
    if differs.any():
        idx = int(differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, first at flat "
            f"index {idx}: got {got.reshape(-1)[idx].item()!r}, expected "
            f"{want.reshape(-1)[idx].item()!r}"
        )


def poison(output: torch.Tensor) -> None:
    """Write 0xA5 into every byte of a tensor's elements."""
    for dim, stride in enumerate(output.stride()):
        if stride == 0:  # an expanded dimension is one place in memory
            output = output.narrow(dim, 0, min(1, output.shape[dim]))
    element = torch.full((output.dtype.itemsize,), _POISON, dtype=torch.uint8)
    output.copy_(element.view(output.dtype)[0].to(output.device))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes as [elements, bytes of one], in row-major order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).view(tensor.numel(), tensor.dtype.itemsize)

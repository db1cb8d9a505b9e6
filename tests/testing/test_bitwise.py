"""Equality of bytes: what the helper must and must not let pass."""

import pytest
import torch

from graphseed.testing import assert_bitwise
from graphseed.testing.bitwise import assert_same_bytes, poison


def test_a_run_that_writes_the_same_bytes_passes() -> None:
    source, out = torch.randn(3, 4), torch.empty(3, 4)
    assert_bitwise(lambda: out.copy_(source), [out])


def test_an_output_that_only_the_first_run_writes_is_seen() -> None:
    out = torch.zeros(4)
    runs = iter([lambda: out.fill_(1.0)])
    with pytest.raises(AssertionError, match="replay 0, output 0: 4 of 4 elements differ"):
        assert_bitwise(lambda: next(runs, lambda: None)(), [out])


def test_one_element_that_is_not_written_is_named() -> None:
    out = torch.zeros(4)
    first = iter([4])
    with pytest.raises(AssertionError, match="1 of 4 elements differ, first at flat index 3"):
        assert_bitwise(lambda: out[: next(first, 3)].fill_(1.0), [out])


def test_a_run_that_differs_only_later_is_seen() -> None:
    out, count = torch.zeros(1), iter(range(9))
    with pytest.raises(AssertionError, match="replay 3"):
        assert_bitwise(lambda: out.fill_(float(next(count) >= 4)), [out])


def test_zero_and_minus_zero_are_different_bytes() -> None:
    with pytest.raises(AssertionError, match="element"):
        assert_same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_equal_nans_are_equal_bytes() -> None:
    assert_same_bytes(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_a_different_dtype_is_a_difference() -> None:
    with pytest.raises(AssertionError, match="expected torch.int32"):
        assert_same_bytes(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_poison_reaches_strided_and_scalar_tensors_and_nothing_beside_them(
    dtype: torch.dtype,
) -> None:
    base = torch.zeros(4, 4, dtype=dtype)
    poison(base[:, 1])
    raw = base.view(torch.uint8).view(4, 4, dtype.itemsize)
    assert (raw[:, 1] == 0xA5).all()
    assert (raw[:, [0, 2, 3]] == 0).all()
    scalar = torch.zeros((), dtype=dtype)
    poison(scalar)
    assert (scalar.reshape(1).view(torch.uint8) == 0xA5).all()

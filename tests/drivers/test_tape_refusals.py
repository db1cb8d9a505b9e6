"""What a tape refuses to record, with which reason, and that nothing is left of the attempt."""

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
import torch.nn.functional as F

from graphseed.capture.errors import CannotCapture, Reason
from tests.drivers.replaying import captured, check_replays, open_arena

X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("graphseed_test", "FRAGMENT")
    yield library
    library._destroy()


def _caught(work: Callable[[], object]) -> Callable[[], object]:
    def careful() -> object:
        try:
            return work()
        except Exception:
            return X + 1

    return careful


REFUSALS = [
    ("item", lambda: (X + 1).sum().item(), Reason.HOST_SYNC),
    ("bool", lambda: X if (X + 1).sum() > 0 else X + 1, Reason.HOST_SYNC),
    ("tolist of a real tensor", lambda: X * X.tolist()[0][1], Reason.HOST_SYNC),
    ("numpy of a real tensor", lambda: X * float(X.numpy()[0, 1]), Reason.HOST_SYNC),
    ("numpy array of a real tensor", lambda: X * numpy.asarray(X)[0, 1].item(), Reason.HOST_SYNC),
    ("tensor of a real tensor", lambda: torch.tensor(X) + 1, Reason.HOST_SYNC),
    ("tensor of a list of tensors", lambda: torch.tensor([X[0, 0], 1.0]), Reason.HOST_SYNC),
    ("nonzero", lambda: (X + 1).nonzero(), Reason.HOST_SYNC),
    ("boolean index", lambda: X[X > 2], Reason.HOST_SYNC),
    ("unique", lambda: torch.unique(X), Reason.HOST_SYNC),
    ("equal", lambda: X + 1 if torch.equal(X, X + 0) else X, Reason.HOST_SYNC),
    ("repeat_interleave", lambda: X[0].repeat_interleave(X[0].long()), Reason.HOST_SYNC),
    ("rand", lambda: X + torch.rand(3, 4), Reason.RANDOM),
    ("dropout", lambda: F.dropout(X, 0.5, training=True), Reason.RANDOM),
    ("multinomial", lambda: torch.multinomial(X + 1, 2), Reason.RANDOM),
    ("randn_like", lambda: torch.randn_like(X), Reason.RANDOM),
    ("normal_", lambda: torch.empty(3).normal_(), Reason.RANDOM),
    ("sparse", lambda: X.to_sparse(), Reason.UNSUPPORTED_NODE),
    ("resized", lambda: torch.add(X, 1, out=torch.empty(0)), Reason.UNSUPPORTED_NODE),
    ("resize_", lambda: (X + 1).resize_(40), Reason.UNSUPPORTED_NODE),
    ("own view changed", lambda: X.clone().unsqueeze_(0) + X.t_(), Reason.UNSUPPORTED_NODE),
    ("conjugated", lambda: torch.complex(X, X).conj() + 1, Reason.UNSUPPORTED_NODE),
    ("another device", lambda: (X + 1).to("meta"), Reason.HOST_MEMORY),
    ("made on another device", lambda: torch.ones(3, device="meta"), Reason.UNSUPPORTED_NODE),
    ("nothing", lambda: None, Reason.EMPTY_GRAPH),
    ("views alone", lambda: X.view(4, 3).t(), Reason.EMPTY_GRAPH),
    ("unseen work alone", lambda: [X + 1, None][1], Reason.EMPTY_GRAPH),
    ("shapes that do not fit", lambda: X @ X, Reason.WORK_RAISED),
    ("an error of the step", lambda: {}["missing"], Reason.WORK_RAISED),
    ("not implemented by the step", lambda: torch.nn.Module()(X), Reason.WORK_RAISED),
]


@pytest.mark.parametrize(
    ("work", "reason"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_what_cannot_be_captured_is_refused_with_its_reason(
    work: Callable[[], object], reason: Reason
) -> None:
    before = X.clone()
    with pytest.raises(CannotCapture) as refused:
        open_arena().capture(work)
    assert refused.value.reason is reason, refused.value
    assert refused.value.detail
    assert torch.equal(X, before) and X.shape == (3, 4)
    check_replays(lambda: X * 2)  # everything works as before


@pytest.mark.parametrize(
    ("work", "reason"),
    [r[1:] for r in REFUSALS if r[2] in (Reason.HOST_SYNC, Reason.RANDOM)],
    ids=[r[0] for r in REFUSALS if r[2] in (Reason.HOST_SYNC, Reason.RANDOM)],
)
def test_a_step_cannot_catch_a_refusal_and_go_on(
    work: Callable[[], object], reason: Reason
) -> None:
    with pytest.raises(CannotCapture) as refused:
        open_arena().capture(_caught(work))
    assert refused.value.reason is reason


def test_a_refusal_that_the_step_turns_into_another_error_keeps_its_reason() -> None:
    def work() -> None:
        try:
            X.sum().item()
        except Exception as error:
            raise ValueError("could not read the sum") from error

    with pytest.raises(CannotCapture) as refused:
        open_arena().capture(work)
    assert refused.value.reason is Reason.HOST_SYNC


def test_an_interrupt_after_a_caught_refusal_still_passes_through() -> None:
    def work() -> None:
        _caught(lambda: X.sum().item())()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_arena().capture(work)


def test_a_refusal_says_what_the_step_raised() -> None:
    def work() -> None:
        raise ValueError("seven is too many\nsecond line")

    with pytest.raises(CannotCapture, match="the step raised: ValueError: seven is too many$"):
        open_arena().capture(work)


def test_a_refusal_keeps_no_tensor_of_the_step_alive() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        hidden = X + 1
        made.append(weakref.ref(hidden))
        raise RuntimeError("the step failed")

    with pytest.raises(CannotCapture) as refused:
        open_arena().capture(work)
    gc.collect()
    assert made[0]() is None
    assert refused.value.__context__ is None and refused.value.__cause__ is None


def test_an_interrupt_passes_through_a_capture() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_arena().capture(work)
    check_replays(lambda: X * 2)


def test_a_fake_kernel_that_returns_its_input_is_refused(library: torch.library.Library) -> None:
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", lambda x: x, "Meta")
    with pytest.raises(CannotCapture, match=r"unsupported node: the fake kernel of .*twice"):
        open_arena().capture(lambda: torch.ops.graphseed_test.twice(X))


def test_an_operator_without_a_fake_kernel_is_refused(library: torch.library.Library) -> None:
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda x: x * 3, "CPU")
    with pytest.raises(CannotCapture) as refused:
        open_arena().capture(lambda: torch.ops.graphseed_test.thrice(X))
    assert refused.value.reason is Reason.UNSUPPORTED_NODE


def test_a_tensor_left_over_from_another_recording_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        if not kept:
            kept.append(X + 1)
        return kept[0] * 2

    captured(work)
    with pytest.raises(CannotCapture, match="of another recording") as refused:
        open_arena().capture(work)
    assert refused.value.reason is Reason.UNSUPPORTED_NODE


def test_attention_without_dropout_is_not_random_and_with_dropout_it_is() -> None:
    q = torch.randn(1, 2, 8, 16)
    check_replays(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    with pytest.raises(CannotCapture) as refused:
        open_arena().capture(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert refused.value.reason is Reason.RANDOM

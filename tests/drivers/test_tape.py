"""What a tape records, what it leaves out, and where its results lie."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from graphseed.capture.identity import FirstNode
from graphseed.drivers.recorder import record
from tests.drivers.replaying import captured, check_replays, open_arena

X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("graphseed_test", "FRAGMENT")
    yield library
    library._destroy()


def node_names(work: Callable[[], object]) -> list[str]:
    return [str(node.op) for node in record(work).nodes]


# ---- what is recorded


def test_the_first_node_is_the_first_operation_that_does_work() -> None:
    weight, ids = torch.randn(10, 4), torch.tensor([[1, 2, 3]], dtype=torch.int32)
    arena = open_arena()
    definition = arena.capture(lambda: F.embedding(ids.view(3)[:2].view(1, 2), weight) * 2)
    assert definition.first_node == FirstNode("aten.embedding", (1, 2, 4), "float32")
    assert definition.root == "aten.embedding.default"
    assert definition.num_nodes == 2


def test_the_first_node_of_a_write_in_place_is_what_it_writes() -> None:
    state = torch.zeros(2, 3, dtype=torch.bfloat16)
    tape = record(lambda: torch._foreach_add_([state], 1))
    assert tape.first_node == FirstNode("aten._foreach_add_", (2, 3), "bfloat16")


def test_views_and_allocations_are_no_nodes() -> None:
    def work() -> torch.Tensor:
        out = torch.empty(4, 3)
        out.copy_(X.view(4, 3).t().reshape(3, 4).t().unsqueeze(0).squeeze(0))
        return out.view(-1)[1:].unflatten(0, (11, 1))

    assert node_names(work) == ["aten.copy_.default"]
    check_replays(work)


def test_work_that_nobody_sees_is_left_out() -> None:
    def work() -> torch.Tensor:
        unseen = X @ X.t()
        unseen.add_(1)
        torch.empty(3).fill_(2)
        return X + 1

    assert node_names(work) == ["aten.add.Tensor"]


def test_a_write_to_memory_that_is_read_later_is_kept_with_its_sources() -> None:
    def work() -> torch.Tensor:
        scratch = torch.empty(3, 4)
        scratch[1:].copy_(X[1:] * 2)
        scratch[:1].copy_(X[:1])
        return scratch.sum(0)

    assert len(node_names(work)) == 4
    check_replays(work)


def test_an_operator_without_results_and_writes_is_kept_for_its_effect(
    library: torch.library.Library,
) -> None:
    seen: list[float] = []
    library.define("look(Tensor x) -> ()")
    library.impl("look", lambda x: seen.append(float(x.sum())), "CPU")
    library.impl("look", lambda x: None, "Meta")
    arena, executable = captured(lambda: torch.ops.graphseed_test.look(X + 1))
    assert seen == []
    arena.launch(executable)
    assert seen == [float((X + 1).sum())]


def test_the_answers_of_a_step_keep_their_structure() -> None:
    arena, executable = captured(lambda: {"a": [X + 1, (None, 3)], "b": X})
    arena.launch(executable)
    result = executable.result
    assert isinstance(result, dict) and result["a"][1] == (None, 3)
    assert torch.equal(result["a"][0], X + 1)
    assert result["b"].data_ptr() == X.data_ptr()


# ---- nothing real changes (I1)


def test_capture_changes_no_byte_and_no_version_of_what_the_step_writes() -> None:
    state, before, version = X.clone(), X.clone(), X.clone()._version
    state_view = state[1:]

    def work() -> torch.Tensor:
        state_view.add_(1)
        state.index_copy_(0, torch.tensor([0]), X[:1] * 3)
        torch.add(X, 1, out=state)
        return state.t().contiguous()

    captured(work)
    assert torch.equal(state, before) and state._version == version
    check_replays(work, [state])


def test_a_tensor_that_is_updated_in_place_stays_the_callers_own() -> None:
    module = torch.nn.Module()
    module.register_buffer("count", torch.zeros(2))
    own = module.count

    def work() -> torch.Tensor:
        module.count += 1
        return module.count * 2

    captured(work)
    assert module.count is own and torch.equal(own, torch.zeros(2))
    check_replays(work, [own])


def test_tensors_made_in_inference_mode_can_be_captured_and_written() -> None:
    with torch.inference_mode():
        weight, state = torch.randn(4, 4), torch.zeros(3, 4)

        def work() -> torch.Tensor:
            state.copy_(F.linear(X, weight))
            return F.scaled_dot_product_attention(state[None], state[None], state[None])

        arena, executable = captured(work)
        assert not state.any()
        want = work().clone()
        state.zero_()
        arena.launch(executable)
        assert torch.equal(executable.result, want) and torch.equal(state, F.linear(X, weight))
        assert torch.is_inference_mode_enabled()
    arena.launch(executable)  # outside it as well
    assert torch.equal(executable.result, want)


def test_autograd_state_is_left_as_it_was() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    arena, executable = captured(lambda: X @ weight)
    assert torch.is_grad_enabled()
    arena.launch(executable)
    assert torch.is_grad_enabled() and weight.grad is None and weight._version == 0
    assert not executable.result.requires_grad
    assert torch.equal(executable.result, (X @ weight).detach())


# ---- factories


def test_a_factory_that_nobody_writes_to_is_made_once() -> None:
    def work() -> torch.Tensor:
        mask = torch.arange(4) + torch.tensor([1, 0, 2, 5])
        return torch.where(mask > 2, X, torch.zeros_like(X)) * torch.full((), 2.0)

    executable = check_replays(work)
    assert executable.num_nodes == 2  # where and mul
    assert len(node_names(work)) > 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4),
        lambda: torch.ones_like(X),
        lambda: X.new_full((3, 4), 2.5),
        lambda: torch.full((3, 4), 7.0),
        lambda: torch.scalar_tensor(3.0).repeat(3, 4),
        lambda: torch.arange(12.0).view(3, 4),
        lambda: torch.eye(3, 4),
        lambda: torch.tensor([[1.0] * 4] * 3),
        lambda: torch.linspace(0, 1, 12).view(3, 4),
    ],
)
@pytest.mark.parametrize("through", ["itself", "a view"])
def test_a_factory_that_is_written_to_is_made_anew_at_every_launch(
    make: Callable[[], torch.Tensor], through: str
) -> None:
    def work() -> torch.Tensor:
        made = make()
        (made if through == "itself" else made.view(-1)[2:].t()).add_(1)
        return made * X

    check_replays(work)


def test_a_constant_read_before_it_is_written_is_made_anew_too() -> None:
    def work() -> torch.Tensor:
        ones = torch.ones(3, 4)
        shifted = ones + 1
        ones.mul_(5)
        return shifted * X + ones

    check_replays(work)


def test_a_factory_that_is_returned_may_be_overwritten_by_the_caller() -> None:
    check_replays(lambda: (torch.arange(5), torch.zeros(3)[1:], X + 1))


# ---- memory


def test_buffers_are_shared_by_what_does_not_live_together() -> None:
    big = torch.randn(64, 64)

    def work() -> torch.Tensor:
        x = big
        for _ in range(20):
            x = x * 2 + 1
        return x

    executable = check_replays(work)
    assert executable.num_bytes <= 3 * big.nbytes


def test_a_view_keeps_its_memory_while_it_lives() -> None:
    def work() -> torch.Tensor:
        early = (X * 2).view(-1)[3:7]
        x = X + 1
        for _ in range(5):
            x = x * 1.5
        return x.sum() + early

    check_replays(work)


def test_an_unwritten_allocation_that_is_returned_has_memory() -> None:
    _, executable = captured(lambda: (torch.empty(3, 4), X + 1))
    assert executable.result[0].shape == (3, 4)
    assert executable.num_bytes >= 2 * X.nbytes


def test_a_mutating_operator_works_on_fixed_buffers(library: torch.library.Library) -> None:
    library.define("attend(Tensor q, Tensor k, Tensor(a!) cache, Tensor(b!) out, int[] plan) -> ()")

    def attend(
        q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, plan: list[int]
    ) -> None:
        cache[plan[0] : plan[0] + len(k)] = k
        out.copy_(q @ cache.t() @ cache)

    library.impl("attend", attend, "CPU")
    cache, weight, x = torch.zeros(8, 4), torch.randn(4, 4), torch.zeros(3, 4)

    def work() -> torch.Tensor:
        hidden = x
        for layer in range(3):
            out = torch.empty_like(hidden)
            torch.ops.graphseed_test.attend(hidden @ weight, hidden, cache, out, [layer])
            hidden = hidden + out
        return hidden

    check_replays(work, [cache, x], lambda launch: x.copy_(torch.randn(3, 4)))


def test_int32_indices_embed_and_gather() -> None:
    weight = torch.randn(10, 4).bfloat16()
    ids = torch.tensor([[1, 3, 5]], dtype=torch.int32)
    renew = lambda launch: ids.add_(1).remainder_(10)  # noqa: E731
    check_replays(lambda: F.embedding(ids, weight), [ids], renew)
    check_replays(lambda: F.embedding(ids.t().contiguous().t(), weight), [ids], renew)
    check_replays(lambda: F.embedding(weight[:, :2].argmax(1).view(5, 2).t(), weight))
    check_replays(lambda: weight.index_select(0, ids[0]), [ids], renew)
    check_replays(lambda: F.embedding(ids[:, :0], weight))


def test_operations_with_several_results() -> None:
    values = torch.randn(4, 6)
    renew = lambda launch: values.copy_(torch.randn(4, 6))  # noqa: E731
    check_replays(lambda: torch.topk(values, 3), [values], renew)
    check_replays(lambda: torch.topk(values * 2, 3)[1] + 1, [values], renew)
    check_replays(lambda: torch.sort(values, dim=0, stable=True), [values], renew)
    check_replays(lambda: values.max(1), [values], renew)
    check_replays(lambda: (values * 1).split([1, 2, 3], 1), [values], renew)
    check_replays(lambda: torch.split_with_sizes_copy(values, [2, 4], 1), [values], renew)
    check_replays(lambda: torch.unbind_copy(values), [values], renew)
    check_replays(lambda: torch.unbind_copy(values[:1]), [values], renew)
    check_replays(
        lambda: torch.native_layer_norm(values, [6], None, None, 1e-5)[0], [values], renew
    )
    check_replays(lambda: torch.aminmax(values, dim=1), [values], renew)


# ---- threads


def test_one_thread_serves_directly_while_another_captures() -> None:
    weight = torch.randn(32, 32)

    def work() -> torch.Tensor:
        x = weight
        for _ in range(10):
            x = (x @ weight).softmax(-1)
        return x

    want, wrong, stop = work(), [], threading.Event()

    def serve() -> None:
        while not stop.is_set():
            got = work()
            if type(got) is not torch.Tensor or not torch.equal(got, want):
                wrong.append(got)

    server = threading.Thread(target=serve)
    server.start()
    try:
        for _ in range(20):
            arena, executable = captured(work)
            arena.launch(executable)
            assert torch.equal(executable.result, want)
    finally:
        stop.set()
        server.join()
    assert not wrong


def test_views_of_one_static_buffer_are_read_and_written_where_they_lie():
    """The fake storage of a buffer grows with each view of it: that is no resize."""
    buffer = torch.arange(400.0)
    outputs = [buffer[:64], buffer[200:264], buffer[300:]]

    def work():
        for output in outputs:
            output.add_(buffer[100:101])
            output.mul_(2)

    check_replays(work, [buffer])

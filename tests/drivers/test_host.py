"""The host driver keeps the contract of a driver: arenas, executables, marks, and what it says."""

import time
from dataclasses import dataclass

import pytest
import torch

from graphseed.capture.driver import Driver
from graphseed.capture.errors import CannotCapture, Closed, Reason
from graphseed.capture.identity import FirstNode, Namespace
from graphseed.drivers import host
from graphseed.drivers.host import HostDriver
from graphseed.testing import assert_bitwise
from tests.drivers.replaying import captured, open_arena

X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def test_replays_into_poisoned_outputs_are_bitwise_equal_to_the_direct_run() -> None:
    weight, logits = torch.randn(4, 4), torch.empty(3, 4)

    def step() -> None:
        logits.copy_((X @ weight).softmax(-1))

    arena, executable = captured(step)
    runs = iter([step])
    assert_bitwise(lambda: next(runs, lambda: arena.launch(executable))(), [logits])


def test_the_result_stays_at_one_address_and_follows_the_inputs() -> None:
    x = X.clone()
    arena, executable = captured(lambda: x * 2)
    arena.launch(executable)
    result = executable.result
    address = result.data_ptr()
    x.add_(1)
    arena.launch(executable)
    assert executable.result is result and result.data_ptr() == address
    assert torch.equal(result, (X + 1) * 2)


def test_one_definition_gives_executables_that_do_not_share_memory() -> None:
    arena = open_arena()
    definition = arena.capture(lambda: X * 2 + 1)
    first, second = arena.instantiate(definition), arena.instantiate(definition)
    arena.launch(first)
    second.result.zero_()
    assert torch.equal(first.result, X * 2 + 1)


def test_an_executable_keeps_what_it_reads_alive_until_it_is_released() -> None:
    weights = [torch.full((4, 4), 2.0)]
    arena, executable = captured(lambda: X @ weights[0])
    want = X @ weights[0]
    assert any(external is weights[0] for external in executable.externals)
    weights.clear()
    junk = [torch.full((4, 4), 9.0) for _ in range(64)]
    arena.launch(executable)
    assert torch.equal(executable.result, want) and len(junk) == 64
    arena.release(executable)
    assert executable.externals == ()


def test_bytes_are_those_of_its_buffers_and_come_back_when_the_arena_closes() -> None:
    arena = open_arena()
    first = arena.instantiate(arena.capture(lambda: X * 2))
    second = arena.instantiate(arena.capture(lambda: (X.repeat(8, 8) + 1).sum()))
    third = arena.instantiate(arena.capture(lambda: X + 1))
    assert first.num_bytes == 64 and second.num_bytes > 32 * 24 * 4
    arena.release(third)
    assert arena.close() == first.num_bytes + second.num_bytes
    assert arena.close() == 0


def test_everything_but_closing_is_refused_after_close() -> None:
    arena, executable = captured(lambda: X * 2)
    definition = arena.capture(lambda: X * 3)
    arena.close()
    for use in (
        lambda: arena.capture(lambda: X * 2),
        lambda: arena.instantiate(definition),
        lambda: arena.launch(executable),
        lambda: executable.launch(),
        lambda: executable.result,
    ):
        with pytest.raises(Closed):
            use()
    arena.release(executable)  # nothing left to give up


def test_a_released_executable_cannot_be_launched_and_may_be_released_twice() -> None:
    arena, executable = captured(lambda: X * 2)
    arena.release(executable)
    arena.release(executable)
    assert executable.is_released
    with pytest.raises(Closed, match="was released"):
        arena.launch(executable)


def test_an_arena_takes_its_own_handles_only() -> None:
    arena, other = open_arena(), open_arena()
    executable = arena.instantiate(arena.capture(lambda: X * 2))
    with pytest.raises(ValueError, match="did not instantiate"):
        other.launch(executable)
    with pytest.raises(ValueError, match="did not instantiate"):
        other.release(executable)
    arena.launch(executable)

    @dataclass
    class Foreign:
        num_nodes: int = 1
        first_node: FirstNode | None = None
        root: str = "kernel"

    with pytest.raises(TypeError, match="captured by the host driver, got a Foreign"):
        arena.instantiate(Foreign())


def test_arenas_of_two_namespaces_do_not_share_memory() -> None:
    driver = HostDriver()
    prompt, decode = driver.open(Namespace.PROMPT), driver.open(Namespace.DECODE)
    mine = prompt.instantiate(prompt.capture(lambda: X * 2))
    theirs = decode.instantiate(decode.capture(lambda: X * 3))
    decode.launch(theirs)
    assert prompt.close() == mine.num_bytes
    decode.launch(theirs)
    assert torch.equal(theirs.result, X * 3)


def test_an_error_of_a_launch_comes_through_and_leaves_the_executable_usable() -> None:
    weight, ids = torch.randn(5, 2), torch.tensor([1, 2])
    arena, executable = captured(lambda: torch.nn.functional.embedding(ids, weight) + 1)
    ids.fill_(99)
    with pytest.raises((IndexError, RuntimeError)):
        arena.launch(executable)
    ids.fill_(3)
    arena.launch(executable)
    assert torch.equal(executable.result, weight[[3, 3]] + 1)


def test_memory_that_cannot_be_had_is_a_transient_refusal() -> None:
    arena = open_arena()
    definition = arena.capture(lambda: X.view(-1)[:1].expand(1 << 50).contiguous() + 1)
    with pytest.raises(CannotCapture) as refused:
        arena.instantiate(definition)
    assert refused.value.reason is Reason.OUT_OF_MEMORY and refused.value.reason.is_transient
    assert arena.close() == 0


def test_a_constant_that_cannot_be_made_is_refused() -> None:
    arena = open_arena()
    definition = arena.capture(
        lambda: torch.arange(3).index_select(0, torch.tensor([7])) + X[0, :1]
    )
    with pytest.raises(CannotCapture, match="cannot be laid out") as refused:
        arena.instantiate(definition)
    assert refused.value.reason is Reason.UNSUPPORTED_NODE


def test_a_mark_is_done_at_once_and_tells_the_time_between_two() -> None:
    driver: Driver = HostDriver()
    earlier = driver.mark(timed=True)
    time.sleep(0.01)
    later = driver.mark(timed=True)
    later.wait()
    assert earlier.is_done() and later.is_done()
    assert 9.9 <= later.ms_since(earlier) < 1000
    with pytest.raises(ValueError, match="timed=True"):
        later.ms_since(driver.mark())
    with pytest.raises(ValueError, match="timed=True"):
        driver.mark().ms_since(later)


def test_the_driver_describes_the_machine() -> None:
    driver: Driver = HostDriver()
    assert driver.device == "cpu" and driver.num_sms == 1
    assert f"{torch.get_num_threads()} thread" in driver.description
    assert isinstance(driver.computes_bf16_fast, bool)
    assert 1 << 20 < driver.free_bytes() < 1 << 50
    driver.prime("bfloat16")
    driver.synchronize()
    assert not driver.is_lost(RuntimeError("anything"))


def test_a_system_without_proc_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_lines_of", lambda path: [])
    driver = HostDriver()
    assert driver.free_bytes() > 1 << 20
    assert driver.description.split(",")[0]


def test_a_torch_that_cannot_answer_computes_bf16_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert HostDriver().computes_bf16_fast is False

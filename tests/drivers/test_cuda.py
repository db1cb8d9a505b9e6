"""The CUDA driver on a GPU: failed captures, other threads, memory, one launch for each replay."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

from graphseed.capture import CannotCapture, Closed, Namespace, Reason
from graphseed.drivers import UnknownDevice, open_driver

pytestmark = pytest.mark.cuda


@pytest.fixture
def driver():
    driver = open_driver("cuda")
    driver.prime("bfloat16")
    return driver


@pytest.fixture
def arena(driver):
    arena = driver.open(Namespace.PROMPT)
    yield arena
    arena.close()


@pytest.fixture
def x():
    return torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)


def refusal_of(arena, work):
    with pytest.raises(CannotCapture) as caught:
        arena.capture(work)
    return caught.value


def assert_works_as_before(arena, x):
    """The stream, the allocator, the default generator and a next capture."""
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(4, device="cuda")
    out = torch.zeros_like(x)
    executable = arena.instantiate(arena.capture(lambda: out.copy_(x @ x)))
    assert not out.any()
    arena.launch(executable)
    assert torch.equal(out, x @ x)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x if (x > 0).any() else -x,
        lambda x: torch.cuda.synchronize(),
        lambda x: (x * 2).cpu(),
    ],
)
def test_I8_a_host_synchronisation_is_refused_and_repaired(work, arena, x):
    refusal = refusal_of(arena, lambda: work(x))
    assert refusal.reason in (Reason.HOST_SYNC, Reason.HOST_MEMORY)
    assert_works_as_before(arena, x)


def test_I8_a_host_tensor_made_in_the_step_is_refused(arena, x):
    refusal = refusal_of(arena, lambda: x * torch.tensor([1.0, 2.0], device="cuda")[0])
    assert refusal.reason in (Reason.HOST_MEMORY, Reason.HOST_SYNC)
    assert_works_as_before(arena, x)


def test_I8_an_exception_of_the_step_is_refused_with_its_text(arena, x):
    def work():
        y = x @ x
        raise KeyError(f"no layer {y.shape[0]}")

    refusal = refusal_of(arena, work)
    assert refusal.reason is Reason.WORK_RAISED and "no layer 256" in refusal.detail
    assert_works_as_before(arena, x)


def test_an_interrupt_in_a_capture_passes_through_and_leaves_it_ended(arena, x):
    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arena.capture(work)
    assert_works_as_before(arena, x)


def test_I8_an_empty_step_is_refused(arena, x):
    assert refusal_of(arena, lambda: None).reason is Reason.EMPTY_GRAPH
    assert_works_as_before(arena, x)


def test_I8_out_of_memory_in_a_capture_is_transient_and_returns_every_byte(driver, arena, x):
    before = torch.cuda.memory_reserved()
    refusal = refusal_of(arena, lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))
    assert refusal.reason is Reason.OUT_OF_MEMORY and refusal.reason.is_transient
    assert torch.cuda.memory_reserved() == before
    assert_works_as_before(arena, x)


def test_I8_a_memory_floor_refuses_before_anything_is_recorded(driver, arena, x):
    driver.memory_floor_bytes = 1 << 50
    ran = []
    assert refusal_of(arena, lambda: ran.append(1)).reason is Reason.MEMORY_FLOOR
    assert not ran
    driver.memory_floor_bytes = 0
    assert_works_as_before(arena, x)


def test_memory_of_failed_captures_comes_back(driver, x):
    def work():
        big = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        return big.sum().item()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        arena = driver.open(Namespace.PROMPT)
        refusal_of(arena, work)
        arena.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_I8_a_device_wide_wait_of_another_thread_is_interference_and_transient(arena, x):
    stop = threading.Event()
    entered = threading.Event()

    def meddle():
        while not stop.is_set():
            entered.set()
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return  # this thread is hurt too: the wait is not allowed beside a capture

    thread = threading.Thread(target=meddle)

    def work():
        y = x
        thread.start()
        entered.wait()
        for _ in range(200):
            y = y @ x
        thread.join(timeout=0.2)
        return y @ x

    refusal = refusal_of(arena, work)
    stop.set()
    thread.join()
    assert refusal.reason.is_transient, refusal
    assert_works_as_before(arena, x)


def test_another_thread_may_allocate_and_compute_beside_a_capture(arena, x):
    stop, errors = threading.Event(), []

    def serve():
        try:
            while not stop.is_set():
                y = torch.randn(64, 64, device="cuda")
                (y @ y).sum().item()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    out = torch.zeros_like(x)
    for _ in range(10):
        executable = arena.instantiate(arena.capture(lambda: out.copy_(x @ x)))
        arena.launch(executable)
        assert torch.equal(out, x @ x)
    stop.set()
    thread.join()
    assert not errors


UNPRIMED = """
import torch
from graphseed.capture import Namespace
from graphseed.drivers import open_driver
driver = open_driver("cuda")
x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
out = torch.zeros_like(x)
arena = driver.open(Namespace.PROMPT)
executable = arena.instantiate(arena.capture(lambda: out.copy_(x @ x)))
assert not out.any(), "the capture ran"
arena.launch(executable)
assert torch.equal(out, x @ x)
torch.rand(4, device="cuda")
print("captured before any library was initialised")
"""


def test_I2_a_capture_before_any_library_was_initialised_succeeds():
    done = subprocess.run(
        [sys.executable, "-c", UNPRIMED], capture_output=True, text=True, timeout=200
    )
    assert "captured before any library" in done.stdout, done.stderr


def test_I5_bytes_held_come_back_when_the_arena_closes(driver, x):
    arena = driver.open(Namespace.PROMPT)
    before = torch.cuda.memory_reserved()

    def work():
        return (torch.cat([x] * 256) * 2).sum(0)

    executable = arena.instantiate(arena.capture(work))
    arena.launch(executable)
    assert executable.num_bytes >= 32 << 20
    assert arena.close() >= 32 << 20
    assert torch.cuda.memory_reserved() <= before


def test_I4_a_closed_prompt_arena_leaves_a_decode_graph_right(driver, x):
    out = torch.zeros_like(x)
    prompt, decode = driver.open(Namespace.PROMPT), driver.open(Namespace.DECODE)
    prompt.launch(prompt.instantiate(prompt.capture(lambda: out.copy_(x @ x @ x))))
    executable = decode.instantiate(decode.capture(lambda: out.copy_(x @ x + 1)))
    prompt.close()
    junk = [torch.full((16 << 20,), float("nan"), device="cuda") for _ in range(4)]
    want = x @ x + 1
    for _ in range(50):
        out.fill_(7)
        decode.launch(executable)
        assert torch.equal(out, want)
    decode.close()
    del junk


def test_a_released_executable_cannot_be_launched_through_a_closed_arena(driver, x):
    from graphseed.capture import LaunchFailed

    arena = driver.open(Namespace.PROMPT)
    executable = arena.instantiate(arena.capture(lambda: x @ x))
    arena.close()
    arena.close()
    with pytest.raises(LaunchFailed):
        arena.launch(executable)
    with pytest.raises(Closed):
        arena.capture(lambda: x @ x)


def test_a_result_lives_in_the_arena_and_is_filled_by_each_launch(arena, x):
    executable = arena.instantiate(arena.capture(lambda: x * 3))
    arena.launch(executable)
    assert torch.equal(executable.result, x * 3)
    x.mul_(-1)
    arena.launch(executable)
    assert torch.equal(executable.result, x * 3)


def test_a_release_of_one_executable_leaves_the_others_right(arena, x):
    out = torch.zeros_like(x)
    first = arena.instantiate(arena.capture(lambda: out.copy_(x @ x)))
    second = arena.instantiate(arena.capture(lambda: out.copy_(x @ x + 2)))
    arena.launch(first)
    arena.release(first)
    for _ in range(10):
        out.zero_()
        arena.launch(second)
        assert torch.equal(out, x @ x + 2)


def test_root_and_nodes_are_the_same_at_each_capture_of_one_step(arena, x):
    one, two = (arena.capture(lambda: (x @ x).relu() + 1) for _ in range(2))
    assert one.num_nodes == two.num_nodes >= 3
    assert one.root == two.root != ""


def test_a_mark_says_when_it_is_done_and_how_long_it_took(driver, x):
    begin = driver.mark(timed=True)
    for _ in range(50):
        x @ x
    end = driver.mark(timed=True)
    end.wait()
    assert begin.is_done() and end.is_done()
    assert end.ms_since(begin) > 0


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UnknownDevice, match="cuda:99"):
        open_driver("cuda:99")


POISONED = """
import torch
from graphseed.capture import DeviceLost
from graphseed.drivers import open_driver
driver = open_driver("cuda")
driver.prime("float32")
x = torch.zeros(4, device="cuda")
try:
    x[torch.tensor([1 << 20], device="cuda")]
    driver.synchronize()
except DeviceLost as error:
    print("lost:", error)
"""


def test_I3_an_error_that_poisons_the_context_is_one_clear_message():
    done = subprocess.run(
        [sys.executable, "-c", POISONED], capture_output=True, text=True, timeout=200
    )
    assert "lost: the CUDA context is lost" in done.stdout, done.stderr

"""What went wrong for others who captured graphs, on our drivers. Each pins a kind of fault."""

import gc

import pytest
import torch

from graphseed.capture import FirstNode, GraphCache, GraphIdentity, Namespace, Policy, Selection
from graphseed.capture.events import Refused
from graphseed.drivers import open_driver


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def driver(request):
    driver = open_driver(request.param)
    driver.prime("float32")
    return driver


@pytest.fixture
def cache(driver):
    cache = GraphCache(driver, Selection(Policy.SEED))
    yield cache
    cache.close()


@pytest.fixture
def refusals(cache):
    seen = []
    cache.log.subscribe(lambda event: seen.append(event) if isinstance(event, Refused) else None)
    return seen


def identity_of(driver, operation="aten.mul", **structure):
    first = FirstNode(operation, (8,), "float32")
    return GraphIdentity(Namespace.PROMPT, driver.device, first, tuple(structure.items()))


def test_a_state_that_a_step_updates_is_updated_once_for_each_observation(cache, driver):
    state = torch.zeros(8, device=driver.device)
    x = torch.ones(8, device=driver.device)
    for number in range(1, 6):  # seed, then replays
        cache.run(identity_of(driver), lambda: state.add_(x * 2))
        assert torch.equal(state, 2.0 * number * torch.ones(8, device=driver.device))


def test_a_plain_number_that_reaches_a_kernel_is_part_of_the_identity(cache, driver):
    x = torch.arange(64.0, device=driver.device)
    out = torch.zeros((), device=driver.device)
    for _ in range(3):
        for length in (4, 8, 64):
            identity = identity_of(driver, "aten.sum", length=length)
            cache.run(identity, lambda n=length: out.copy_(x[:n].sum() * 1))
            assert out.item() == x[:length].sum().item()


def test_garbage_that_owns_an_old_graph_does_not_break_a_capture(cache, driver):
    x, out = torch.randn(8, device=driver.device), torch.zeros(8, device=driver.device)

    class Cycle:
        def __init__(self):
            self.me = self
            arena = driver.open(Namespace.DECODE)
            self.graph = arena.instantiate(arena.capture(lambda: out.copy_(x * 5)))
            self.arena = arena

    def work():
        junk = [[index] for index in range(500)]  # collections would happen here
        out.copy_(x * len(junk))

    threshold = gc.get_threshold()
    for number in range(3):
        Cycle()
        gc.set_threshold(1)
        try:
            cache.run(identity_of(driver, number=number), work)
        finally:
            gc.set_threshold(*threshold)
        for _ in range(2):
            out.zero_()
            cache.run(identity_of(driver, number=number), work)
            assert torch.equal(out, x * 500)
    assert cache.spaces[Namespace.PROMPT].num_held == 3


def test_random_numbers_are_what_the_direct_path_would_have_drawn_or_refused(
    cache, driver, refusals
):
    out = torch.zeros(8, device=driver.device)

    def draw():
        out.copy_(torch.rand(8, device=driver.device) * 1)
        return out.clone()

    torch.manual_seed(3)
    want = [draw() for _ in range(4)]
    torch.manual_seed(3)
    got = []
    for _ in range(4):
        cache.run(identity_of(driver, "aten.rand"), draw)
        got.append(out.clone())
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    if driver.device == "cpu":
        assert [event.reason.value for event in refusals] == ["random numbers"]


def test_a_buffer_that_grew_is_not_replayed_at_its_old_address(cache, driver):
    from graphseed.capture import Bindings

    out = torch.zeros(8, device=driver.device)
    buffer = torch.ones(8, device=driver.device)
    identity = identity_of(driver)
    for size in (8, 16, 64):
        buffer = torch.full((size,), float(size), device=driver.device)
        cache.rebind(Bindings((("buffer", buffer.data_ptr()), ("size", size))))
        for _ in range(3):
            cache.run(identity, lambda b=buffer: out.copy_(b[:8] * 2))
            assert torch.equal(out, torch.full((8,), 2.0 * size, device=driver.device))

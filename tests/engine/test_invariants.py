"""The contract, I1 to I12, on real models and drivers."""

import copy
import logging

import pytest
import torch

from graphseed.capture import (
    Bindings,
    FirstNode,
    GraphCache,
    GraphIdentity,
    LogLines,
    Namespace,
    Policy,
    Reason,
    Selection,
)
from graphseed.capture.events import Alarm, Direct, Refused, Released, Replayed, Seeded, Stale, Why
from graphseed.testing import assert_bitwise
from tests.engine.conftest import answer, driver_of, prompt_of


def of(events, kind, namespace=Namespace.PROMPT):
    return [e for e in events if isinstance(e, kind) and e.namespace is namespace]


def identity_of(driver, name="step", namespace=Namespace.PROMPT):
    first = FirstNode("aten.mul", (8, 8), "float32")
    return GraphIdentity(namespace, driver.device, first, (("name", name), ("batch", 1)))


@pytest.fixture
def driver(device):
    driver = driver_of(device)
    driver.prime("float32")
    return driver


@pytest.fixture
def cache(driver):
    cache = GraphCache(driver, Selection(Policy.SEED))
    yield cache
    cache.close()


@pytest.fixture
def buffers(driver):
    """x is read, y is written: static buffers of a step."""
    return torch.randn(8, 8, device=driver.device), torch.zeros(8, 8, device=driver.device)


def test_I1_capture_and_instantiate_change_no_memory(driver, buffers):
    x, y = buffers
    before = (x.clone(), y.clone())
    arena = driver.open(Namespace.PROMPT)
    arena.instantiate(arena.capture(lambda: y.copy_((x * 2) @ x)))
    driver.synchronize()
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])
    arena.close()


def test_I2_the_seeding_observation_is_answered_by_the_direct_path(make_engine, events):
    want = answer(make_engine("disabled"), prompt_of(30), new=1)
    events.clear()
    assert answer(make_engine("seed"), prompt_of(30), new=1) == want
    assert [event.why for event in of(events, Direct)] == [Why.SEEDING]
    assert len(of(events, Seeded)) == 1 and not of(events, Replayed)


def test_I3_a_direct_run_that_raises_leaves_the_identity_unseen_and_the_cache_usable(
    cache, driver, buffers
):
    x, y = buffers
    runs = []

    def work():
        runs.append(1)
        y.copy_(x * 3)
        if len(runs) == 2:  # the capture was the first
            raise ValueError("the direct run failed")

    identity = identity_of(driver)
    with pytest.raises(ValueError, match="the direct run failed"):
        cache.run(identity, work)
    assert cache.spaces[Namespace.PROMPT].num_held == 0
    cache.run(identity, work)
    y.zero_()
    cache.run(identity, work)
    assert torch.equal(y, x * 3)
    assert len(runs) == 4  # capture, direct, capture, direct; the last one replayed


def test_I4_releasing_prompt_graphs_leaves_decode_graphs_right(make_engine):
    engine = make_engine("seed")
    prompts = [prompt_of(70, seed) for seed in range(3)]
    want = [answer(make_engine("disabled"), prompt, new=8) for prompt in prompts]
    junk = []
    for prompt, expected in zip(prompts, want, strict=True):
        assert answer(engine, prompt, new=8) == expected
        engine.cache.release(Namespace.PROMPT)
        # What was given back is filled with something else before decode replays again.
        junk.append(torch.full((1 << 20,), float("nan"), device=engine.driver.device))
    assert engine.tally.counts[Namespace.DECODE].seeded == 1


def test_I5_the_first_decode_graph_gives_the_prompt_generation_back(make_engine, events):
    engine = make_engine("seed")
    answer(engine, prompt_of(70), new=1)  # no decode step
    assert not of(events, Released)
    held = engine.cache.spaces[Namespace.PROMPT].num_bytes
    assert held > 0
    answer(engine, prompt_of(70), new=3)
    [released] = of(events, Released)
    assert released.num_entries == 2  # 32 rows and the tail's 16
    assert released.bytes_returned > 0
    assert engine.cache.spaces[Namespace.PROMPT].num_bytes == 0


def test_I6_other_positions_and_other_blocks_are_the_same_identity(make_engine, events):
    engine = make_engine("seed", context_len=256)
    prompt = prompt_of(150)
    want = answer(make_engine("disabled", context_len=256), prompt, new=1)
    engine.pool.take(5)  # so that this prompt lives in other blocks
    events.clear()
    got = answer(engine, prompt, new=1)
    assert got == want
    assert len(of(events, Seeded)) == 1 and len(of(events, Replayed)) == 4


def test_I7_memory_that_moved_is_never_replayed_over(make_engine, events):
    engine, prompt = make_engine("seed"), prompt_of(70)
    answer(engine, prompt, new=4)
    engine.resize(512)
    assert of(events, Stale, Namespace.DECODE)
    reference = make_engine("disabled", context_len=512)
    for _ in range(2):
        assert answer(engine, prompt, new=4) == answer(reference, prompt, new=4)
    assert engine.tally.counts[Namespace.DECODE].seeded == 2


def test_I8_a_host_synchronisation_is_refused_and_answered(cache, driver, buffers):
    x, y = buffers
    seen = []
    cache.log.subscribe(seen.append)

    def work():
        y.copy_(x * float(x.sum().item()))

    for _ in range(3):
        y.zero_()
        cache.run(identity_of(driver), work)
        assert torch.equal(y, x * float(x.sum().item()))
    [refused] = [event for event in seen if isinstance(event, Refused)]
    assert refused.reason is Reason.HOST_SYNC and refused.retry_at is None


def test_I8_after_a_refusal_other_steps_are_captured_and_randomness_works(cache, driver, buffers):
    x, y = buffers
    cache.run(identity_of(driver, "bad"), lambda: y.copy_(x * bool((x > 0).any())))
    torch.rand(4, device=driver.device)
    for _ in range(3):
        y.zero_()
        cache.run(identity_of(driver, "good"), lambda: y.copy_(x * 2))
        assert torch.equal(y, x * 2)
    assert cache.spaces[Namespace.PROMPT].num_held == 1


def test_I9_replays_leave_the_same_bytes_in_poisoned_outputs(cache, driver, buffers):
    x, y = buffers
    identity = identity_of(driver)
    assert_bitwise(lambda: cache.run(identity, lambda: y.copy_((x * 2) @ x + 1)), [y])


def test_I9_a_replay_reads_what_the_static_buffers_hold_now(cache, driver, buffers):
    x, y = buffers
    identity = identity_of(driver)
    for number in range(4):
        x.copy_(torch.randn(8, 8) + number)
        cache.run(identity, lambda: y.copy_((x * 2) @ x))
        assert torch.equal(y, (x * 2) @ x)


def test_I10_the_log_proves_that_executables_were_made_and_replayed(make_engine, caplog):
    engine = make_engine("seed")
    engine.log.subscribe(LogLines())
    with caplog.at_level(logging.INFO, logger="graphseed"):
        answer(engine, prompt_of(100), new=3)
    text = caplog.text
    for line in ("prompt graph instantiated, not launched", "decode graph instantiated",
                 "prompt graph replayed for the first time", "decode graph replayed"):  # fmt: skip
        assert line in text
    lines, no_effect = engine.finish()
    assert "candidates=4 seeded=2 replayed=2 direct=2" in lines[0]
    assert no_effect is None


def test_I10_an_identity_that_holds_an_address_captures_never_hits_and_is_named(
    make_engine, events
):
    def with_address(identity, plan):
        if identity.namespace is not Namespace.PROMPT:
            return identity
        part = plan.parts[0]
        block = int(part.table.ids[part.start // 16])
        structure = (*identity.structure, ("first_kv_block", block * 4096))
        return GraphIdentity(identity.namespace, identity.device, identity.first_node, structure)

    engine = make_engine("seed", num_ubatch=16, context_len=256)
    engine.runner.identity_hook = with_address
    want = answer(make_engine("disabled", num_ubatch=16, context_len=256), prompt_of(200), new=1)
    events.clear()
    assert answer(engine, prompt_of(200), new=1) == want
    assert not of(events, Replayed) and len(of(events, Seeded)) == 13
    [alarm] = of(events, Alarm)
    assert alarm.field == "first_kv_block"


def test_I10_a_selector_without_effect_says_why(make_engine):
    engine = make_engine("seed")
    assert engine.finish()[1] == "test had no effect: no prompt was run"


def test_I11_a_step_leaves_no_host_state_behind(make_engine):
    engine = make_engine("seed", preset="tiny-gemma3")
    module = engine.model.module

    def host_state():
        plain = {
            f"{name}.{key}": copy.copy(value)
            for name, sub in module.named_modules()
            for key, value in vars(sub).items()
            if isinstance(value, bool | int | float | str | tuple | None)
        }
        addresses = {name: t.data_ptr() for name, t in module.named_buffers()}
        addresses |= {name: t.data_ptr() for name, t in module.named_parameters()}
        return plain, addresses, torch.get_rng_state().tolist(), torch.is_grad_enabled()

    before = host_state()
    answer(engine, prompt_of(100), new=3)
    assert host_state() == before


def test_I12_off_captures_no_prompt(make_engine, events):
    answer(make_engine("off"), prompt_of(100), new=3)
    assert not of(events, Seeded) and of(events, Seeded, Namespace.DECODE)


def test_I12_disabled_captures_nothing(make_engine, events):
    answer(make_engine("disabled"), prompt_of(100), new=3)
    assert not of(events, Seeded) and not of(events, Seeded, Namespace.DECODE)


def test_a_shared_namespace_lets_prompt_and_decode_push_each_other_out(make_engine, events):
    from graphseed.capture import Budget

    def shared(identity, plan):
        return GraphIdentity(
            Namespace.PROMPT, identity.device, identity.first_node, identity.structure
        )

    budgets = {namespace: Budget(max_entries=1) for namespace in Namespace}

    def seeds(hook):
        engine = make_engine("resident", budgets=budgets)
        engine.runner.identity_hook = hook
        events.clear()
        for _ in range(4):
            answer(engine, prompt_of(32), new=4)
        return sum(isinstance(event, Seeded) for event in events)

    assert seeds(None) == 2  # one prompt graph, one decode graph, kept
    assert seeds(shared) > 4  # each pushes the other out


def test_rebinding_nothing_keeps_what_is_held(cache, driver, buffers):
    x, y = buffers
    cache.rebind(Bindings((("x", x.data_ptr()),)))
    cache.run(identity_of(driver), lambda: y.copy_(x * 2))
    assert cache.rebind(Bindings((("x", x.data_ptr()),))) == ()
    assert cache.spaces[Namespace.PROMPT].num_held == 1

"""The policy on the scripted driver: each test is a transcript, named after its invariant."""

import threading

import pytest

from graphseed.capture import (
    Bindings,
    Budget,
    CannotCapture,
    Cause,
    Closed,
    DeviceLost,
    FirstNode,
    GraphCache,
    LaunchFailed,
    Namespace,
    Policy,
    Reason,
    Selection,
    State,
    WrongThread,
)
from graphseed.capture.events import Deferred, Direct, Refused, Released, Stale, Why

SEED = Selection(Policy.SEED)
RESIDENT = Selection(Policy.RESIDENT)
DISABLED = Selection(Policy.OFF, Policy.OFF)


@pytest.fixture
def make_cache(driver, log):
    def make(selection=SEED, **budgets):
        spaces = {Namespace(name): budget for name, budget in budgets.items()}
        return GraphCache(driver, selection, budgets=spaces, log=log)

    return make


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_I1_I2_first_observation_runs_direct_and_launches_nothing(
    make_cache, driver, make_identity
):
    cache = make_cache()
    assert cache.run(make_identity(), driver.work()) == "direct"
    assert driver.calls == ["open prompt", "capture", "instantiate", "direct"]


def test_I11_the_python_of_a_step_runs_twice_when_seeding_and_not_at_replay(
    make_cache, driver, make_identity
):
    cache, runs = make_cache(), []
    driver.records_work = True
    cache.run(make_identity(), lambda: runs.append(1))
    assert len(runs) == 2
    driver.calls.clear()
    assert [cache.run(make_identity(), driver.work()) for _ in range(2)] == ["replayed 1"] * 2
    assert driver.calls == ["wait", "launch", "launch"]


def test_I3_the_direct_run_is_waited_for_once_before_the_first_launch(
    make_cache, driver, make_identity
):
    cache, identity = make_cache(), make_identity()
    cache.run(identity, driver.work())
    assert cache.spaces[Namespace.PROMPT].entries[identity].state is State.SEEDED
    cache.run(identity, driver.work())
    assert cache.spaces[Namespace.PROMPT].entries[identity].state is State.PROVEN
    assert driver.calls.count("wait") == 1


def test_I3_a_direct_run_that_raises_releases_the_executable_and_is_unseen_again(
    make_cache, driver, make_identity, events
):
    cache, identity = make_cache(), make_identity()
    with pytest.raises(ValueError, match="bad step"):
        cache.run(identity, driver.work(error=ValueError("bad step")))
    assert driver.calls[-2:] == ["direct", "release"]
    assert cache.spaces[Namespace.PROMPT].entries[identity].state is State.UNSEEN
    assert cache.spaces[Namespace.PROMPT].num_held == 0
    assert [event.cause for event in of(events, Released)] == [Cause.DIRECT_RAISED]
    assert cache.run(identity, driver.work()) == "direct"  # seeded anew
    assert driver.num_captured == 2


def test_I3_a_direct_run_that_failed_on_the_device_is_never_replayed(
    make_cache, driver, make_identity
):
    cache = make_cache()
    cache.run(make_identity(), driver.work())
    driver.wait_error = DeviceLost("poisoned")
    with pytest.raises(DeviceLost):
        cache.run(make_identity(), driver.work())
    assert "launch" not in driver.calls


def test_I4_each_namespace_has_its_own_arena_and_budget(make_cache, driver, make_identity):
    cache = make_cache(prompt=Budget(max_entries=1), decode=Budget(max_entries=1))
    prompt, decode = make_identity(), make_identity(Namespace.DECODE, batch=4)
    for identity in (prompt, decode, prompt, decode):
        cache.run(identity, driver.work())
    assert [c for c in driver.calls if c.startswith(("open", "close"))] == [
        "open prompt", "open decode",
    ]  # fmt: skip
    assert driver.calls.count("launch") == 2


def test_I5_the_first_batch_one_decode_graph_releases_the_whole_prompt_generation(
    make_cache, driver, make_identity, events
):
    cache = make_cache()
    for tokens in (512, 64):
        cache.run(make_identity(tokens=tokens), driver.work())
    cache.run(make_identity(Namespace.DECODE, tokens=1), driver.work())
    [released] = of(events, Released)
    assert (released.cause, released.num_entries) == (Cause.DECODE, 2)
    assert (released.bytes_held, released.bytes_returned) == (200, 200)
    assert driver.calls.index("close prompt") < driver.calls.index("open decode")
    assert cache.spaces[Namespace.PROMPT].num_held == 0


def test_I5_a_decode_graph_that_replays_is_launched_before_the_release(
    make_cache, driver, make_identity
):
    cache, decode = make_cache(), make_identity(Namespace.DECODE, tokens=1)
    for _ in range(2):
        cache.run(make_identity(), driver.work())
        cache.run(decode, driver.work())
    assert driver.calls[-3:] == ["wait", "launch", "close prompt"]


def test_I5_a_decode_graph_of_a_larger_batch_does_not_release(make_cache, driver, make_identity):
    cache = make_cache()
    cache.run(make_identity(), driver.work())
    cache.run(make_identity(Namespace.DECODE, batch=2), driver.work())
    assert "close prompt" not in driver.calls


def test_I5_the_release_waits_for_admitted_prompts_and_is_counted_once(
    make_cache, driver, make_identity, events
):
    cache, decode = make_cache(), make_identity(Namespace.DECODE)
    cache.num_unfinished_prompts = 1
    for _ in range(3):
        cache.run(make_identity(), driver.work())
        cache.run(decode, driver.work())
    assert len(of(events, Deferred)) == 1
    assert "close prompt" not in driver.calls
    cache.num_unfinished_prompts = 0
    cache.run(decode, driver.work())
    assert driver.calls[-2:] == ["launch", "close prompt"]
    assert driver.num_captured == 2  # one seed for each namespace, replays in between


def test_I5_resident_is_not_released_by_decode(make_cache, driver, make_identity):
    cache = make_cache(RESIDENT)
    cache.run(make_identity(), driver.work())
    driver.synchronize()
    cache.settle()
    cache.run(make_identity(Namespace.DECODE), driver.work())
    assert "close prompt" not in driver.calls


def test_a_released_identity_is_seeded_anew_when_seen_again(make_cache, driver, make_identity):
    cache = make_cache()
    for _ in range(2):
        cache.run(make_identity(), driver.work())
        cache.release(Namespace.PROMPT)
    cache.run(make_identity(), driver.work())
    assert driver.num_captured == 3


def test_resident_hands_on_the_direct_result_and_captures_only_in_settle(
    make_cache, driver, make_identity
):
    cache = make_cache(RESIDENT)
    assert cache.run(make_identity(), driver.work()) == "direct"
    assert driver.calls == ["direct"]
    assert cache.settle() == 0  # its direct run has not completed
    driver.synchronize()
    assert cache.settle() == 1
    assert driver.calls == ["direct", "open prompt", "capture", "instantiate"]
    assert cache.run(make_identity(), driver.work()) == "replayed 1"
    assert "wait" not in driver.calls


def test_resident_runs_direct_until_it_is_settled(make_cache, driver, make_identity, events):
    cache = make_cache(RESIDENT)
    for _ in range(3):
        assert cache.run(make_identity(), driver.work()) == "direct"
    assert {event.why for event in of(events, Direct)} == {Why.OBSERVING}


def test_settle_stops_at_its_limit(make_cache, driver, make_identity):
    cache = make_cache(RESIDENT)
    for tokens in (16, 32, 48):
        cache.run(make_identity(tokens=tokens), driver.work())
    driver.synchronize()
    assert [cache.settle(max_captures=2), cache.settle(), cache.settle()] == [2, 1, 0]


def test_settle_survives_a_budget_that_releases_what_it_is_working_on(
    make_cache, driver, make_identity
):
    cache = make_cache(RESIDENT, prompt=Budget(max_entries=1))
    for tokens in (16, 32, 48):
        cache.run(make_identity(tokens=tokens), driver.work())
    driver.synchronize()
    cache.settle()
    states = [entry.state for entry in cache.spaces[Namespace.PROMPT].entries.values()]
    assert states == [State.RELEASED, State.PROVEN, State.RELEASED]
    assert cache.run(make_identity(tokens=32), driver.work()) == "replayed 2"


@pytest.mark.parametrize("reason", [reason for reason in Reason if not reason.is_transient])
def test_I8_a_permanent_refusal_runs_direct_for_good(
    reason, make_cache, driver, make_identity, events
):
    cache = make_cache()
    driver.refusals.append(CannotCapture(reason, "detail"))
    answers = [cache.run(make_identity(), driver.work()) for _ in range(200)]
    assert answers == ["direct"] * 200
    assert driver.calls.count("capture") == 1
    [refused] = of(events, Refused)
    assert (refused.reason, refused.detail, refused.retry_at) == (reason, "detail", None)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.is_transient])
def test_I8_a_transient_refusal_is_retried_with_a_growing_pause(
    reason, make_cache, driver, make_identity
):
    cache = make_cache()
    driver.refusals += [CannotCapture(reason, "later")] * 3
    attempts = []
    for number in range(1, 100):
        before = driver.calls.count("capture")
        cache.run(make_identity(), driver.work())
        if driver.calls.count("capture") > before:
            attempts.append(number)
    assert attempts == [1, 9, 25, 57]
    assert driver.calls.count("launch") == 99 - 57


def test_I8_a_launch_that_fails_is_answered_by_the_direct_path(
    make_cache, driver, make_identity, events
):
    cache = make_cache()
    cache.run(make_identity(), driver.work())
    driver.launch_error = LaunchFailed("not accepted")
    assert cache.run(make_identity(), driver.work()) == "direct"
    assert of(events, Refused)[0].reason is Reason.LAUNCH_FAILED
    assert driver.calls[-3:] == ["launch", "release", "direct"]
    assert cache.run(make_identity(), driver.work()) == "direct"
    assert driver.calls.count("launch") == 1


def test_I6_a_first_node_that_was_not_declared_is_refused(
    make_cache, driver, make_identity, events
):
    cache = make_cache()
    driver.first_node = FirstNode("aten.mm", (1, 512, 64), "float32")
    assert cache.run(make_identity(), driver.work()) == "direct"
    [refused] = of(events, Refused)
    assert refused.reason is Reason.FIRST_NODE_DIFFERED
    assert "declared aten.embedding" in refused.detail and "recorded aten.mm" in refused.detail


def test_I6_the_root_is_fixed_at_the_first_seed(make_cache, driver, make_identity, events):
    cache = make_cache()
    cache.run(make_identity(), driver.work())
    cache.release(Namespace.PROMPT)
    driver.root = "another kernel"
    assert cache.run(make_identity(), driver.work()) == "direct"
    assert of(events, Refused)[0].reason is Reason.FIRST_NODE_DIFFERED


def test_I7_a_changed_binding_makes_both_namespaces_stale(
    make_cache, driver, make_identity, events
):
    cache, decode = make_cache(), make_identity(Namespace.DECODE, batch=2)
    assert cache.rebind(Bindings((("kv", 1), ("staging", 2)))) == ("kv", "staging")
    cache.run(make_identity(), driver.work())
    cache.run(decode, driver.work())
    assert cache.rebind(Bindings((("kv", 1), ("staging", 2)))) == ()
    assert cache.rebind(Bindings((("kv", 7), ("staging", 2)))) == ("kv",)
    assert [(e.namespace, e.names) for e in of(events, Stale)] == [
        (Namespace.PROMPT, ("kv",)), (Namespace.DECODE, ("kv",)),
    ]  # fmt: skip
    assert cache.run(make_identity(), driver.work()) == "direct"
    assert cache.run(decode, driver.work()) == "direct"
    assert "launch" not in driver.calls


def test_I7_a_new_generation_forgets_refusals(make_cache, driver, make_identity):
    cache = make_cache()
    driver.refusals.append(CannotCapture(Reason.HOST_SYNC, "item"))
    cache.run(make_identity(), driver.work())
    cache.rebind(Bindings((("kv", 1),)))
    cache.run(make_identity(), driver.work())
    assert driver.num_captured == 1


@pytest.mark.parametrize("selection", [DISABLED, Selection(), SEED, RESIDENT])
def test_I9_every_observation_is_answered_once_under_every_policy(
    selection, make_cache, driver, make_identity
):
    cache = make_cache(selection)
    for number in range(12):
        cache.run(make_identity(tokens=16 * (number % 3)), driver.work())
        if number % 4 == 3:
            driver.synchronize()
            cache.settle()
    assert driver.calls.count("direct") + driver.calls.count("launch") == 12


def test_I12_off_captures_no_prompt_and_still_captures_decode(make_cache, driver, make_identity):
    cache = make_cache(Selection())
    for _ in range(2):
        cache.run(make_identity(), driver.work())
        cache.run(make_identity(Namespace.DECODE), driver.work())
    assert [c for c in driver.calls if c.startswith("open")] == ["open decode"]


def test_I12_disabled_captures_nothing_at_all(make_cache, driver, make_identity):
    cache = make_cache(DISABLED)
    for _ in range(3):
        cache.run(make_identity(), driver.work())
        cache.run(make_identity(Namespace.DECODE), driver.work())
    assert driver.calls == ["direct"] * 6


def test_a_full_budget_releases_the_whole_generation_before_the_next_seed(
    make_cache, driver, make_identity, events
):
    cache = make_cache(prompt=Budget(max_entries=2))
    for tokens in (16, 32, 48):
        cache.run(make_identity(tokens=tokens), driver.work())
    [released] = of(events, Released)
    assert (released.cause, released.num_entries) == (Cause.BUDGET, 2)
    assert cache.spaces[Namespace.PROMPT].num_held == 1


def test_a_budget_in_bytes_counts_what_executables_hold(make_cache, driver, make_identity, events):
    cache = make_cache(prompt=Budget(max_bytes=150))
    for tokens in (16, 32, 48):
        cache.run(make_identity(tokens=tokens), driver.work())
    assert [event.num_entries for event in of(events, Released)] == [2]


def test_entries_do_not_grow_without_bound(make_cache, driver, make_identity):
    cache = make_cache(Selection())
    for tokens in range(3000):
        cache.run(make_identity(tokens=tokens), driver.work())
    assert len(cache.spaces[Namespace.PROMPT].entries) <= 1024


def test_I8_what_was_refused_is_not_forgotten_while_anything_else_can_be(
    make_cache, driver, make_identity
):
    cache = make_cache()
    driver.refusals.append(CannotCapture(Reason.HOST_SYNC, "item"))
    cache.run(make_identity(tokens=0), driver.work())
    for tokens in range(1, 1500):
        cache.run(make_identity(tokens=tokens), driver.work())
        cache.release(Namespace.PROMPT)
    captures = driver.calls.count("capture")
    cache.run(make_identity(tokens=0), driver.work())
    assert driver.calls.count("capture") == captures


def test_a_recording_that_is_refused_after_its_capture_is_discarded(
    make_cache, driver, make_identity
):
    cache = make_cache()
    driver.first_node = FirstNode("aten.mm", (1, 512, 64), "float32")
    cache.run(make_identity(), driver.work())
    assert driver.calls == ["open prompt", "capture", "discard", "direct"]


def test_I5_an_arena_that_holds_refused_attempts_alone_is_released_too(
    make_cache, driver, make_identity
):
    cache = make_cache()
    driver.refusals.append(CannotCapture(Reason.HOST_SYNC, "item"))
    cache.run(make_identity(), driver.work())
    cache.run(make_identity(Namespace.DECODE), driver.work())
    assert "close prompt" in driver.calls


def test_I8_a_device_that_cannot_open_an_arena_refuses(make_cache, driver, make_identity, events):
    cache = make_cache()
    driver.open_error = CannotCapture(Reason.ALLOCATOR, "no pools")
    assert [cache.run(make_identity(), driver.work()) for _ in range(3)] == ["direct"] * 3
    assert [event.reason for event in of(events, Refused)] == [Reason.ALLOCATOR]


def test_I8_what_a_driver_raises_is_a_refusal_and_the_answer_comes_direct(
    make_cache, driver, make_identity, events
):
    cache = make_cache()
    driver.open_error = RuntimeError("a bug in the driver")
    assert cache.run(make_identity(), driver.work()) == "direct"
    [refused] = of(events, Refused)
    assert refused.reason is Reason.DRIVER_RAISED
    assert refused.detail == "RuntimeError: a bug in the driver"


def test_settle_counts_what_was_refused_against_its_limit(make_cache, driver, make_identity):
    cache = make_cache(RESIDENT)
    for tokens in range(10):
        cache.run(make_identity(tokens=tokens), driver.work())
    driver.synchronize()
    driver.refusals += [CannotCapture(Reason.HOST_SYNC, "item")] * 10
    assert cache.settle(1) == 1
    assert driver.calls.count("capture") == 1


def test_a_cache_may_be_made_on_one_thread_and_used_on_another(make_cache, driver, make_identity):
    cache, answers = make_cache(), []
    cache.rebind(Bindings((("kv", 1),)))
    thread = threading.Thread(
        target=lambda: answers.append(cache.run(make_identity(), driver.work()))
    )
    thread.start()
    thread.join()
    assert answers == ["direct"]
    with pytest.raises(WrongThread):
        cache.run(make_identity(), driver.work())


def test_an_executable_is_never_replaced_by_the_one_it_pushed_out(
    make_cache, driver, make_identity
):
    cache = make_cache(prompt=Budget(max_entries=1))
    for tokens in (16, 32, 16, 16):
        answer = cache.run(make_identity(tokens=tokens), driver.work())
    assert answer == "replayed 3"  # the third capture, not the first


def test_close_releases_everything_and_may_be_called_twice(make_cache, driver, make_identity):
    cache = make_cache()
    cache.run(make_identity(), driver.work())
    cache.close()
    cache.close()
    assert driver.calls.count("close prompt") == 1
    with pytest.raises(Closed):
        cache.run(make_identity(), driver.work())


def test_another_thread_is_refused(make_cache, driver, make_identity):
    cache, errors = make_cache(), []
    cache.run(make_identity(), driver.work())

    def use():
        try:
            cache.run(make_identity(), driver.work())
        except WrongThread as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1

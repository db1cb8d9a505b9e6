"""I10: the summary line, the alarms and their reasons."""

import pytest

from graphseed.capture import (
    Bindings,
    Budget,
    CannotCapture,
    GraphCache,
    Namespace,
    Policy,
    Reason,
    SeedWatch,
    Selection,
    Tally,
)
from graphseed.capture.events import Alarm


@pytest.fixture
def tally(log):
    tally = Tally("scripted")
    log.subscribe(tally)
    return tally


def alarms(events):
    return [event for event in events if isinstance(event, Alarm)]


def test_I10_the_summary_counts_what_happened(driver, log, tally, make_identity):
    cache = GraphCache(driver, Selection(Policy.SEED), log=log)
    cache.rebind(Bindings((("kv", 1),)))
    cache.num_unfinished_prompts = 1
    for _ in range(16):
        cache.run(make_identity(), driver.work())
    cache.run(make_identity(Namespace.DECODE), driver.work())
    assert tally.line(Namespace.PROMPT) == (
        "prompt graphs: device=scripted candidates=16 seeded=1 replayed=15 direct=1 stale=0 "
        "refused=0 quarantined=0 released=0 deferred=1 bytes=100"
    )
    cache.rebind(Bindings((("kv", 2),)))
    driver.refusals.append(CannotCapture(Reason.HOST_SYNC, "item"))
    cache.run(make_identity(), driver.work())
    assert tally.line(Namespace.PROMPT) == (
        "prompt graphs: device=scripted candidates=17 seeded=1 replayed=15 direct=2 stale=1 "
        "refused=1 quarantined=0 released=1 deferred=1 bytes=0"
    )
    assert tally.counts[Namespace.PROMPT].reasons == {Reason.HOST_SYNC: 1}


def test_I10_eight_seeds_without_a_replay_raise_one_alarm_that_names_the_field(
    driver, log, events, make_identity
):
    SeedWatch(log, "scripted")
    cache = GraphCache(driver, Selection(Policy.SEED), log=log)
    for address in range(20):
        cache.run(make_identity(first_kv_block=address), driver.work())
    [alarm] = alarms(events)
    assert alarm.field == "first_kv_block"
    assert "8 prompt graphs seeded and none replayed" in alarm.message
    assert "in field 'first_kv_block'" in alarm.message


def test_I10_an_alarm_tells_released_before_it_was_seen_again(driver, log, events, make_identity):
    SeedWatch(log, "scripted")
    budgets = {Namespace.PROMPT: Budget(max_entries=1)}
    cache = GraphCache(driver, Selection(Policy.SEED), budgets=budgets, log=log)
    for _ in range(4):
        cache.run(make_identity(tokens=16), driver.work())
        cache.run(make_identity(tokens=32), driver.work())
    [alarm] = alarms(events)
    assert alarm.field is None
    assert "released before it was seen again" in alarm.message


def test_I10_seven_seeds_or_a_replay_raise_nothing_while_running(
    driver, log, events, make_identity
):
    SeedWatch(log, "scripted")
    cache = GraphCache(driver, Selection(Policy.SEED), log=log)
    for tokens in range(7):
        cache.run(make_identity(tokens=tokens), driver.work())
    cache.run(make_identity(tokens=0), driver.work())
    for tokens in range(7, 14):
        cache.run(make_identity(tokens=tokens), driver.work())
    assert alarms(events) == []


def test_I10_at_the_end_any_seed_without_a_replay_is_an_alarm(driver, log, events, make_identity):
    watch = SeedWatch(log, "scripted")
    cache = GraphCache(driver, Selection(Policy.SEED), log=log)
    cache.run(make_identity(), driver.work())
    watch.finish()
    [alarm] = alarms(events)
    assert (
        alarm.message
    ) == "1 prompt graphs seeded and none replayed: the identity was not seen again"


def test_I10_no_alarm_at_the_end_once_something_replayed(driver, log, events, make_identity):
    watch = SeedWatch(log, "scripted")
    cache = GraphCache(driver, Selection(Policy.SEED), log=log)
    cache.run(make_identity(), driver.work())
    cache.run(make_identity(), driver.work())
    cache.run(make_identity(tokens=16), driver.work())
    watch.finish()
    assert alarms(events) == []

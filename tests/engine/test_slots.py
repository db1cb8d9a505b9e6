"""Slots as llama-server's users know them, and what each request saw of prompt graphs."""

import pytest

from graphseed.engine import BadParameter, SamplingParams
from tests.engine.conftest import prompt_of

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def run_all(engine):
    while not engine.is_idle:
        assert all(delta.error is None for delta in engine.step())


def test_each_running_request_has_a_slot_of_its_own_the_lowest_first(make_engine):
    engine = make_engine("off", num_parallel=3)
    requests = [engine.request(prompt_of(9, n), PARAMS) for n in range(5)]
    for request in requests:
        engine.submit(request)
    engine.step()
    assert [s.slot for s in engine.scheduler.sequences] == [0, 1, 2, None, None]
    run_all(engine)
    assert [request.slot for request in requests][:3] == [0, 1, 2]
    assert set(request.slot for request in requests[3:]) <= {0, 1, 2}


def test_a_request_waits_for_the_slot_it_wants(make_engine):
    engine = make_engine("off", num_parallel=2)
    first, second = (engine.request(prompt_of(9, n), PARAMS) for n in range(2))
    first.wanted_slot = second.wanted_slot = 1
    for request in (first, second):
        engine.submit(request)
    engine.step()
    assert [s.slot for s in engine.scheduler.sequences] == [1, None]
    run_all(engine)
    assert (first.slot, second.slot) == (1, 1)
    third = engine.request(prompt_of(9), PARAMS)
    third.wanted_slot = 2
    with pytest.raises(BadParameter, match="wanted_slot is 2; expected a slot from 0 to 1"):
        engine.submit(third)


def test_a_request_knows_how_its_prompt_steps_were_answered(make_engine):
    engine = make_engine("seed", num_ubatch=16)
    request = engine.request(prompt_of(70), PARAMS)
    engine.submit(request)
    run_all(engine)
    seen = request.observations
    assert (seen.num_steps, seen.num_seeded, seen.num_replayed) == (5, 1, 4)
    off = make_engine("off", num_ubatch=16)
    request = off.request(prompt_of(70), PARAMS)
    off.submit(request)
    run_all(off)
    seen = request.observations
    assert (seen.num_steps, seen.num_seeded, seen.num_replayed) == (5, 0, 0)


def test_progress_is_told_where_it_was_asked_for_and_only_there(make_engine):
    engine = make_engine("off", num_ubatch=16, num_parallel=2, reuses_prefixes=True)
    engine.generate(prompt_of(40), PARAMS)
    told, quiet = engine.request(prompt_of(70), PARAMS), engine.request(prompt_of(20, 1), PARAMS)
    told.reports_progress = True
    for request in (told, quiet):
        engine.submit(request)
    seen = []
    while not engine.is_idle:
        seen += engine.step()
    progress = [delta for delta in seen if delta.num_prompt_done is not None]
    assert all(delta.request is told and delta.token_id is None for delta in progress)
    assert [delta.num_prompt_done for delta in progress] == [32, 48, 64, 70]
    assert told.num_cached == 32
    # All of it before the first token.
    first = next(i for i, d in enumerate(seen) if d.request is told and d.token_id is not None)
    assert first > seen.index(progress[-1])


def test_a_request_may_decline_a_cached_prefix(make_engine):
    engine = make_engine("off", num_parallel=2, reuses_prefixes=True)
    engine.generate(prompt_of(70), PARAMS)
    fresh = engine.request(prompt_of(70), PARAMS)
    fresh.reuses_prefix = False
    engine.submit(fresh)
    run_all(engine)
    assert fresh.num_cached == 0
    assert engine.generate(prompt_of(70), PARAMS)[1].num_cached == 64

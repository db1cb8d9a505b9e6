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

"""The engine on its thread: any thread or event loop submits, reads, cancels and closes."""

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest

from graphseed.capture import Closed, DeviceLost
from graphseed.engine import (
    BadParameter,
    Cancelled,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    EngineCore,
    FinishReason,
    PromptTooLong,
    QueueFull,
    SamplingParams,
)
from graphseed.engine.engine import WAKING_SECONDS
from tests.engine.conftest import SELECTIONS, driver_of, model_of, prompt_of


@pytest.fixture
def open_engine():
    opened = []

    def make(policy="seed", **sizes):
        driver = driver_of("cpu")
        config = EngineConfig(**{"context_len": 256, "num_ubatch": 32, "num_parallel": 4, **sizes})
        model = model_of("tiny-llama", driver.device, "fp32")
        opened.append(Engine(EngineCore(model, driver, config, SELECTIONS[policy])))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
        assert not engine._thread.is_alive()


def params(new=6):
    return SamplingParams(max_tokens=new, ignore_eos=True)


def tokens(deltas):
    return [delta.token_id for delta in deltas]


@pytest.mark.parametrize("device", ["cpu"])  # where open_engine's are: other weights elsewhere
def test_a_stream_gives_the_tokens_of_the_core(open_engine, make_engine):
    want = make_engine("disabled", num_parallel=4).generate(prompt_of(50), params())[1]
    assert tokens(open_engine().stream(prompt_of(50), params())) == want.output_ids


def test_many_threads_get_their_own_answers(open_engine):
    engine, answers = open_engine("resident"), {}
    prompts = {n: prompt_of(10 + 7 * n, n) for n in range(12)}
    alone = {n: tokens(engine.stream(p, params())) for n, p in prompts.items()}

    def use(number):
        answers[number] = tokens(engine.stream(prompts[number], params()))

    threads = [threading.Thread(target=use, args=(n,)) for n in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == alone
    assert engine.call(lambda: engine.core.num_free_blocks) == engine.core.config.num_blocks - 1


def test_an_event_loop_streams_and_leaves_early(open_engine):
    engine = open_engine()

    async def read(limit):
        got = []
        stream = engine.astream(prompt_of(30), params(8))
        async for delta in stream:
            got.append(delta.token_id)
            if len(got) == limit:
                break
        await stream.aclose()
        return got

    async def both():
        return await asyncio.gather(read(8), read(3))

    whole, part = asyncio.run(both())
    assert len(whole) == 8 and part == whole[:3]
    assert tokens(engine.stream(prompt_of(30), params(8))) == whole


def test_generate_answers_a_list_in_order_and_more_than_may_wait(open_engine, capsys):
    engine = open_engine(max_waiting=2)
    prompts = [prompt_of(5 + n, n) for n in range(20)]
    requests = engine.generate(prompts, params(3), progress=True)
    assert [request.prompt_ids for request in requests] == [tuple(p) for p in prompts]
    assert {request.finish_reason for request in requests} == {FinishReason.MAX_TOKENS}
    assert "prompts" in capsys.readouterr().out


def test_a_full_queue_is_refused_and_names_its_size(open_engine):
    engine = open_engine(num_parallel=1, max_waiting=2)
    handles = [engine.submit(prompt_of(20), params(200)) for _ in range(3)]
    with pytest.raises(QueueFull, match="2"):
        engine.submit(prompt_of(20), params())
    for handle in handles:
        handle.close()
    for _ in range(200):
        if engine.num_open == 0:
            break
        time.sleep(0.01)
    assert len(tokens(engine.submit(prompt_of(20), params()))) == 6


def test_a_cancel_frees_the_slot_and_its_reader_is_told(open_engine):
    engine = open_engine(num_parallel=1)
    handle = engine.submit(prompt_of(20), params(200))
    next(handle)
    handle.cancel()
    with pytest.raises(Cancelled):
        for _ in handle:
            pass
    assert engine.call(lambda: engine.core.is_idle)
    handle.cancel()  # nothing happens when it has ended


def test_a_deadline_ends_a_request(open_engine):
    handle = open_engine().submit(prompt_of(20), params(200), seconds=1e-6)
    with pytest.raises(DeadlineExceeded, match="within 1e-06 s"):
        list(handle)


def test_a_bad_prompt_is_refused_in_the_thread_that_submits(open_engine):
    engine = open_engine()
    with pytest.raises(PromptTooLong):
        engine.submit(prompt_of(256))
    assert len(tokens(engine.stream(prompt_of(5), params(2)))) == 2


def test_close_ends_what_is_open_and_may_be_called_twice_and_from_anywhere(open_engine):
    engine = open_engine()
    handle = engine.submit(prompt_of(20), params(200))
    next(handle)
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    with pytest.raises(Cancelled, match="the engine was closed"):
        for _ in handle:
            pass
    for closer in closers:
        closer.join()
    with pytest.raises(Closed):
        engine.submit(prompt_of(5))
    with pytest.raises(Closed):
        engine.call(lambda: None)


def test_I3_a_lost_device_ends_everything_with_one_clear_message(open_engine, monkeypatch):
    engine = open_engine("off")
    handles = [engine.submit(prompt_of(20), params(200)) for _ in range(2)]
    for handle in handles:
        next(handle)

    def lost(*_):
        raise DeviceLost("the device is gone")

    monkeypatch.setattr(engine.core.runner, "run", lost)
    for handle in handles:
        with pytest.raises(DeviceLost, match="the device is gone"):
            for _ in handle:
                pass
    with pytest.raises(DeviceLost, match="the device is gone"):
        engine.submit(prompt_of(5))


def test_a_resident_engine_captures_while_it_is_idle(open_engine):
    engine = open_engine("resident")
    list(engine.stream(prompt_of(16), params(1)))
    for _ in range(300):
        if engine.core.tally.counts[next(iter(engine.core.tally.counts))].seeded:
            break
        time.sleep(0.01)
    list(engine.stream(prompt_of(16), params(1)))
    assert "seeded=1 replayed=1" in engine.call(engine.core.finish)[0][0]


def test_a_handle_that_is_dropped_is_cancelled(open_engine):
    engine = open_engine(num_parallel=1)
    handle = engine.submit(prompt_of(20), params(230))
    next(handle)
    del handle
    gc.collect()
    assert len(tokens(engine.stream(prompt_of(9), params(3)))) == 3
    assert engine.num_open == 0


def test_a_stream_that_was_never_read_can_be_closed(open_engine):
    engine = open_engine()
    engine.stream(prompt_of(20), params(230)).close()
    engine.call(lambda: None)
    engine.call(lambda: None)
    assert engine.num_open == 0


def test_a_call_from_the_engines_own_thread_runs_at_once(open_engine):
    engine = open_engine()
    assert engine.call(lambda: engine.call(lambda: 7)) == 7


def test_a_reader_that_fails_does_not_take_others_with_it(open_engine):
    engine = open_engine()
    bad = engine.core.request(prompt_of(20), params(200))

    def sink(delta):
        raise RuntimeError("the event loop is closed")

    engine._enter(bad, sink, False)
    assert len(tokens(engine.stream(prompt_of(9), params(30)))) == 30
    for _ in range(300):
        if engine.num_open == 0:
            break
        time.sleep(0.01)
    assert engine.num_open == 0 and bad.status.value == "failed"


def test_a_request_is_handed_in_once_and_a_second_time_harms_nobody(open_engine):
    engine = open_engine()
    request, other = engine.core.request(prompt_of(9), params(40)), engine.submit(prompt_of(8))
    first = engine.start(request)
    for _ in range(2):  # while it is open, and when it has ended
        with pytest.raises(BadParameter, match="request is '.*'; expected one that was not handed"):
            engine.start(request)

        async def read():
            return [delta async for delta in engine.aread(request)]

        with pytest.raises(BadParameter, match="not handed in"):
            asyncio.run(read())
        gc.collect()  # the refused handle does not cancel what the first one reads
        for _ in first:
            pass
    assert len(request.output_ids) == 40
    other.close()
    with pytest.raises(BadParameter, match="request is 'finished'"):
        engine.call(lambda: engine.core.submit(request))


def test_generate_waits_for_its_turn_beside_other_clients(open_engine):
    engine = open_engine(num_parallel=1, max_waiting=0)
    other = engine.submit(prompt_of(20), params(60))
    next(other)
    [request] = engine.generate([prompt_of(9)], params(2))
    assert len(request.output_ids) == 2
    other.close()


def test_an_engine_that_cannot_warm_up_leaves_no_thread_behind(monkeypatch):
    def fails(self):
        raise MemoryError("no room for the warm-up")

    monkeypatch.setattr(EngineCore, "warm_up", fails)
    driver = driver_of("cpu")
    core = EngineCore(model_of("tiny-llama", driver.device, "fp32"), driver, EngineConfig(64))
    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room"):
        Engine(core)
    assert threading.active_count() == before
    with pytest.raises(Closed):
        core.step()


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_deadline_that_is_no_time_is_named(seconds, open_engine):
    with pytest.raises(BadParameter, match="seconds is"):
        open_engine().submit(prompt_of(5), params(), seconds=seconds)


def test_idle_captures_keep_a_new_request_waiting_for_one_at_most(open_engine, monkeypatch):
    engine = open_engine("resident", num_ubatch=64)
    order = []
    real = engine.core.settle
    monkeypatch.setattr(engine.core, "settle", lambda n=None: order.append(n) or real(n))
    engine.generate([prompt_of(n, n) for n in (10, 20, 40, 60)], params(1))
    engine.generate([prompt_of(10)], params(1))
    time.sleep(0.05)
    assert order and set(order) == {1}


UNCLOSED = """
from graphseed.engine import EngineConfig, EngineCore, Engine, SamplingParams
from graphseed.drivers import open_driver
from graphseed.models import load_model
driver = open_driver("cpu")
model = load_model("random:tiny-llama", device="cpu", bf16_is_fast=True, progress=False)
engine = Engine(EngineCore(model, driver, EngineConfig(context_len=256)))
print(next(engine.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))).token_id)
"""


def test_a_program_that_does_not_close_its_engine_ends_well():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_only_a_first_token_of_a_request_that_runs_alone_is_waited_for(open_engine, monkeypatch):
    engine, slept = open_engine(num_ubatch=16), []

    def sleep(seconds):
        if threading.current_thread() is engine._thread:
            slept.append(seconds)

    monkeypatch.setattr("graphseed.engine.engine.time.sleep", sleep)
    request = engine.core.request(prompt_of(100), params())
    request.reports_progress = True
    deltas = list(engine.start(request))
    assert len(deltas) == 1 + 7 + 6  # the start, each chunk and each token
    assert [seconds for seconds in slept if seconds] == [WAKING_SECONDS]
    assert slept.count(0) == 6  # once for each chunk but the last, which brings the token
    slept.clear()
    requests = [engine.core.request(prompt_of(length), params()) for length in (20, 30)]
    for handle in engine.call(lambda: [engine.start(request) for request in requests]):
        assert len(list(handle)) == 6
    assert slept and not any(slept)

"""Closed-loop clients: the workload, what the clients see, errors, and the proof of the bytes."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from graphseed.capture import Namespace
from graphseed.drivers import open_driver
from graphseed.engine import BadToken, Engine, EngineConfig, EngineCore, Request, SamplingParams
from graphseed.engine.step import StepRunner
from graphseed.measure import load
from graphseed.measure.first_token import StepMarks, measure_first_token
from graphseed.measure.load import Job, Mix
from graphseed.measure.policies import POLICIES
from graphseed.models import Model

CONFIG = EngineConfig(context_len=96, num_ubatch=32, num_parallel=4)
MIX = Mix(range(256), prompt_lens=(5, 16, 40, 70), num_new_tokens=4)
ONE_CHUNK = Mix(range(256), prompt_lens=(24,), num_new_tokens=3)


def measured(policy: str, model: Model, num_clients: int = 3, **more: Any) -> load.LoadResult:
    mix = more.pop("mix", MIX)
    settings = {
        "warm_up": load.warm_up_of(1, num_clients, mix), "num_proven": 4, **more
    }  # fmt: skip
    driver = settings.pop("driver", None) or open_driver("cpu")
    jobs = load.workload(1, 8, mix)
    return load.measure_load(policy, model, driver, CONFIG, jobs, num_clients, **settings)


def opened(model: Model, policy: str = "off", num_parallel: int = 4) -> Engine:
    config = replace(CONFIG, num_parallel=num_parallel)
    return Engine(EngineCore(model, open_driver("cpu"), config, POLICIES[policy]))


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("client-")]


def test_a_workload_is_the_same_for_a_number_and_another_for_another():
    assert load.workload(3, 12, MIX) == load.workload(3, 12, MIX)
    assert load.workload(3, 12, MIX) != load.workload(4, 12, MIX)
    # A longer load begins with the shorter one: what is proven is a part of what is timed.
    assert load.workload(3, 12, MIX)[:5] == load.workload(3, 5, MIX)


def test_a_workload_mixes_lengths_prefixes_and_sampling():
    jobs = load.workload(7, 40, Mix(range(50, 90), (300, 400)))
    assert {len(job.prompt_ids) for job in jobs} == {300, 400}
    assert all(50 <= token < 90 for job in jobs for token in job.prompt_ids)
    assert len({job.prompt_ids[: load.NUM_SHARED] for job in jobs[::4]}) == 1
    assert len({job.prompt_ids[: load.NUM_SHARED] for job in jobs[1::4]}) == 10
    assert [not job.params.is_greedy for job in jobs] == [at % 3 == 0 for at in range(40)]


def test_a_warm_up_has_a_request_for_each_client_and_shares_no_prefix_with_what_is_measured():
    mix = Mix(range(256), (64, 128))
    warm_up, jobs = load.warm_up_of(9, 12, mix), load.workload(9, 12, mix)
    assert len(warm_up) == 12 and len(load.warm_up_of(9, 1, mix)) == load.NUM_WARM_UP
    assert not {job.prompt_ids[:16] for job in warm_up} & {job.prompt_ids[:16] for job in jobs}


def test_token_ids_of_a_load_are_the_models_own_and_not_special(model: Model):
    ids = load.plain_token_ids(model)
    special = set(model.tokenizer.all_special_ids)
    assert special and model.eos_ids and not {*ids} & {*special, *model.eos_ids}
    assert len(ids) + len(special) == model.vocab_size


def test_every_policy_answers_the_same_requests_with_as_many_tokens_and_equal_bytes(model: Model):
    jobs = load.workload(1, 8, MIX)
    for policy in POLICIES:
        result = measured(policy, model)
        assert result.run.num_tokens == 8 * 4, policy
        assert [r.prompt_ids for r in result.run.requests] == [job.prompt_ids for job in jobs]
        assert result.proof.is_equal and result.proof.num_steps > 0, policy
        assert (result.num_proven_replays > 0) is (policy in ("seed", "resident")), policy


def test_ttft_is_queue_time_and_prompt_time(model: Model):
    with opened(model, num_parallel=1) as engine:
        run = load.run_load(engine, load.workload(2, 6, MIX), 3)
    for request, queue, prompt, ttft in zip(
        run.requests, run.queue_ms, run.prompt_ms, run.ttft_ms, strict=True
    ):
        timings = request.timings
        assert queue > 0 and prompt > 0
        # Three divisions of whole nanoseconds: equal up to the rounding of a float.
        assert ttft == pytest.approx((timings.first_token_ns - timings.submitted_ns) / 1e6)
        assert ttft == queue + prompt


def test_more_clients_than_slots_wait_in_the_queue_and_not_in_the_prompt(model: Model):
    jobs = load.workload(2, 12, MIX)
    with opened(model, num_parallel=1) as engine:
        load.run_load(engine, load.warm_up_of(2, 6, MIX), 6)
        alone = load.run_load(engine, jobs, 1)
        crowded = load.run_load(engine, jobs, 6)
    # With one slot nobody's first chunk is staged before the one ahead has ended.
    order = sorted(crowded.requests, key=lambda request: request.timings.started_ns)
    for earlier, later in zip(order, order[1:], strict=False):
        assert later.timings.started_ns >= earlier.timings.finished_ns
    # Five others' whole answers, against a wait for nobody and against one prompt.
    queue_ms = load.spread_of(crowded.queue_ms).p50
    assert queue_ms > load.spread_of(alone.queue_ms).p50
    assert queue_ms > load.spread_of(crowded.prompt_ms).p50


def test_under_seed_one_client_releases_each_prompt_before_it_is_seen_again(model: Model):
    result = measured("seed", model, num_clients=1, mix=ONE_CHUNK)
    counts = result.counts[Namespace.PROMPT]
    # Of the eight measured requests alone: the warm-up's are not counted.
    assert (counts.candidates, counts.seeded, counts.replayed) == (8, 8, 0)
    assert result.num_released_by_decode == 8 and result.hit_rate(Namespace.PROMPT) == 0.0
    decode = result.counts[Namespace.DECODE]
    assert (decode.candidates, decode.seeded, decode.replayed) == (16, 0, 16)
    assert result.hit_rate(Namespace.DECODE) == 1.0 and result.capture_ms > 0


def test_under_seed_the_chunks_of_one_long_prompt_replay(model: Model):
    mix = Mix(range(256), prompt_lens=(92,), num_new_tokens=3)  # 32, 32, 28 padded to 32
    result = measured("seed", model, num_clients=1, mix=mix)
    counts = result.counts[Namespace.PROMPT]
    assert counts.replayed > 0 and counts.candidates == counts.replayed + counts.direct
    assert result.hit_rate(Namespace.PROMPT) == counts.replayed / counts.candidates


def test_with_graphs_disabled_nothing_is_seeded_or_replayed(model: Model):
    result = measured("disabled", model)
    for namespace in Namespace:
        counts = result.counts[namespace]
        assert counts.candidates > 0 and counts.seeded == counts.replayed == 0
    assert result.capture_ms == 0 and result.longest_capture_beside_stream_ms == 0


def test_an_error_of_one_client_ends_the_load_with_it_and_stops_the_others(model: Model):
    raised = RuntimeError("the third answer was one too many")
    ended: list[Request] = []

    def on_end(request: Request) -> None:
        ended.append(request)
        if len(ended) == 3:
            raise raised

    with opened(model) as engine:
        with pytest.raises(RuntimeError, match="one too many") as caught:
            load.run_load(engine, load.workload(1, 40, MIX), 3, on_end)
        assert caught.value is raised
        # Two others may have ended their request meanwhile, and neither sends another.
        assert len(ended) <= 5 and client_threads() == []
        # The engine goes on without them.
        assert load.run_load(engine, load.workload(1, 3, MIX), 3).num_tokens == 12


def test_a_request_that_cannot_run_ends_the_load_with_its_error(model: Model):
    jobs = [*load.workload(1, 4, MIX), Job((1, 2, 4096), SamplingParams(max_tokens=4))]
    with opened(model) as engine, pytest.raises(BadToken, match="4096 at position 2"):
        load.run_load(engine, jobs, 2)
    assert client_threads() == []


def test_an_error_inside_a_step_reaches_who_runs_the_load(model: Model, monkeypatch):
    run, count = StepRunner.run, []

    def failing(self, plan, observer=None):
        count.append(1)
        if len(count) == 9:
            raise RuntimeError("the ninth step failed")
        return run(self, plan, observer)

    with opened(model) as engine:
        monkeypatch.setattr(StepRunner, "run", failing)
        with pytest.raises(RuntimeError, match="the ninth step failed"):
            load.run_load(engine, load.workload(1, 40, MIX), 3)
        assert client_threads() == []


def test_an_interrupt_stops_the_clients(model: Model, monkeypatch):
    join, interrupted = threading.Thread.join, []

    def interrupting(self, timeout=None):
        if self.name == "client-0" and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        join(self, timeout)

    ended: list[Request] = []
    with opened(model) as engine:
        monkeypatch.setattr(threading.Thread, "join", interrupting)
        with pytest.raises(KeyboardInterrupt):
            load.run_load(engine, load.workload(1, 200, MIX), 3, ended.append)
        assert interrupted and len(ended) < 200 and client_threads() == []


class FaultyDriver:
    """A host driver whose launches compute nothing: what was there before is left."""

    def __init__(self) -> None:
        self._driver = open_driver("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def open(self, namespace: Namespace) -> Any:
        arena = self._driver.open(namespace)
        arena.launch = lambda executable: None
        return arena


@pytest.mark.parametrize("policy", ["off", "resident"])
def test_bytes_that_differ_at_a_replay_are_found(policy, model: Model):
    proof = measured(policy, model, driver=FaultyDriver()).proof
    assert not proof.is_equal and proof.differing_steps


def test_written_kv_that_differs_is_found(model: Model, monkeypatch):
    run, count = StepRunner.run, []

    def disturbed(self, plan, observer=None):
        logits = run(self, plan, observer)
        if observer is not None:  # on record; the plans that are run again have none
            count.append(1)
            if len(count) == 2:
                self.kv.k[0].view(-1)[16 * 64] += 1  # first row of block 1
        return logits

    monkeypatch.setattr(StepRunner, "run", disturbed)
    assert not measured("off", model, num_clients=1).proof.is_kv_equal


def test_percentiles_are_of_the_values_and_a_change_is_told_from_noise():
    spread = load.spread_of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (spread.p50, spread.p95, spread.mean) == (3.0, pytest.approx(4.8), 3.0)
    grown = load.change_of([1, 100, 10, 50], [2, 101, 11.5, 51])
    assert grown.mean == 1.125 and grown.is_growth and not grown.is_drop
    fallen = load.change_of([2, 101, 11.5, 51], [1, 100, 10, 50])
    assert fallen.is_drop and not fallen.is_growth
    noisy = load.change_of([1, 100, 10, 50], [9, 90, 21, 45])
    assert noisy.mean == 1.0 and not noisy.is_growth and not noisy.is_drop
    # One request says nothing about the noise, and no change is none.
    assert not load.change_of([1.0], [9.0]).is_growth
    same = load.change_of([1.0, 2.0], [1.0, 2.0])
    assert not same.is_growth and not same.is_drop


def test_each_first_token_is_timed_with_its_own_step(model: Model, monkeypatch):
    driver, plans = open_driver("cpu"), []
    after = StepMarks.after
    monkeypatch.setattr(
        StepMarks,
        "after",
        lambda self, plan, logits: (plans.append(plan), after(self, plan, logits)),
    )
    figures = measure_first_token(
        "resident", model, driver, num_rounds=4, token_ids=range(256), prompt_len=32
    )
    assert [(plan.namespace, plan.capacity) for plan in plans] == [(Namespace.PROMPT, 32)] * 7
    assert len({plan.parts[0].token_ids.tobytes() for plan in plans}) == 7  # fresh each time
    # A step lies within its own first token.
    assert 0 < figures.step_ms < figures.ttft_ms
    assert 0 < figures.added_ms < figures.ttft_ms
    assert 0 < figures.bare_ms < 10 * figures.ttft_ms  # beside the prompt, not in it
    assert figures.hit_rate == 1


def test_a_first_token_says_when_its_step_did_not_replay(model: Model):
    figures = measure_first_token(
        "off", model, open_driver("cpu"), num_rounds=1, token_ids=range(256), prompt_len=32
    )
    assert figures.hit_rate == 0

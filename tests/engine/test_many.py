"""Many requests at once: the same tokens as alone, nothing left behind, plans that replay."""

import random

import pytest
import torch

from graphseed.capture import Namespace
from graphseed.capture.events import Deferred, Released, Replayed, Seeded
from graphseed.engine import FinishReason, PromptTooLong, SamplingParams, Status
from graphseed.engine.record import PlanRecorder, replay
from tests.engine.conftest import answer, prompt_of

POLICIES = ("disabled", "off", "seed", "resident")


def run_all(engine, requests, cancels=()):
    """Step until every request has ended; `cancels` are (step, request)."""
    ended, steps = {}, 0
    while not engine.is_idle:
        for at, request in cancels:
            if at == steps:
                engine.cancel(request)
        for delta in engine.step():
            if delta.is_last:
                ended[id(delta.request)] = delta
        steps += 1
    assert set(ended) == {id(request) for request in requests}
    return ended


def params_of(number, new=8):
    sampled = {"temperature": 1.0, "top_k": 40, "seed": number} if number % 3 == 0 else {}
    return SamplingParams(max_tokens=new, ignore_eos=True, **sampled)


def assert_nothing_is_left(engine):
    assert engine.is_idle and not engine._answers
    assert engine.num_free_blocks == engine.config.num_blocks - 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gemma3"])
def test_requests_together_give_the_tokens_they_give_alone(preset, policy, make_engine, tmp_path):
    sizes = {"num_parallel": 4, "context_len": 256, "num_ubatch": 48}
    lengths = [1, 3, 16, 17, 40, 48, 49, 100, 130, 7, 64, 33]
    prompts = [prompt_of(n, seed=n) for n in lengths]
    prompts += [prompts[7][:80] + prompt_of(9, seed=5), list(prompts[8])]  # shared prefixes
    alone = make_engine("disabled", preset, **sizes)
    want = [
        alone.generate(prompt, params_of(number))[1].output_ids
        for number, prompt in enumerate(prompts)
    ]
    engine = make_engine(policy, preset, **sizes, reuses_prefixes=True)
    recorder = PlanRecorder(tmp_path / "plans.jsonl", engine)
    engine.observer = recorder
    requests = [engine.request(p, params_of(n)) for n, p in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    run_all(engine, requests)
    assert [request.output_ids for request in requests] == want
    assert_nothing_is_left(engine)
    recorder.close()
    report = replay(tmp_path / "plans.jsonl", engine.model, engine.driver)
    assert report.is_equal and report.num_steps > 20
    if policy in ("seed", "resident"):
        engine.settle()  # idle: what was observed is captured
        engine.observer = None
        for seed in range(2):
            engine.generate(prompt_of(100, 99 + seed), params_of(7))
        assert engine.tally.counts[Namespace.PROMPT].replayed > 0


def test_I9_a_record_that_was_tampered_with_is_found(make_engine, tmp_path):
    engine = make_engine("seed")
    path = tmp_path / "plans.jsonl"
    recorder = PlanRecorder(path, engine)
    engine.observer = recorder
    engine.generate(prompt_of(70), params_of(1))
    recorder.close()
    assert replay(path, engine.model, engine.driver).is_equal
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"token_ids": [', '"token_ids": [7, ', 1)
    first = lines[2].index("[7, ") + 4
    lines[2] = lines[2][:first] + lines[2][lines[2].index(",", first) + 2 :]  # same length
    path.write_text("\n".join(lines) + "\n")
    report = replay(path, engine.model, engine.driver)
    assert not report.is_equal and 1 in report.differing_steps


def test_I5_a_stream_beside_a_long_prompt_defers_the_release(make_engine, events):
    engine = make_engine("seed", num_parallel=2, num_ubatch=32, context_len=600)
    stream = engine.request(prompt_of(8, 1), SamplingParams(max_tokens=60, ignore_eos=True))
    engine.submit(stream)
    while not stream.output_ids:
        engine.step()
    engine.step()
    events.clear()
    long = engine.request(prompt_of(512, 2), SamplingParams(max_tokens=2, ignore_eos=True))
    engine.submit(long)
    run_all(engine, [stream, long])
    prompt = [e for e in events if e.namespace is Namespace.PROMPT]
    assert len([e for e in prompt if isinstance(e, Seeded)]) == 1
    assert len([e for e in prompt if isinstance(e, Replayed)]) == 15
    assert len([e for e in prompt if isinstance(e, Deferred)]) == 1
    assert [e.num_entries for e in prompt if isinstance(e, Released)][:1] == [1]


def test_a_stream_waits_for_one_chunk_and_a_prompt_for_one_decode_step(make_engine):
    engine = make_engine("off", num_parallel=2, num_ubatch=16, context_len=300)
    stream = engine.request(prompt_of(8), SamplingParams(max_tokens=40, ignore_eos=True))
    engine.submit(stream)
    while not stream.output_ids:
        engine.step()
    kinds = []

    class Watch:
        def before(self, plan):
            kinds.append(plan.namespace)

        def after(self, plan, logits):
            pass

    engine.observer = Watch()
    long = engine.request(prompt_of(200), SamplingParams(max_tokens=1, ignore_eos=True))
    engine.submit(long)
    while not long.output_ids:
        engine.step()
    assert all(a is not b for a, b in zip(kinds, kinds[1:], strict=False))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_request_resumes_with_the_same_result(policy, make_engine):
    sizes = {"num_parallel": 3, "context_len": 128, "num_ubatch": 32}
    prompts = [prompt_of(40, seed) for seed in range(3)]
    alone = make_engine("disabled", **sizes)
    want = [alone.generate(p, params_of(n, 60))[1].output_ids for n, p in enumerate(prompts)]
    engine = make_engine(policy, **sizes, kv_len=192)
    requests = [engine.request(p, params_of(n, 60)) for n, p in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    run_all(engine, requests)
    assert engine.scheduler.preempted > 0
    assert [request.output_ids for request in requests] == want
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_that_is_reused_gives_the_same_bytes_for_the_same_plan(
    policy, make_engine, tmp_path
):
    engine = make_engine(
        policy, num_parallel=2, num_ubatch=32, context_len=256, reuses_prefixes=True
    )
    recorder = PlanRecorder(tmp_path / "plans.jsonl", engine)
    engine.observer = recorder
    shared = prompt_of(100)
    for tail in range(4):
        engine.generate([*shared, *prompt_of(10, tail)], params_of(1, 3))
    recorder.close()
    assert replay(tmp_path / "plans.jsonl", engine.model, engine.driver).is_equal
    again = engine.request([*shared, 9], params_of(1, 2))
    engine.submit(again)
    run_all(engine, [again])
    assert again.num_cached == 96


def test_a_cancel_in_the_middle_of_a_seed_leaves_the_others_right(make_engine):
    sizes = {"num_parallel": 2, "num_ubatch": 32, "context_len": 256}
    want = make_engine("disabled", **sizes).generate(prompt_of(120, 1), params_of(1))[1]
    engine = make_engine("seed", **sizes)
    gone = engine.request(prompt_of(150, 2), params_of(2))
    kept = engine.request(prompt_of(120, 1), params_of(1))
    for request in (gone, kept):
        engine.submit(request)
    engine.step()  # seeds the first chunk of `gone`
    ended = run_all(engine, [gone, kept], cancels=[(0, gone)])
    assert gone.status is Status.FAILED and "cancelled" in str(ended[id(gone)].error)
    assert kept.output_ids == want.output_ids
    assert_nothing_is_left(engine)


def test_an_error_of_a_step_ends_its_requests_and_no_others(make_engine, monkeypatch):
    engine = make_engine("off", num_parallel=2, num_ubatch=16, context_len=128)
    first = engine.request(prompt_of(10, 1), params_of(1, 20))
    engine.submit(first)
    while not first.output_ids:
        engine.step()
    forward = type(engine.model).forward

    def fails_for_prompts(self, ids, positions, rows):
        if len(ids) == 16:
            raise ValueError("a bug for prompts")
        return forward(self, ids, positions, rows)

    monkeypatch.setattr(type(engine.model), "forward", fails_for_prompts)
    second = engine.request(prompt_of(12, 2), params_of(2))
    engine.submit(second)
    ended = run_all(engine, [first, second])
    assert str(ended[id(second)].error) == "a bug for prompts"
    assert first.finish_reason is FinishReason.MAX_TOKENS
    assert_nothing_is_left(engine)


def test_a_request_that_is_overdue_ends_with_its_deadline(make_engine):
    engine = make_engine("off", num_parallel=2)
    late = engine.request(prompt_of(20), params_of(1, 200))
    late.deadline_ns = late.timings.submitted_ns + 1
    fine = engine.request(prompt_of(20), params_of(1, 3))
    for request in (late, fine):
        engine.submit(request)
    ended = run_all(engine, [late, fine])
    assert "did not finish within" in str(ended[id(late)].error)
    assert fine.status is Status.FINISHED


def test_a_capture_beside_running_streams_is_bounded_and_measured(make_engine):
    engine = make_engine("resident", num_parallel=2, num_ubatch=16, context_len=256)
    stream = engine.request(prompt_of(8), params_of(1, 60))
    engine.submit(stream)
    while len(stream.output_ids) < 3:
        engine.step()
    other = engine.request(prompt_of(100), params_of(2, 2))
    engine.submit(other)
    run_all(engine, [stream, other])
    settler = engine._settler
    assert settler.last_ms > 0
    settler._budget_ms = 0.0  # nothing fits any more
    before = engine.tally.counts[Namespace.PROMPT].seeded
    third = engine.request(prompt_of(8), params_of(3, 40))
    fourth = engine.request(prompt_of(40, 9), params_of(4, 2))
    for request in (third, fourth):
        engine.submit(request)
    longest = settler.longest_streaming_ms
    run_all(engine, [third, fourth])
    assert settler.longest_streaming_ms == longest
    assert engine.tally.counts[Namespace.PROMPT].seeded >= before


@pytest.mark.parametrize("broken", ["take", "digest"])
def test_an_error_after_sampling_ends_one_request_and_keeps_what_others_got(
    broken, make_engine, monkeypatch
):
    from graphseed.engine.answer import Answer
    from graphseed.engine.kv import KvMemory

    engine = make_engine("off", num_parallel=3)
    requests = [engine.request(prompt_of(5, seed), params_of(1, 1)) for seed in range(3)]
    for request in requests:
        engine.submit(request, kv_digest=True)
    real, calls = (Answer.take, KvMemory.digest)[broken == "digest"], []

    def fails_second(self, given):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("x") if broken == "digest" else ValueError("text")
        return real(self, given)

    target = (Answer, "take") if broken == "take" else (KvMemory, "digest")
    monkeypatch.setattr(*target, fails_second)
    ended = run_all(engine, requests)
    statuses = [request.status for request in requests]
    assert statuses == [Status.FINISHED, Status.FAILED, Status.FINISHED]
    assert ended[id(requests[1])].error is not None
    assert ended[id(requests[0])].kv_digest is not None
    assert_nothing_is_left(engine)


def test_a_request_that_no_longer_fits_after_a_resize_is_refused_alone(make_engine):
    engine = make_engine("off")
    request = engine.request(prompt_of(100), params_of(1))
    engine.resize(64)
    with pytest.raises(PromptTooLong, match="100 tokens and the context holds 64"):
        engine.submit(request)
    assert len(engine.generate(prompt_of(20), params_of(1, 2))[1].output_ids) == 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_two_hundred_mixed_requests(policy, make_engine, tmp_path):
    rng = random.Random(7)
    sizes = {"num_parallel": 8, "context_len": 4096 + 64, "num_ubatch": 512}
    base = prompt_of(2000, 11)
    prompts = []
    for number in range(200):
        length = min(4000, int(10 ** rng.uniform(0, 3.6)))
        shared = base[: rng.choice((0, 0, 64, 500))][:length]
        prompts.append(shared + prompt_of(length - len(shared), number))
    news = [rng.randint(1, 64) for _ in prompts]
    engine = make_engine(policy, **sizes, kv_len=16384, reuses_prefixes=True)
    recorder = PlanRecorder(tmp_path / "plans.jsonl", engine)
    engine.observer = recorder
    requests = [engine.request(p, params_of(n, news[n])) for n, p in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    cancelled = rng.sample(requests, 20)
    run_all(engine, requests, [(rng.randint(0, 600), request) for request in cancelled])
    recorder.close()
    assert_nothing_is_left(engine)
    assert replay(tmp_path / "plans.jsonl", engine.model, engine.driver).is_equal
    finished = [n for n, request in enumerate(requests) if request.status is Status.FINISHED]
    assert len(finished) >= 180
    alone = make_engine("disabled", **sizes)
    for number in finished:
        want = alone.generate(prompts[number], params_of(number, news[number]))[1].output_ids
        assert requests[number].output_ids == want
    assert answer(engine, prompts[0], new=2).tokens

"""Requests on one engine: errors that name the numbers, ends of answers, streaming."""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from graphseed.capture import Closed, Namespace
from graphseed.engine import (
    BadParameter,
    BadToken,
    DeviceMemoryError,
    EmptyPrompt,
    EngineBusy,
    EngineConfig,
    EngineCore,
    FinishReason,
    NotFinite,
    PromptTooLong,
    SamplingParams,
    Status,
)
from graphseed.engine.request import TokenIds, checked_prompt
from tests.engine.conftest import answer, prompt_of


def assert_usable(engine):
    free = engine.num_free_blocks
    assert len(answer(engine, prompt_of(40), new=2).tokens) == 2
    assert engine.num_free_blocks == free == engine.config.num_blocks - 1


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], EmptyPrompt, "0 tokens"),
        ([1] * 256, PromptTooLong, "256 tokens and the context holds 256"),
        ([1, 2, 99999], BadToken, "token id 99999 at position 2 .* 0 to 511"),
        ([-1], BadToken, "token id -1 at position 0"),
        ([1, 512], BadToken, "token id 512 at position 1"),
        ([1, 1 << 70], BadToken, "token id 1180591620717411303424 at position 1"),
        (np.array([5, -2]), BadToken, "token id -2 at position 1"),
        (np.array([5, 512], np.uint16), BadToken, "token id 512 at position 1"),
        (np.array([5.0]), BadToken, "token 5.0 at position 0 is a float"),
        (np.array([True]), BadToken, "token True at position 0 is a bool"),
        (np.array([[5, 6]]), BadToken, "token .* at position 0 is a list"),
        (np.array([], np.int64), EmptyPrompt, "0 tokens"),
    ],
)
def test_a_bad_prompt_is_one_clear_error_and_the_next_request_works(
    prompt, error, words, make_engine
):
    engine = make_engine()
    with pytest.raises(error, match=words):
        engine.stream(prompt)
    assert_usable(engine)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1.0}, "temperature .* is -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -2}, "seed"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_a_bad_parameter_names_itself(params, words):
    with pytest.raises(BadParameter, match=words):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "config", [{"context_len": 1}, {"num_ubatch": 0}, {"num_parallel": 0}, {"block_len": 24}]
)
def test_a_bad_engine_size_names_itself(config):
    with pytest.raises(BadParameter):
        EngineConfig(**config)


def test_out_of_memory_in_a_step_ends_the_request_and_gives_graphs_back(make_engine, monkeypatch):
    engine = make_engine("seed")
    answer(engine, prompt_of(32), new=1)
    assert engine.cache.spaces[Namespace.PROMPT].num_held == 1
    monkeypatch.setattr(
        type(engine.model), "forward", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("x"))
    )
    with pytest.raises(DeviceMemoryError, match=r"a prompt step ran out, [\d,]+ MiB are free"):
        list(engine.stream(prompt_of(5)))
    monkeypatch.undo()
    assert engine.cache.spaces[Namespace.PROMPT].num_held == 0
    assert_usable(engine)


def test_kv_memory_that_cannot_fit_names_the_bytes_and_the_engine_keeps_its_size(make_engine):
    engine = make_engine()
    with pytest.raises(DeviceMemoryError, match=r"KV memory of \d+ tokens needs [\d,]+ MiB"):
        engine.resize(1 << 34)
    assert engine.config.context_len == 256
    assert_usable(engine)


def test_an_error_of_the_model_reaches_the_caller_and_the_next_request_works(
    make_engine, monkeypatch
):
    engine = make_engine("seed")

    def broken(*_):
        raise ValueError("a bug in the model")

    monkeypatch.setattr(type(engine.model), "forward", broken)
    with pytest.raises(ValueError, match="a bug in the model"):
        list(engine.stream(prompt_of(20)))
    monkeypatch.undo()
    assert_usable(engine)


def test_a_stream_that_is_closed_early_gives_its_blocks_back(make_engine):
    engine = make_engine()
    stream = engine.stream(prompt_of(100), SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert engine.num_free_blocks < engine.config.num_blocks - 1
    stream.close()
    assert_usable(engine)


def test_an_answer_ends_at_max_tokens_or_at_the_end_of_the_context(make_engine):
    engine = make_engine(context_len=64)
    for limit, num_new, reason in (
        (3, 3, FinishReason.MAX_TOKENS), (-1, 14, FinishReason.CONTEXT_FULL),
    ):  # fmt: skip
        params = SamplingParams(max_tokens=limit, ignore_eos=True)
        _, request = engine.generate(prompt_of(50), params)
        assert (len(request.output_ids), request.finish_reason) == (num_new, reason)


def test_an_answer_ends_at_an_end_of_sequence_token_which_is_not_shown(make_engine):
    engine = make_engine()
    first = answer(engine, prompt_of(50), new=6)
    eos = first.tokens[2]
    model = dataclasses.replace(engine.model, eos_ids=frozenset({eos}))
    engine = EngineCore(model, engine.driver, engine.config)
    _, request = engine.generate(prompt_of(50), SamplingParams(max_tokens=6))
    engine.close()
    assert request.output_ids == list(first.tokens[: first.tokens.index(eos) + 1])
    assert request.finish_reason is FinishReason.END_OF_SEQUENCE


def test_an_answer_ends_before_a_stop_string(make_engine):
    engine = make_engine()
    text = answer(engine, prompt_of(50), new=40).text
    stop = text[5:8]
    got, request = engine.generate(
        prompt_of(50), SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
    )
    assert got == text[: text.index(stop)]
    assert (request.finish_reason, request.stopping_word) == (FinishReason.STOP_STRING, stop)


def test_a_seed_decides_a_sampled_answer_under_every_policy(make_engine):
    engines = [make_engine(policy) for policy in ("disabled", "off", "seed", "resident")]
    sampling = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
    answers = {
        seed: {answer(engine, prompt_of(50), new=12, seed=seed, **sampling).tokens
               for engine in engines for _ in range(2)}
        for seed in (1, 2)
    }  # fmt: skip
    assert len(answers[1]) == len(answers[2]) == 1
    assert answers[1] != answers[2]


def test_a_closed_engine_says_so_and_may_be_closed_again(make_engine):
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        engine.stream([1, 2])


@pytest.mark.parametrize("token", [1.5, "a", None, True])
def test_a_token_that_is_no_whole_number_is_named(token, make_engine):
    with pytest.raises(BadToken, match="at position 1 is a .*; expected a whole number"):
        make_engine().stream([1, token])


@pytest.mark.parametrize("bad", [-1, 512, 1 << 70])
@pytest.mark.parametrize("position", [0, 1500, 2999])
def test_an_id_out_of_range_is_found_among_many(bad, position):
    ids = [511, 0] * 1500
    assert checked_prompt(ids, 4096, 512) == tuple(ids)
    ids[position] = bad
    with pytest.raises(BadToken, match=f"token id {bad} at position {position} .* 0 to 511"):
        checked_prompt(ids, 4096, 512)


@pytest.mark.parametrize("num_ids", [3, 3000])
def test_ids_known_to_be_under_a_bound_are_looked_at_where_the_bound_is_too_high(num_ids):
    ids = TokenIds.known([511] * num_ids, below=512)
    assert checked_prompt(ids, 4096, 512) is ids
    assert checked_prompt(ids, 4096, 600) is ids
    with pytest.raises(BadToken, match="token id 511 at position 0 .* 0 to 509"):
        checked_prompt(ids, 4096, 510)


def test_prompts_of_numpy_and_torch_are_prompts(make_engine):
    engine, prompt = make_engine(), prompt_of(20)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    want = engine.generate(prompt, params)[1].output_ids
    for form in (np.array(prompt), torch.tensor(prompt), iter(prompt)):
        assert engine.generate(form, params)[1].output_ids == want


def test_a_resize_under_a_stream_is_refused_and_the_stream_goes_on(make_engine):
    engine = make_engine()
    want = answer(engine, prompt_of(40), new=6).tokens
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    stream = engine.stream(prompt_of(40), params)
    first = next(stream)
    with pytest.raises(EngineBusy, match="1 answers are being streamed"):
        engine.resize(512)
    rest = [delta.token_id for delta in stream]
    assert (first.token_id, *rest) == want
    engine.resize(512)
    assert answer(engine, prompt_of(40), new=6).tokens == want


def test_a_resize_that_fails_in_any_way_leaves_the_engine_as_it_was(make_engine, monkeypatch):
    from graphseed.engine import step

    engine = make_engine()
    real, calls = step.Staging, []

    def fails_once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return real(*args)

    monkeypatch.setattr(step, "Staging", fails_once)
    with pytest.raises(DeviceMemoryError, match="static buffers ran out"):
        engine.resize(512)
    assert engine.config.context_len == 256
    assert_usable(engine)


def test_an_engine_that_is_closed_under_a_stream_ends_it_with_one_clear_error(make_engine):
    engine = make_engine()
    stream = engine.stream(prompt_of(40), SamplingParams(max_tokens=6, ignore_eos=True))
    request = next(stream).request
    engine.close()
    with pytest.raises(Closed):
        next(stream)
    assert request.status is Status.FAILED


def test_an_engine_that_is_closed_after_the_last_token_leaves_the_answer_whole(make_engine):
    engine = make_engine()
    stream = engine.stream(prompt_of(40), SamplingParams(max_tokens=1, ignore_eos=True))
    assert next(stream).request.status is Status.FINISHED
    engine.close()
    assert list(stream) == []


def test_an_engine_may_be_made_in_inference_mode_and_on_another_thread(make_engine):
    want = answer(make_engine(), prompt_of(40), new=4)
    got = []
    with torch.inference_mode():
        engine = make_engine(is_warm=False)
    thread = threading.Thread(target=lambda: got.append(answer(engine, prompt_of(40), new=4)))
    thread.start()
    thread.join()
    assert got == [want]


def test_resident_captures_for_readers_that_stop_early(make_engine):
    engine = make_engine("resident")
    for _ in range(3):
        stream = engine.stream(prompt_of(16), SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        stream.close()
    counts = engine.tally.counts[Namespace.PROMPT]
    assert (counts.seeded, counts.replayed) == (1, 2)


def test_replaced_weights_are_seen_once_the_engine_is_told(make_engine):
    engine = make_engine(preset="tiny-qwen3")
    before = answer(engine, prompt_of(40), new=3)
    norm = engine.model.module.model.norm
    old = norm.weight
    norm.weight = torch.nn.Parameter(old.detach() * 2, requires_grad=False)
    try:
        assert engine.weights_changed() == ("model.norm.weight",)
        assert answer(engine, prompt_of(40), new=3).logits != before.logits
    finally:
        norm.weight = old
    engine.weights_changed()
    assert answer(engine, prompt_of(40), new=3) == before


def test_logits_that_are_no_numbers_are_an_error_and_not_an_answer(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(
        type(engine.model), "forward",
        lambda self, ids, positions, rows: torch.full((1, 512), float("nan"), device=ids.device),
    )  # fmt: skip
    for temperature in (0.0, 1.0):
        with pytest.raises(NotFinite, match="after position 19 is nan"):
            engine.generate(prompt_of(20), SamplingParams(temperature=temperature))


def test_tokens_arrive_one_by_one_and_their_text_is_the_answer(make_engine):
    engine = make_engine()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    deltas = list(engine.stream(prompt_of(20), params))
    assert len(deltas) == 10
    whole = engine.model.decode(deltas[-1].request.output_ids)
    assert "".join(delta.text for delta in deltas) == whole

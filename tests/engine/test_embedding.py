"""Embeddings: hidden states of real rows, over chunks and beside others, by graphs or without."""

import pytest
import torch

from graphseed.capture import Namespace
from graphseed.engine import BadParameter, Engine, EngineConfig, EngineCore, Pooling, SamplingParams
from graphseed.engine.record import PlanRecorder, replay
from tests.engine.conftest import SELECTIONS, driver_of, model_of, prompt_of


def core_of(policy="seed", preset="tiny-llama", embeds=True, **sizes):
    driver = driver_of("cpu")
    config = EngineConfig(
        **{"context_len": 256, "num_ubatch": 32, "num_parallel": 4, "embeds": embeds, **sizes}
    )
    model = model_of(preset, driver.device, "fp32")
    return EngineCore(model, driver, config, SELECTIONS[policy])


def embed(core, *prompts, pooling=Pooling.MEAN):
    requests = [core.embedding_request(prompt, pooling) for prompt in prompts]
    for request in requests:
        core.submit(request)
    while not core.is_idle:
        for delta in core.step():
            assert delta.error is None
    core.settle()
    return [torch.tensor(request.embedding) for request in requests]


def plain_hidden(core, prompt):
    """Of transformers' own attention, the whole prompt at once."""
    import copy

    module = copy.deepcopy(core.model.module)
    module.set_attn_implementation("sdpa")
    with torch.no_grad():
        ids = torch.tensor([prompt])
        return module.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gemma3", "tiny-qwen3-moe"])
def test_an_embedding_is_the_pooled_hidden_states_of_the_plain_model(preset):
    core = core_of("disabled", preset)
    prompt = prompt_of(75)
    hidden = plain_hidden(core, prompt)
    # Chunked attention adds in another order: 2e-4 of float32 numbers near 1.
    close = {"atol": 2e-4, "rtol": 2e-4}
    for pooling, want in (
        (Pooling.MEAN, hidden.mean(0, keepdim=True)), (Pooling.CLS, hidden[:1]),
        (Pooling.LAST, hidden[-1:]), (Pooling.NONE, hidden),
    ):  # fmt: skip
        (got,) = embed(core, prompt, pooling=pooling)
        torch.testing.assert_close(got, want, **close)
    core.close()


@pytest.mark.parametrize("policy", ["off", "seed", "resident"])
def test_I9_embeddings_are_the_same_bytes_under_every_policy_and_replay(policy):
    prompts = [prompt_of(n, n) for n in (1, 16, 40, 75)]
    want = embed(core_of("disabled"), *prompts)
    core = core_of(policy)
    for _ in range(3):
        got = embed(core, *prompts)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    counts = core.tally.counts[Namespace.PROMPT]
    assert bool(counts.replayed) == (policy != "off")
    assert core.num_free_blocks == core.config.num_blocks - 1
    core.close()


def test_embeddings_and_answers_share_the_engine_and_no_step(tmp_path):
    core = core_of("seed")
    core.observer = recorder = PlanRecorder(tmp_path / "plans.jsonl", core)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    answers = [core.request(prompt_of(20, n), params) for n in range(2)]
    embeddings = [core.embedding_request(prompt_of(20, n), Pooling.LAST) for n in range(2)]
    for request in (answers[0], embeddings[0], answers[1], embeddings[1]):
        core.submit(request)
    while not core.is_idle:
        assert all(delta.error is None for delta in core.step())
    alone = core_of("disabled")
    for n in range(2):
        assert answers[n].output_ids == alone.generate(prompt_of(20, n), params)[1].output_ids
        (want,) = embed(alone, prompt_of(20, n), pooling=Pooling.LAST)
        assert torch.equal(torch.tensor(embeddings[n].embedding), want)
    recorder.close()
    report = replay(tmp_path / "plans.jsonl", core.model, core.driver)
    assert report.is_equal and report.num_steps >= 4
    core.close()
    alone.close()


def test_an_embedding_never_reuses_a_prefix_whose_hidden_states_are_gone():
    core = core_of("off", reuses_prefixes=True)
    prompt = prompt_of(64)
    core.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    (got,) = embed(core, prompt)
    (want,) = embed(core_of("disabled"), prompt)
    assert torch.equal(got, want)
    core.close()


@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_preempted_embedding_pools_each_row_once(pooling):
    sizes = {"context_len": 128, "num_ubatch": 16}
    core = core_of("off", kv_len=128, num_parallel=2, reuses_prefixes=False, **sizes)
    answer = core.request(prompt_of(10), SamplingParams(max_tokens=60, ignore_eos=True))
    core.submit(answer)
    (got,) = embed(core, prompt_of(100), pooling=pooling)
    assert core.scheduler.preempted == 1 and len(answer.output_ids) == 60
    alone = core_of("off", **sizes)
    (want,) = embed(alone, prompt_of(100), pooling=pooling)
    assert torch.equal(got, want)
    core.close()
    alone.close()


def test_an_engine_without_embeddings_says_how_to_get_them():
    core = core_of(embeds=False)
    with pytest.raises(BadParameter, match="--embeddings"):
        core.embedding_request([1, 2], Pooling.MEAN)
    core.close()


def test_the_thread_embeds_too():
    with Engine(core_of()) as engine:
        request = engine.core.embedding_request(prompt_of(40), Pooling.MEAN)
        (delta,) = engine.start(request)
        assert delta.is_last and len(request.embedding) == 1
        assert len(request.embedding[0]) == engine.core.model.hidden_size

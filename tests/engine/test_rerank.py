"""Scores: a reranker's head on the last row of a prompt, by graphs or without."""

import copy

import pytest
import torch

import graphseed
from graphseed.capture import Namespace
from graphseed.engine import Engine, EngineConfig, EngineCore, ModelCannot, Pooling
from graphseed.engine.record import PlanRecorder, replay
from graphseed.models.load import random_model
from graphseed.models.presets import preset_config
from tests.engine.conftest import SELECTIONS, driver_of, model_of, prompt_of
from tests.models.test_heads import FAMILIES

RERANKER = "tiny-qwen3-reranker"


def core_of(policy="seed", model=None, device="cpu", dtype="fp32", **sizes):
    driver = driver_of(device)
    config = EngineConfig(**{"context_len": 256, "num_ubatch": 32, "num_parallel": 4, **sizes})
    model = model or model_of(RERANKER, driver.device, dtype)
    return EngineCore(model, driver, config, SELECTIONS[policy])


def scored(core, *prompts):
    requests = [core.score_request(prompt) for prompt in prompts]
    for request in requests:
        core.submit(request)
    while not core.is_idle:
        for delta in core.step():
            assert delta.error is None
    core.settle()
    return requests


def scores(core, *prompts):
    return [request.score for request in scored(core, *prompts)]


def plain_score(model, prompt):
    """Of transformers' own forward of the classifier, the whole prompt at once."""
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        return module(torch.tensor([prompt]), use_cache=False).logits.item()


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_score_is_the_plain_models(preset):
    config = preset_config(preset, architectures=[FAMILIES[preset]], num_labels=1)
    model = random_model(config, device="cpu", dtype="fp32")
    core = core_of("disabled", model)
    for num_tokens in (1, 32, 75):
        prompt = prompt_of(num_tokens, num_tokens)
        (got,) = scores(core, prompt)
        # Another order of summation: paged attention in chunks against one dense softmax. float32
        # has 24 bits; a few hundred terms lose up to about 8 of them, of scores near 1.
        assert got == pytest.approx(plain_score(model, prompt), abs=2e-4, rel=2e-4)
    assert len({*scores(core, *(prompt_of(20, n) for n in range(5)))}) == 5
    core.close()


def test_a_pair_scores_as_transformers_scores_the_tokenized_pair_with_padding():
    core = core_of("off")
    model, pairs = core.model, [("a query", "a document"), ("a query", "another, longer one")]
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    batch = model.tokenizer(
        [query for query, _ in pairs], [document for _, document in pairs],
        padding=True, return_tensors="pt",
    )  # fmt: skip
    with torch.no_grad():
        want = module(batch.input_ids, batch.attention_mask, use_cache=False).logits[:, 0]
    got = scores(core, *(model.pair(*pair) for pair in pairs))
    assert got == pytest.approx(want.tolist(), abs=2e-4, rel=2e-4)  # as above
    core.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["off", "seed", "resident"])
def test_I9_scores_are_the_same_bits_under_every_policy_and_replay(policy, dtype, device):
    prompts = [prompt_of(n, n) for n in (1, 16, 40, 75)]
    plain = core_of("disabled", device=device, dtype=dtype)
    want = scores(plain, *prompts)
    plain.close()
    core = core_of(policy, device=device, dtype=dtype)
    core.warm_up()
    for _ in range(3):
        assert scores(core, *prompts) == want
    counts = core.tally.counts[Namespace.PROMPT]
    assert bool(counts.replayed) == (policy != "off")
    assert core.tally.counts[Namespace.DECODE].candidates == 0
    assert core.num_free_blocks == core.config.num_blocks - 1
    core.close()


def test_under_resident_the_second_prompt_of_a_size_is_a_replay():
    core = core_of("resident")
    core.warm_up()
    seen = [scored(core, prompt_of(20 + n, n))[0].observations for n in range(3)]
    assert [(one.num_steps, one.num_replayed) for one in seen] == [(1, 0), (1, 1), (1, 1)]
    counts = core.tally.counts[Namespace.PROMPT]
    assert (counts.candidates, counts.seeded, counts.replayed, counts.direct) == (3, 1, 2, 1)
    core.close()


def test_scores_and_embeddings_share_a_step_and_no_row(tmp_path):
    core = core_of("seed")
    core.observer = recorder = PlanRecorder(tmp_path / "plans.jsonl", core)
    prompts = [prompt_of(9, n) for n in range(3)]
    requests = [core.score_request(prompt) for prompt in prompts]
    requests.append(core.embedding_request(prompts[0], Pooling.LAST))
    for request in requests:
        core.submit(request)
    while not core.is_idle:
        assert all(delta.error is None for delta in core.step())
    alone = core_of("disabled")
    # Packed into one step, the products are of another padded size: float32's rounding.
    for request, prompt in zip(requests, prompts, strict=False):
        assert request.score == pytest.approx(scores(alone, prompt)[0], abs=1e-5)
    assert requests[3].score is None and requests[0].embedding is None
    (head,) = core.model.scores(torch.tensor(requests[3].embedding)).tolist()
    assert head == pytest.approx(requests[0].score, abs=1e-5)  # as above
    recorder.close()
    assert replay(tmp_path / "plans.jsonl", core.model, core.driver).is_equal
    core.close()
    alone.close()


def test_a_reranker_scores_without_being_asked_to_embed_and_generates_nothing():
    core = core_of("off", embeds=False)
    assert core.config.embeds
    with pytest.raises(ModelCannot, match="is a reranker and cannot generate"):
        core.request([1, 2])
    with pytest.raises(ModelCannot):
        core.generate([1, 2])
    assert len(scores(core, [1, 2])) == 1  # and goes on
    core.close()


def test_a_causal_model_scores_nothing_and_says_what_it_lacks():
    core = core_of("off", model_of("tiny-llama", "cpu", "fp32"), embeds=True)
    with pytest.raises(ModelCannot, match="causal model and cannot rerank: .*classification head"):
        core.score_request([1, 2])
    core.close()


def test_the_thread_scores_more_prompts_than_may_wait():
    with Engine(core_of("resident", max_waiting=1, num_parallel=2)) as engine:
        prompts = [prompt_of(12, n) for n in range(9)]
        makers = [lambda prompt=prompt: engine.core.score_request(prompt) for prompt in prompts]
        got = [request.score for request in engine.run(makers)]
    assert got == scores(core_of("disabled", num_parallel=2), *prompts)


def test_the_python_interface_reranks_in_the_order_of_the_documents():
    documents = ["a wolf", "an otter", "a wolf"]
    with graphseed.Engine(f"random:{RERANKER}", device="cpu", dtype="fp32") as engine:
        got = engine.rerank("dogs", documents)
        model = engine.model
        with pytest.raises(TypeError, match="expected a list of texts"):
            engine.rerank("dogs", "a wolf")
        with pytest.raises(ModelCannot):
            engine.generate(["a"])
    assert got[0] == got[2] != got[1]
    want = plain_score(model, model.pair("dogs", "an otter"))
    assert got[1] == pytest.approx(want, abs=2e-4, rel=2e-4)  # as above
    with (
        graphseed.Engine("random:tiny-llama", device="cpu") as engine,
        pytest.raises(ModelCannot, match="cannot rerank"),
    ):
        engine.rerank("dogs", documents)

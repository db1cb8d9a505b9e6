"""The comparison with the plain Hugging Face forward: close where it is right, far elsewhere."""

from dataclasses import replace

import pytest
import torch

from graphseed.drivers import open_driver
from graphseed.measure.verify.against_hf import compare_with_hf
from graphseed.measure.verify.proof import SequenceReads, VerifySettings, verify
from graphseed.models import Model, load_model
from graphseed.models.attention import ATTENTION_NAME

DRIVER = open_driver("cpu")
SETTINGS = VerifySettings(
    policies=("off",), max_tokens=70, num_rounds=2, num_ubatch=32, seed=5, keeps_reads=True
)


def loaded(preset: str, dtype: str) -> Model:
    return load_model(
        f"random:{preset}", device="cpu", dtype=dtype, bf16_is_fast=False, progress=False
    )


@pytest.fixture(scope="module")
def reads(model: Model) -> list[SequenceReads]:
    return verify(model, DRIVER, SETTINGS).reads


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe"])
def test_every_family_is_close_and_runs_as_before_afterwards(preset: str, dtype: str) -> None:
    model = loaded(preset, dtype)
    module = model.module
    before = module.config._experts_implementation
    result = verify(model, DRIVER, SETTINGS)
    against = compare_with_hf(model, DRIVER, result.reads)
    assert against.is_close and against.largest_share > 0.0
    assert against.num_rows == sum(len(s.logits) for s in result.reads) > 50
    # What differs is a near tie: no more than twice what the logits themselves differ by.
    assert all(token.gap <= 2 * against.largest for token in against.tokens)
    assert module.config._attn_implementation == ATTENTION_NAME
    assert module.config._experts_implementation == before
    assert (against.experts == "eager") == (preset == "tiny-qwen3-moe")
    again = verify(model, DRIVER, SETTINGS)
    assert [row.digests for row in again.cases] == [row.digests for row in result.cases]


def test_packed_cached_and_decoded_rows_are_compared_too(reads: list[SequenceReads]) -> None:
    by_case = {sequence.case for sequence in reads}
    assert {name.partition(" ")[0] for name in by_case} >= {"packed", "decode", "33", "32", "1"}
    cached = [s for s in reads if s.case.startswith("32 tokens cached")]
    assert [len(s.token_ids) for s in cached] == [33, 49, 33, 35, 41]
    assert all(s.token_ids[:32] == cached[0].token_ids[:32] for s in cached)
    assert not any(s.case.startswith("released") for s in reads)  # of the first round alone


def test_a_weight_that_is_another_is_far_and_its_greedy_tokens_have_margins(
    reads: list[SequenceReads],
) -> None:
    other = loaded("tiny-llama", "fp32")
    other.module.model.layers[0].self_attn.v_proj.weight.mul_(1.2)
    against = compare_with_hf(other, DRIVER, reads)
    assert not against.is_close and against.largest_share > 100 * against.tolerance
    assert against.tokens
    for token in against.tokens:
        assert token.token != token.hf_token
        assert 0 < token.margin <= token.gap


def test_a_position_that_is_off_by_one_is_far(model: Model, reads: list[SequenceReads]) -> None:
    shifted = [
        replace(s, logits={n - 1: logits for n, logits in s.logits.items() if n}) for s in reads
    ]
    against = compare_with_hf(model, DRIVER, [s for s in shifted if s.logits])
    assert against.largest_share > 0.5


def test_the_margin_is_the_plain_forwards_and_the_worst_row_is_named(
    model: Model, reads: list[SequenceReads]
) -> None:
    sequence = reads[-1]
    position, logits = next(iter(sequence.logits.items()))
    second = int(logits.topk(2).indices[1])
    disturbed = logits.clone()
    disturbed[second] = logits.max() + 1.0
    against = compare_with_hf(model, DRIVER, [replace(sequence, logits={position: disturbed})])
    [token] = against.tokens
    assert (token.token, token.hf_token) == (second, int(logits.argmax()))
    margin = float(logits.topk(2).values[0] - logits.topk(2).values[1])
    # float32 sums in another order, as the module's tolerance has it.
    assert token.margin == pytest.approx(margin, abs=1e-4) and token.gap == token.margin
    assert (against.worst_case, against.worst_position) == (sequence.case, position)
    assert not against.is_close
    assert against.as_record()["num_differing_tokens"] == 1
    no_number = torch.full_like(logits, float("nan"))
    assert not compare_with_hf(
        model, DRIVER, [replace(sequence, logits={position: no_number})]
    ).is_close

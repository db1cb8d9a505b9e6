"""The engine against the plain Hugging Face forward of the same weights."""

import pytest
import torch

from graphseed.models import load_model
from tests.engine.conftest import answer, driver_of, prompt_of

FAMILIES = ("tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe")
# Another order of summation: paged attention against one dense softmax, and batched against
# looped experts. float32 has 24 bits; a few hundred terms lose up to about 8 of them.
TOLERANCE = 2e-4


@pytest.mark.parametrize("preset", FAMILIES)
def test_logits_are_close_and_greedy_tokens_equal_in_fp32(preset, device, make_engine):
    driver = driver_of(device)
    plain = load_model(
        f"random:{preset}", device=driver.device, dtype="fp32", bf16_is_fast=False, progress=False
    )
    plain.module.set_attn_implementation("eager")
    prompt = prompt_of(100)
    engine = make_engine("seed", preset, num_ubatch=32)
    for _ in range(2):
        got = answer(engine, prompt, new=6)
    ids = prompt + list(got.tokens)
    with torch.no_grad():
        want = plain.module(torch.tensor([ids], device=driver.device), use_cache=False).logits[0]
    read = [31, 63, 95, *range(99, 99 + 6)]  # the last row of each chunk, then each decode step
    assert len(got.logits) == len(read)
    for row, raw in zip(read, got.logits, strict=True):
        mine = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1)
        reference = want[row].float().cpu()
        assert (mine - reference).abs().max() <= TOLERANCE * max(1.0, reference.abs().max())
    greedy = want[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert greedy == list(got.tokens)

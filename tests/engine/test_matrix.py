"""I9: the same bytes under every policy, over families, dtypes, chunk sizes and positions."""

import pytest

from graphseed.capture import Namespace
from tests.engine.conftest import answer, prompt_of

FAMILIES = ("tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe")
# Chunk size and prompt length: several chunks each, so that later positions are replayed too.
SHAPES = [(1, 4), (16, 37), (17, 51), (512, 1100)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_ubatch", "num_tokens"), SHAPES)
@pytest.mark.parametrize("preset", FAMILIES)
def test_I9_logits_and_kv_are_the_same_bytes_under_every_policy(
    preset, num_ubatch, num_tokens, dtype, make_engine
):
    sizes = {"num_ubatch": num_ubatch, "context_len": num_tokens + 8}
    prompts = [prompt_of(num_tokens, seed) for seed in (1, 2)]
    reference = make_engine("disabled", preset, dtype, **sizes)
    want = [answer(reference, prompt) for prompt in prompts]
    for policy in ("off", "seed", "resident"):
        engine = make_engine(policy, preset, dtype, **sizes)
        for _ in range(2):
            assert [answer(engine, prompt) for prompt in prompts] == want, policy
        counts = engine.tally.counts
        assert counts[Namespace.DECODE].replayed > 0
        assert (counts[Namespace.PROMPT].replayed > 0) == (policy != "off")
        assert counts[Namespace.PROMPT].refused == counts[Namespace.DECODE].refused == 0

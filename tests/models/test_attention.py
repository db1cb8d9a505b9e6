"""The step, its context, and Hugging Face models that attend through them."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from graphseed.models.attention import (
    ATTENTION_NAME,
    AttentionStep,
    attention_context,
    hf_attention,
    register,
)
from graphseed.models.errors import ModelUnsupported
from graphseed.models.kernels.plan import AttentionPlan

PLAN = AttentionPlan(16, 16, 1, 4, 1)
BLOCK_SIZE = 16
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": lambda: LlamaConfig(**BASE),
    "qwen3": lambda: Qwen3Config(**BASE),
    "mistral_window": lambda: MistralConfig(**BASE, sliding_window=11),
    "gemma2_soft_cap": lambda: Gemma2Config(
        **BASE, sliding_window=11, layer_types=MIXED, attn_logit_softcapping=3.0
    ),
    "gemma3_scale": lambda: Gemma3TextConfig(
        **BASE, sliding_window=11, layer_types=MIXED, query_pre_attn_scalar=32
    ),
    "gpt_oss_sinks": lambda: GptOssConfig(
        **BASE, sliding_window=11, layer_types=MIXED, num_local_experts=2, num_experts_per_tok=1
    ),
}


def caches(config: PretrainedConfig, num_blocks: int) -> tuple[torch.Tensor, ...]:
    shape = (num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
    nan = float("nan")  # a row nobody wrote must not matter
    return tuple(torch.full(shape, nan) for _ in range(config.num_hidden_layers))


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@torch.no_grad()
def run_packed(model: Any, prompts: list[torch.Tensor], chunks: list[int]) -> list[torch.Tensor]:
    """Logits of every prompt, all of them packed into each step, `chunks` tokens at a time."""
    per_seq = -(-max(map(len, prompts)) // BLOCK_SIZE)
    table = torch.randperm(per_seq * len(prompts)).int().view(len(prompts), per_seq) + 1
    num_blocks = 1 + table.numel()
    k_caches, v_caches = caches(model.config, num_blocks), caches(model.config, num_blocks)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = 0
    for chunk in chunks:
        parts = [p[done : done + chunk] for p in prompts]
        positions = [torch.arange(done, done + len(p)) for p in parts]
        num_rows = sum(map(len, parts))
        pads = -num_rows % 8
        step = AttentionStep(
            kv_indices=torch.cat(
                [
                    table[s, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                    for s, p in enumerate(positions)
                ]
                + [torch.zeros(pads)]
            ).int(),  # fmt: skip
            seq_starts=ints([sum(map(len, parts[:s])) for s in range(len(parts) + 1)]),
            kv_lens=ints([done + len(p) if len(p) else 0 for p in parts]),
            block_tables=table,
            k_caches=k_caches,
            v_caches=v_caches,
            plans=(PLAN,) * model.config.num_hidden_layers,
        )
        pad = torch.zeros(pads, dtype=torch.long)
        with attention_context(step):
            result = model(
                input_ids=torch.cat([*parts, pad])[None],
                position_ids=torch.cat([*positions, pad])[None],
                use_cache=False,
            ).logits[0]
        assert result.isfinite().all(), "padded rows must stay finite"
        for s, rows in enumerate(result[:num_rows].split([len(p) for p in parts])):
            logits[s].append(rows)
        done += chunk
    return [torch.cat(rows) for rows in logits]


@pytest.mark.parametrize("make_config", CONFIGS.values(), ids=CONFIGS)
def test_packed_chunks_of_a_model_equal_its_own_eager_attention(make_config: Any) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(make_config(), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and sinks of a fresh model would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
    prompts = [torch.randint(3, 128, (40,)), torch.randint(3, 128, (21,))]
    with torch.no_grad():
        want = [model(input_ids=p[None], use_cache=False).logits[0] for p in prompts]
    model.set_attn_implementation(register())
    for got, expected in zip(run_packed(model, prompts, [17, 4, 19]), want, strict=True):
        # Not bitwise: eager sums whole rows of scores, in another order than SDPA.
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_registering_twice_changes_nothing_and_adds_no_mask() -> None:
    assert register() == register() == ATTENTION_NAME
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS


class Layer(torch.nn.Module):
    is_causal = True
    layer_idx = 1


class Recorder:
    """An attention context that keeps what it was asked."""

    def __init__(self) -> None:
        self.layer_idx = -1
        self.asked: dict[str, Any] = {}

    def attend(
        self, layer_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **asked: Any
    ) -> torch.Tensor:
        self.layer_idx, self.asked = layer_idx, asked
        return torch.zeros(q.shape)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with attention_context(recorder):
        yield recorder


QUERY, KEY = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)


def test_what_a_layer_leaves_out_has_its_usual_meaning(recorder: Recorder) -> None:
    out, weights = hf_attention(Layer(), QUERY, KEY, KEY, None, position_ids=None)
    assert out.shape == (1, 3, 4, 16)
    assert weights is None
    assert recorder.layer_idx == 1
    assert recorder.asked == {"scale": 0.25, "window": 0, "soft_cap": 0.0, "sinks": None}


def test_what_a_layer_passes_arrives(recorder: Recorder) -> None:
    sinks = torch.zeros(4)
    hf_attention(
        Layer(), QUERY, KEY, KEY, None, scaling=0.5, sliding_window=7, softcap=30.0, s_aux=sinks
    )
    asked = recorder.asked
    assert asked.pop("sinks") is sinks
    assert asked == {"scale": 0.5, "window": 7, "soft_cap": 30.0}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attention_mask": torch.zeros(3, 3)}, r"Layer passes an attention mask of shape \[3, 3"),
        ({"dropout": 0.1}, r"dropout 0.1; call model.eval\(\)"),
        ({"is_causal": False}, "is not causal"),
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"indices": torch.zeros(1)}, "passes indices"),
        ({"query": QUERY.expand(2, -1, -1, -1)}, "a batch of 2; pack"),
        ({"value": KEY[..., :8]}, "value heads of 8 beside query heads of 16"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    change: dict[str, Any], message: str, recorder: Recorder
) -> None:
    arguments = {"query": QUERY, "key": KEY, "value": KEY, "attention_mask": None} | change
    with pytest.raises(ModelUnsupported, match=message):
        hf_attention(Layer(), **arguments)


def test_a_layer_that_is_not_causal_is_refused(recorder: Recorder) -> None:
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(ModelUnsupported, match="only causal decoders"):
        hf_attention(layer, QUERY, KEY, KEY, None)


def test_attending_outside_a_context_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"with attention_context\(step\)"):
        hf_attention(Layer(), QUERY, KEY, KEY, None)


def test_a_context_ends_with_its_block_and_stays_on_its_thread(recorder: Recorder) -> None:
    inner = Recorder()
    with attention_context(inner):
        hf_attention(Layer(), QUERY, KEY, KEY, None)
    hf_attention(Layer(), QUERY, KEY, KEY, None)
    assert inner.layer_idx == recorder.layer_idx == 1
    errors: list[Exception] = []

    def attend_elsewhere() -> None:
        try:
            hf_attention(Layer(), QUERY, KEY, KEY, None)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=attend_elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_a_step_whose_layers_disagree_is_refused() -> None:
    cache, empty = torch.zeros(1, 16, 1, 16), ints([])
    common = (empty, ints([0]), empty, empty[None])
    with pytest.raises(ValueError, match="2 key caches but 1 value caches"):
        AttentionStep(*common, (cache, cache), (cache,), PLAN)
    with pytest.raises(ValueError, match="2 plans for 1 layers"):
        AttentionStep(*common, (cache,), (cache,), (PLAN, PLAN))

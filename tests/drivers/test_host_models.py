"""transformers models, unchanged, on the host driver: every chunk, layer and dtype bitwise."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.drivers.replaying import check_replays

transformers = pytest.importorskip("transformers")

TOKENS, CAPACITY, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 8, 32, 64, 4, 2, 16
NAME = "graphseed_test_attention"
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
MOE = BASE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES = [
    ("llama", transformers.LlamaConfig, BASE, None),
    ("qwen3", transformers.Qwen3Config, BASE, None),
    ("gemma3", transformers.Gemma3TextConfig, BASE | {"sliding_window": 8}, None),
    ("qwen3_moe", transformers.Qwen3MoeConfig, MOE, "batched_mm"),
    ("qwen3_moe", transformers.Qwen3MoeConfig, MOE, "grouped_mm"),
]


class Step:
    """One chunk of a prompt over static buffers and a cache that the attention operator writes."""

    def __init__(self, dtype: torch.dtype, num_layers: int) -> None:
        self.ids = torch.zeros(1, TOKENS, dtype=torch.int32)
        self.positions = torch.zeros(1, TOKENS, dtype=torch.int32)
        shape = (KV_HEADS, CAPACITY, HEAD_DIM)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(num_layers)]
        self.logits = torch.zeros(1, TOKENS, VOCABULARY, dtype=dtype)

    @property
    def externals(self) -> list[torch.Tensor]:
        return [self.ids, self.positions, *self.keys, *self.values, self.logits]

    def renew(self, launch: int) -> None:
        start = launch % (CAPACITY // TOKENS) * TOKENS
        self.positions.copy_(torch.arange(start, start + TOKENS))
        self.ids.copy_(torch.randint(0, VOCABULARY, (1, TOKENS)))


def _attend(
    q: torch.Tensor,  # [heads, tokens, head_dim]
    k: torch.Tensor,  # [kv heads, tokens, head_dim]
    v: torch.Tensor,
    k_cache: torch.Tensor,  # [kv heads, capacity, head_dim]
    v_cache: torch.Tensor,
    out: torch.Tensor,  # [tokens, heads, head_dim]
    positions: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    start, num_tokens = int(positions[0]), q.shape[1]
    end = start + num_tokens
    k_cache[:, start:end] = k
    v_cache[:, start:end] = v
    distance = positions[:, None] - torch.arange(end)[None]
    mask = (distance >= 0) & (distance < (window or CAPACITY))
    heads = F.scaled_dot_product_attention(
        q[None], k_cache[None, :, :end], v_cache[None, :, :end], mask, scale=scale, enable_gqa=True
    )
    out.copy_(heads[0].transpose(0, 1))


@pytest.fixture(scope="module")
def steps() -> Iterator[list[Step]]:
    """The step that the stand-in attention works for: the last one of the list."""
    steps: list[Step] = []
    library = torch.library.Library("graphseed_models_test", "FRAGMENT")
    library.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor(c!) out, Tensor positions, float scale, int window) -> ()"
    )
    library.impl("attend", _attend, "CPU")

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float,
        sliding_window: int | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        assert attention_mask is None
        step, layer = steps[-1], module.layer_idx
        out = torch.empty(TOKENS, HEADS, HEAD_DIM, dtype=query.dtype)
        torch.ops.graphseed_models_test.attend(
            query[0],
            key[0],
            value[0],
            step.keys[layer],
            step.values[layer],
            out,
            step.positions[0],
            scaling,
            sliding_window or 0,
        )
        return out[None], None

    transformers.AttentionInterface.register(NAME, attention)
    yield steps
    library._destroy()


def _model(config: object, experts: str | None, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model.eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "config_class", "fields", "experts"),
    CASES,
    ids=[f"{family}-{experts or 'dense'}" for family, _, _, experts in CASES],
)
def test_every_chunk_of_a_prompt_is_bitwise_equal_to_the_direct_path(
    steps: list[Step],
    family: str,
    config_class: type,
    fields: dict[str, object],
    experts: str | None,
    dtype: torch.dtype,
) -> None:
    model = _model(config_class(**fields), experts, dtype)
    step = Step(dtype, 2)
    steps.append(step)
    parameters = [(p, p.data_ptr(), p._version, p.clone()) for p in model.parameters()]

    def work() -> None:
        logits = model(input_ids=step.ids, position_ids=step.positions, use_cache=False).logits
        step.logits.copy_(logits)

    executable = check_replays(work, step.externals, step.renew, launches=5)
    assert step.logits.isfinite().all() and step.logits.any()
    assert all(cache.any() for cache in [*step.keys, *step.values])
    assert executable.num_nodes > 20
    for parameter, address, version, before in parameters:
        assert parameter.data_ptr() == address and parameter._version == version
        assert torch.equal(parameter, before)


def test_grouped_products_of_any_width_are_laid_out_as_the_kernel_does() -> None:
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        for columns in (5, 8, 12):
            x = torch.randn(5, 16, dtype=dtype)
            weight = torch.randn(2, columns, 16, dtype=dtype).transpose(1, 2)

            def work(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
                return torch._grouped_mm(x, weight, offs=offsets)

            want = work()
            executable = check_replays(work, [x])
            assert executable.result.stride() == want.stride()


def test_a_failed_capture_leaves_the_model_usable(steps: list[Step]) -> None:
    model = _model(transformers.LlamaConfig(**BASE), None, torch.float32)
    step = Step(torch.float32, 2)
    steps.append(step)
    step.renew(0)

    def logits() -> torch.Tensor:
        return model(input_ids=step.ids, position_ids=step.positions, use_cache=False).logits

    with torch.no_grad():
        want = logits().clone()
        with pytest.raises(Exception, match="host synchronisation"):
            check_replays(lambda: logits().sum().item())
        assert torch.equal(logits(), want)
        check_replays(logits, [*step.keys, *step.values])

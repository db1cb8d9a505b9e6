"""`verify` on real components: what is right passes, and each planted fault is found and named."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from graphseed.capture import Namespace
from graphseed.drivers import open_driver
from graphseed.drivers.host import HostArena
from graphseed.engine import BadParameter, DeviceMemoryError, NotFinite
from graphseed.engine.plan import StepPlan
from graphseed.engine.staging import Staging
from graphseed.measure.verify.differences import Difference, Kind
from graphseed.measure.verify.proof import Progress, Verification, VerifySettings, verify
from graphseed.models import Model, load_model
from graphseed.models.kernels import operator

FAMILIES = ("tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe")


def settings(*policies: str, **more: Any) -> VerifySettings:
    """One chunk is 16 rows, so that there are few graphs."""
    fields = {"max_tokens": 24, "num_rounds": 2, "num_ubatch": 16, "num_parallel": 2, "seed": 7}
    return VerifySettings(policies=policies or ("seed",), **(fields | more))


def loaded(preset: str = "tiny-llama", dtype: str = "fp32", device: str = "cpu") -> Model:
    return load_model(
        f"random:{preset}", device=device, dtype=dtype, bf16_is_fast=False, progress=False
    )


@contextmanager
def flag_while(patch: pytest.MonkeyPatch, verb: str) -> Iterator[list[bool]]:
    """A list that is not empty while the host driver is at `verb`: capture or launch."""
    real, is_on = getattr(HostArena, verb), []

    def flagged(self: HostArena, argument: Any) -> Any:
        is_on.append(True)
        try:
            return real(self, argument)
        finally:
            is_on.pop()

    patch.setattr(HostArena, verb, flagged)
    yield is_on


def around_attention(
    patch: pytest.MonkeyPatch, wrap: Callable[[Callable[..., None], tuple[Any, ...]], None]
) -> None:
    """Let `wrap(kernel, arguments)` stand for the CPU's attention, direct and at replay."""
    kernel = operator.paged_attention_cpu
    patch.setattr(operator, "paged_attention_cpu", lambda *data: wrap(kernel, data))


def check_every_policy_proven(result: Verification) -> None:
    assert result.findings() == [] and result.unproven() == {}
    assert all(not row.differing for row in result.cases)
    for row in result.cases:
        assert len(set(row.digests.values())) == 1, row.name
    for name in ("seed", "resident"):
        policy = result.policies[name]
        for namespace in Namespace:
            assert policy.num_replayed_identities[namespace] == policy.num_identities[namespace]
            assert policy.counts[namespace].refused == 0
        assert policy.counts[Namespace.PROMPT].released > 0
    assert result.policies["seed"].counts[Namespace.PROMPT].deferred > 0
    off = result.policies["off"].counts
    assert off[Namespace.DECODE].replayed > 0 and off[Namespace.PROMPT].candidates > 0
    assert off[Namespace.PROMPT].replayed == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", FAMILIES)
def test_every_policy_computes_the_same_bytes(preset: str, dtype: str) -> None:
    result = verify(
        loaded(preset, dtype), open_driver("cpu"),
        settings(
            "off", "seed", "resident", max_tokens=70, num_rounds=3, num_ubatch=32, num_parallel=4
        ),
    )  # fmt: skip
    check_every_policy_proven(result)
    assert result.num_steps == sum(row.num_observations for row in result.cases) > 100


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe"])
def test_every_policy_computes_the_same_bytes_on_a_gpu(preset: str, dtype: str) -> None:
    result = verify(
        loaded(preset, dtype, "cuda"), open_driver("cuda"),
        settings(
            "off", "seed", "resident", max_tokens=200, num_rounds=3, num_ubatch=64, num_parallel=4
        ),
    )  # fmt: skip
    check_every_policy_proven(result)


def test_the_same_seed_gives_the_same_digests_and_another_others(model: Model) -> None:
    first, again, other = (
        verify(model, open_driver("cpu"), settings("off", seed=seed)) for seed in (7, 7, 8)
    )
    digests = [row.digests for row in first.cases]
    assert digests == [row.digests for row in again.cases]
    for mine, theirs in zip(first.cases, other.cases, strict=True):
        assert mine.digests["off"] != theirs.digests["off"]


def first_of(result: Verification) -> Difference:
    assert not result.is_equal and result.findings()
    return result.differences[0]


def test_a_kernel_that_differs_under_capture_is_found_at_the_layer_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded()
    mlp = model.module.model.layers[1].mlp
    real = mlp.forward
    with flag_while(monkeypatch, "capture") as is_capturing:
        # One part in a million: a few units in the last place.
        mlp.forward = lambda x: real(x) * (1 + 1e-6) if is_capturing else real(x)
        result = verify(model, open_driver("cpu"), settings("seed", "resident"))
    assert {d.policy for d in result.differences} == {"seed", "resident"}
    for difference in result.differences:
        assert difference.answered.startswith("replayed")  # direct runs are as they should be
        assert difference.what in ("K", "logits") and difference.kind is Kind.DIFFERS
        assert 0 < difference.largest < 1e-3
    first = first_of(result)
    # What layer 1's MLP adds reaches layer 2's keys first, from the first token on.
    assert (first.layer, first.what, first.position, first.sequence) == (2, "K", 0, 0)
    assert first.identity.startswith("prompt first=aten.embedding[1, 16, 64]:float32 tokens=16")
    assert "15 tokens, round 1, step 1, replayed" in str(first)


def test_a_kernel_that_differs_behind_the_last_keys_is_found_in_the_logits_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded()
    norm = model.module.model.norm
    real = norm.forward
    with flag_while(monkeypatch, "capture") as is_capturing:
        norm.forward = lambda x: real(x) * (1 + 1e-6) if is_capturing else real(x)
        result = verify(model, open_driver("cpu"), settings("seed"))
    assert {(d.what, d.layer, d.position is None) for d in result.differences} == {
        ("logits", None, False)
    }


def test_a_stale_buffer_is_found_from_the_step_on_in_which_it_was_replaced() -> None:
    model = loaded()
    linear = model.module.model.layers[2].self_attn.v_proj

    def replace_behind_the_engine(progress: Progress) -> None:
        if progress.round_number == 2 and progress.case == "16 tokens":
            # Another tensor in its place: recordings go on reading the old one.
            del linear.weight
            linear.weight = kept.pop()

    kept = [torch.nn.Parameter(linear.weight.detach() * 1.5, requires_grad=False)]
    old = linear.weight  # its memory is not given back, so that the stale read is a plain one
    result = verify(model, open_driver("cpu"), settings("seed"), replace_behind_the_engine)
    first = first_of(result)
    assert old is not linear.weight and not kept
    assert (first.layer, first.what, first.kind) == (2, "V", Kind.DIFFERS)
    assert (first.case, first.round_number, first.position) == ("16 tokens", 2, 0)
    assert first.answered.startswith("replayed") and first.policy == "seed"
    # What is recorded after the release reads the new one: the end of the proof is equal again.
    assert not result.cases[-1].differing


def test_a_padded_row_that_leaks_into_a_live_block_is_found(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    fill = Staging._fill

    def leaking(self: Staging, fields: Any, plan: StepPlan) -> None:
        """Padded rows of a later chunk count, and point at the sequence's first rows."""
        fill(self, fields, plan)
        part = plan.parts[0]
        if plan.namespace is Namespace.PROMPT and part.start and len(plan.parts) == 1:
            num_padded = min(plan.capacity - plan.num_tokens, part.start)
            rows = slice(plan.num_tokens, plan.num_tokens + num_padded)
            fields["kv_indices"][rows] = part.table.kv_indices(0, num_padded)
            fields["seq_starts"][1:] += num_padded

    monkeypatch.setattr(Staging, "_fill", leaking)
    result = verify(model, open_driver("cpu"), settings("seed"))
    first = first_of(result)
    # All sides do it alike, so the reference is named as well.
    assert {d.policy for d in result.differences} == {"disabled", "seed"}
    assert first.kind is Kind.OUTSIDE and first.policy == "disabled"
    assert (first.layer, first.what, first.position, first.sequence) == (0, "K", 0, 0)
    assert "was changed by a step that does not write it at position 0" in str(first)
    assert "tokens=16" in first.identity


def test_rows_that_attention_must_not_see_are_found_though_every_side_reads_them(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    def counting_one_key_more(kernel: Callable[..., None], data: tuple[Any, ...]) -> None:
        kernel(*data)
        out, kv_lens, tables, v_cache = data[5], data[8], data[9], data[4]
        last = int(kv_lens[0])
        if last % 16:  # the row behind the last token's, which nobody wrote
            out[0] += v_cache[int(tables[0, last // 16]), last % 16].repeat(2, 1) * 1e-3

    around_attention(monkeypatch, counting_one_key_more)
    result = verify(model, open_driver("cpu"), settings("seed"))
    first = first_of(result)
    # Layer 0's attention read it, so layer 1's keys are the first to differ.
    assert (first.layer, first.what, first.position) == (1, "K", 0)
    assert first.case == "1 token" and first.answered == "direct (seeding)"


def test_a_kv_row_that_a_replay_does_not_write_is_found_at_its_layer_and_position(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    calls = []

    def skipping(kernel: Callable[..., None], data: tuple[Any, ...]) -> None:
        k_cache, kv_indices, num_rows = data[3], data[6], int(data[7][-1])
        is_skipped = bool(is_launching) and len(calls) % 4 == 2 and num_rows > 5  # layer 2
        row = k_cache.flatten(0, 1)[int(kv_indices[5])] if is_skipped else None
        before = None if row is None else row.clone()
        kernel(*data)
        if row is not None and before is not None:
            row.copy_(before)
        calls.append(1)

    with flag_while(monkeypatch, "launch") as is_launching:
        around_attention(monkeypatch, skipping)
        result = verify(model, open_driver("cpu"), settings("seed"))
    first = first_of(result)
    assert (first.layer, first.what, first.position) == (2, "K", 5)
    assert first.kind is Kind.UNWRITTEN and first.num_rows == 1
    assert first.answered.startswith("replayed")
    assert all(d.position is not None and d.what == "K" for d in result.differences)


def test_a_kv_row_that_nobody_writes_is_found_on_the_reference(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    calls = []

    def skipping(kernel: Callable[..., None], data: tuple[Any, ...]) -> None:
        v_cache, kv_indices, num_rows = data[4], data[6], int(data[7][-1])
        row = v_cache.flatten(0, 1)[int(kv_indices[num_rows - 1])]
        before = row.clone()
        kernel(*data)
        if len(calls) % 4 == 1:  # layer 1; read in this step, and gone after it
            row.copy_(before)
        calls.append(1)

    around_attention(monkeypatch, skipping)
    result = verify(model, open_driver("cpu"), settings("off"))
    first = first_of(result)
    assert (first.policy, first.kind) == ("disabled", Kind.UNWRITTEN)
    assert (first.layer, first.what, first.position) == (1, "V", 0)


def test_a_policy_that_replays_nothing_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    from graphseed.capture import GraphIdentity
    from graphseed.engine.step import StepRunner

    build, count = StepRunner._build, iter(range(10**6))

    def always_new(self: StepRunner, *key: Any) -> Any:
        def hook(identity: GraphIdentity, plan: StepPlan) -> GraphIdentity:
            structure = (*identity.structure, ("call", next(count)))
            return GraphIdentity(
                identity.namespace, identity.device, identity.first_node, structure
            )

        self.identity_hook = hook
        return build(self, *key)

    monkeypatch.setattr(StepRunner, "_build", always_new)
    result = verify(model, open_driver("cpu"), settings("seed", max_tokens=2))
    assert result.is_equal
    assert result.findings() == [
        "policy seed replayed no prompt graph and refused none: nothing proven",
        "policy seed replayed no decode graph and refused none: nothing proven",
    ]


def test_graphs_that_are_refused_prove_nothing_and_say_why() -> None:
    model = loaded()
    mlp = model.module.model.layers[1].mlp
    real = mlp.forward
    mlp.forward = lambda x: real(x) * (1.0 if x.sum().item() > -1e30 else 2.0)  # a host sync
    result = verify(model, open_driver("cpu"), settings("seed"))
    assert result.is_equal and result.findings() == []
    assert set(result.unproven()) == {("seed", n) for n in Namespace}
    for reasons in result.unproven().values():
        assert reasons and all("host synchronisation" in reason for reason in reasons)


def test_it_goes_on_after_a_difference_and_lists_so_many_only(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    def disturbed(kernel: Callable[..., None], data: tuple[Any, ...]) -> None:
        kernel(*data)
        if is_launching:
            data[5].mul_(1 + 1e-6)

    with flag_while(monkeypatch, "launch") as is_launching:
        around_attention(monkeypatch, disturbed)
        result = verify(model, open_driver("cpu"), settings("seed"))
    assert len(result.differences) == 20 < result.num_differences
    assert f"{result.num_differences} differences" in result.findings()[0]
    assert result.cases[-1].differing == {"seed"}
    assert result.cases[-1].digests["seed"] != result.cases[-1].digests["disabled"]


def test_progress_tells_each_case_of_each_round_before_it_runs(model: Model) -> None:
    told: list[Progress] = []
    verify(model, open_driver("cpu"), settings("seed", num_rounds=3), told.append)
    assert [p.num_done for p in told] == list(range(told[0].num_cases))
    assert all(a.round_number <= b.round_number for a, b in pairwise(told))
    rounds = [[p.case for p in told if p.round_number == r] for r in (1, 2, 3)]
    assert rounds[0] == rounds[2]
    assert rounds[1][: len(rounds[0])] == rounds[0]
    assert [name.partition(" ")[0] for name in rounds[1][len(rounds[0]) :]] == ["released"] * 2


def test_logits_that_are_no_numbers_prove_nothing() -> None:
    model = loaded()
    model.module.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="after position 0 is nan"):
        verify(model, open_driver("cpu"), settings("seed"))


def test_too_little_memory_is_said_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    driver = open_driver("cpu")
    monkeypatch.setattr(type(driver), "free_bytes", lambda self: 1 << 20)
    with pytest.raises(DeviceMemoryError, match=r"3 policies.*lower --max-tokens, -ub or -np"):
        verify(model, driver, settings("off", "seed"))


def test_memory_that_runs_out_on_the_way_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    def exhausted(kernel: Callable[..., None], data: tuple[Any, ...]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    driver = open_driver("cpu")

    def plant(progress: Progress) -> None:
        if progress.case == "16 tokens":
            around_attention(monkeypatch, exhausted)

    with pytest.raises(DeviceMemoryError, match="verifying policies side by side ran out"):
        verify(model, driver, settings("seed"), plant)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("policies", ("off", "often"), "--policies is 'off,often'; expected one or more of off"),
        ("policies", ("off", "off"), "--policies is 'off,off'"),
        ("policies", ("disabled",), "--policies is 'disabled'"),
        ("max_tokens", 1, "--max-tokens is 1; expected at least 2"),
        ("num_rounds", 1, "--rounds is 1; expected at least 2"),
        ("num_ubatch", 0, "-ub is 0"),
        ("num_parallel", 0, "-np is 0"),
        ("context_len", 5, "-c is 5; expected 0 or at least 10"),
        ("seed", -2, "--seed is -2"),
    ],
)
def test_settings_out_of_range_are_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(BadParameter) as caught:
        VerifySettings(**{field: value})
    assert words in str(caught.value)


def test_the_longest_prompt_leaves_room_in_the_models_context(model: Model) -> None:
    from graphseed.measure.verify.proof import _sized

    sizes, config, _ = _sized(model, settings(max_tokens=100_000))
    assert (sizes.longest, config.context_len) == (2040, 2048)
    sizes, config, _ = _sized(model, settings(max_tokens=40, context_len=500))
    assert (sizes.longest, config.context_len) == (40, 500)

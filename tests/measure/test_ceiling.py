"""The ceiling: rates from times, and what a step costs at least, counted in another way too."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from graphseed.capture import Namespace
from graphseed.drivers import open_driver
from graphseed.drivers.host import HostDriver
from graphseed.engine import EngineConfig, EngineCore
from graphseed.engine.blocks import BlockTable
from graphseed.engine.plan import SequencePart, StepPlan
from graphseed.measure.bench.ceiling import Ceiling, StepCost, measure_ceiling, num_visible_keys
from graphseed.measure.bench.grid import BenchTest, Piece
from graphseed.models import Model, load_model


class _Mark:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def wait(self) -> None:
        pass

    def ms_since(self, earlier: "_Mark") -> float:
        return self.at_ms - earlier.at_ms


class _ScriptedClock(HostDriver):
    """A host on which everything between two marks takes 2 ms."""

    def __init__(self, free_bytes: int) -> None:
        self.num_marks = 0
        self._free_bytes = free_bytes

    def mark(self, timed: bool = False) -> _Mark:
        assert timed
        self.num_marks += 1
        return _Mark(2.0 * self.num_marks)

    def free_bytes(self) -> int:
        return self._free_bytes


def test_rates_are_work_over_time():
    ceiling = measure_ceiling(_ScriptedClock(8 << 30), (torch.float32, torch.bfloat16))
    assert ceiling.tflops == {
        "float32": pytest.approx(2 * 1024**3 / 2e-3 / 1e12),
        "bfloat16": pytest.approx(2 * 1024**3 / 2e-3 / 1e12),
    }
    assert ceiling.gbytes_per_second == pytest.approx(2 * (64 << 20) / 2e-3 / 1e9)


def test_little_memory_makes_the_sizes_smaller():
    ceiling = measure_ceiling(_ScriptedClock(32 << 20), (torch.float32,))
    assert ceiling.tflops["float32"] == pytest.approx(2 * 512**3 / 2e-3 / 1e12)
    assert ceiling.gbytes_per_second == pytest.approx(2 * (4 << 20) / 2e-3 / 1e9)


def test_this_machine_has_a_rate_and_a_bandwidth():
    ceiling = measure_ceiling(open_driver("cpu"), (torch.float32,))
    assert 1e-4 < ceiling.tflops["float32"] < 1e3 and 0.1 < ceiling.gbytes_per_second < 1e5


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    ceiling = Ceiling({"float32": 2.0}, gbytes_per_second=100.0)
    assert ceiling.floor_ms("float32", 4e9, 1e6) == pytest.approx(2.0)  # 4 GFLOP at 2 TFLOP/s
    assert ceiling.floor_ms("float32", 4e9, 1e9) == pytest.approx(10.0)  # 1 GB at 100 GB/s


@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 70))
def test_visible_keys_are_those_a_causal_window_leaves(start, length, window):
    seen = [
        sum(1 for key in range(at + 1) if not window or key > at - window)
        for at in range(start, start + length)
    ]
    assert num_visible_keys(Piece(0, start, length), window) == sum(seen)


def _preset(name: str) -> Model:
    return load_model(
        f"random:{name}", device="cpu", dtype="fp32", bf16_is_fast=False, progress=False
    )


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe"])
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_products_are_as_many_as_torch_counts_in_a_real_step(name, num_tokens):
    model = _preset(name)
    if name == "tiny-qwen3-moe":
        model.module.set_experts_implementation("batched_mm")  # torch counts no grouped products
    config = EngineConfig(context_len=64, num_ubatch=16, reuses_prefixes=False)
    core = EngineCore(model, open_driver("cpu"), config)
    table = BlockTable(core.pool, core.config.max_blocks)
    table.grow(num_tokens)
    part = SequencePart(np.arange(num_tokens, dtype=np.int32), 0, table)
    with FlopCounterMode(display=False) as counter:
        core.runner.run_direct(StepPlan(Namespace.PROMPT, num_tokens, (part,)))
    table.close()
    core.close()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = counted["aten.mm"] + counted.get("aten.bmm", 0)
    # Attention is an operator of ours, which torch does not count: it is left out here.
    without_attention = dataclasses.replace(StepCost.of(model), layers=())
    assert without_attention.of_step([Piece(0, 0, num_tokens)])[0] == products


def test_attention_costs_four_for_each_head_element_and_visible_key():
    cost = StepCost.of(_preset("tiny-gemma3"))  # windows of 40 in three layers of four
    piece = Piece(0, 60, 20)
    without = dataclasses.replace(cost, layers=())
    flops = cost.of_step([piece])[0] - without.of_step([piece])[0]
    keys = sum(min(at + 1, 40) for at in range(60, 80)) * 3 + sum(range(61, 81))
    assert flops == 4 * 4 * 32 * keys
    moved = cost.of_step([piece])[1] - without.of_step([piece])[1]
    # Keys read once by all 20 tokens, and 20 written; K and V of 2 heads in float32.
    assert moved == 2 * 2 * 32 * 4 * ((40 + 19) * 3 + 80 + 4 * 20)


def test_a_step_reads_every_weight_once_but_of_an_embedding_only_its_rows():
    for name in ("tiny-llama", "tiny-gemma3"):  # the head is the embedding
        model = _preset(name)
        cost = StepCost.of(model)
        assert cost.other_bytes + cost.head_bytes == model.weight_bytes
        without = dataclasses.replace(cost, layers=())
        assert without.of_step([Piece(0, 0, 5)])[1] == model.weight_bytes + 5 * 64 * 4


def test_experts_are_read_as_far_as_evenly_routed_tokens_touch_them():
    model = _preset("tiny-qwen3-moe")  # 2 of 8 experts, a head of its own
    cost = dataclasses.replace(StepCost.of(model), layers=())
    embedding = 512 * 64 * 4
    assert cost.other_bytes + cost.head_bytes + cost.expert_bytes + embedding == model.weight_bytes

    def experts_read(num_tokens: int) -> float:
        moved = cost.of_step([Piece(0, 0, num_tokens)])[1] - num_tokens * cost.row_bytes
        return (moved - cost.other_bytes - cost.head_bytes) / cost.expert_bytes

    assert experts_read(1) == pytest.approx(1 / 4)
    assert experts_read(2) == pytest.approx(1 - (3 / 4) ** 2)
    assert experts_read(200) == pytest.approx(1)


def test_the_head_reads_one_row_of_each_sequence():
    cost = StepCost.of(_preset("tiny-llama"))
    one, two = [Piece(0, 0, 8)], [Piece(0, 0, 4), Piece(1, 0, 4)]
    layers = dataclasses.replace(cost, layers=())
    assert layers.of_step(two)[0] - layers.of_step(one)[0] == 2 * 512 * 64


def test_steps_one_after_another_cost_the_sum():
    cost, ceiling = StepCost.of(_preset("tiny-llama")), Ceiling({"float32": 1.0}, 10.0)
    test = BenchTest(40, 2, num_ubatch=16)
    each = [cost.floor_ms(ceiling, "float32", [step]) for step in test.timed_steps()]
    assert len(each) == 3 + 2
    assert cost.floor_ms(ceiling, "float32", test.timed_steps()) == pytest.approx(sum(each))

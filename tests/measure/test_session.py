"""Session: what it plans and runs is what the engine plans and runs."""

import pytest
import torch

from graphseed.capture import Namespace
from graphseed.drivers import open_driver
from graphseed.engine import EngineConfig, EngineCore, SamplingParams
from graphseed.engine.step import StepTrace
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session
from graphseed.models import Model

CONFIG = EngineConfig(context_len=128, num_ubatch=32, num_parallel=4, reuses_prefixes=False)
PROMPT = [3 + (7 * i) % 250 for i in range(75)]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_prompt_path_is_the_engines(model: Model, policy: str) -> None:
    driver = open_driver("cpu")
    core = EngineCore(model, driver, CONFIG, POLICIES["disabled"])
    trace = StepTrace(driver)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    list(core.stream(PROMPT, params, observer=trace))
    core.close()
    with Session(model, driver, CONFIG, POLICIES[policy]) as session:
        for _ in range(2):
            with session.slot() as slot:
                mine = StepTrace(driver)
                session.run_prompt(slot.prompt(PROMPT), mine)
                session.settle()
            assert len(mine.logits) == len(trace.logits) == 3
            for got, expected in zip(mine.logits, trace.logits, strict=True):
                assert torch.equal(got, expected)
        counts = session.core.tally.counts[Namespace.PROMPT]
        assert bool(counts.replayed) == (policy in ("seed", "resident"))


def test_a_batch_one_decode_releases_the_prompt_graphs_of_seed_and_not_before(model: Model) -> None:
    with (
        Session(model, open_driver("cpu"), CONFIG, POLICIES["seed"]) as session,
        session.slot() as slot,
    ):
        session.run_prompt(slot.prompt(PROMPT))
        counts = session.core.tally.counts[Namespace.PROMPT]
        assert (counts.seeded, counts.replayed, counts.released) == (2, 1, 0)
        session.run(session.decode([slot.part([5])]))
        assert counts.released == 2


def test_decode_batches_and_packed_prompts_are_padded_as_the_schedulers(model: Model) -> None:
    with Session(model, open_driver("cpu"), CONFIG, POLICIES["off"]) as session:
        slots = [session.slot() for _ in range(3)]
        plan = session.packed([slot.part([9, 8, 7]) for slot in slots])
        assert (plan.namespace, plan.capacity, plan.seq_capacity) == (Namespace.PROMPT, 16, 4)
        assert session.run(plan).shape == (3, model.vocab_size)
        plan = session.decode([slot.part([1]) for slot in slots])
        assert (plan.namespace, plan.capacity, plan.seq_capacity) == (Namespace.DECODE, 4, 4)
        assert [part.start for part in plan.parts] == [3, 3, 3]
        free = session.core.num_free_blocks
        for slot in slots:
            slot.close()
        assert session.core.num_free_blocks == free + 3


def test_a_rewound_slot_runs_the_same_positions_again(model: Model) -> None:
    with (
        Session(model, open_driver("cpu"), CONFIG, POLICIES["off"]) as session,
        session.slot() as slot,
    ):
        session.run_prompt(slot.prompt(PROMPT[:40]))
        first = session.run_prompt(slot.prompt(PROMPT[40:60])).clone()
        slot.rewind(40)
        assert torch.equal(session.run_prompt(slot.prompt(PROMPT[40:60])), first)
        with pytest.raises(ValueError, match="61 of 60"):
            slot.rewind(61)

"""The cases of a proof: every awkward shape there is room for, at every size of an engine."""

import pytest

from graphseed.capture import Namespace
from graphseed.drivers import open_driver
from graphseed.engine import EngineConfig
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session
from graphseed.measure.verify.case_plans import Planner, Step
from graphseed.measure.verify.cases import (
    ROOM,
    Decode,
    Prefill,
    Release,
    Sizes,
    kv_len_of,
    make_cases,
    prompt_lens,
)
from graphseed.models import Model

USUAL = Sizes(longest=2048, num_ubatch=512, num_parallel=4, block_len=16)


def test_the_lengths_are_around_a_block_and_a_ubatch_and_of_several_chunks() -> None:
    assert prompt_lens(USUAL) == (1, 15, 16, 17, 511, 512, 513, 1194, 2048)
    assert prompt_lens(Sizes(600, 512, 4, 16)) == (1, 15, 16, 17, 511, 512, 513, 600)
    assert prompt_lens(Sizes(2, 512, 4, 16)) == (1, 2)


def test_every_length_comes_alone_packed_cached_interleaved_and_released() -> None:
    for longest in (600, 2048):
        sizes = Sizes(longest, 512, 4, 16)
        cases = make_cases(sizes)
        assert len({case.name for case in cases}) == len(cases)
        prefills = [a for case in cases for a in case.actions if isinstance(a, Prefill)]
        alone = {p.parts[0].num_tokens for p in prefills if len(p.parts) == 1}
        assert set(prompt_lens(sizes)) <= alone
        assert {len(p.parts) for p in prefills} >= {1, 2, 3, 4}
        assert any(p.parts[0].shares is not None and len(p.parts) > 1 for p in prefills)
        assert any(isinstance(inner, Decode) for p in prefills for inner in p.between)
        assert any(isinstance(inner, Release) for p in prefills for inner in p.between)
        batches = {len(a.sequences) for c in cases for a in c.actions if isinstance(a, Decode)}
        assert batches == {1, 2, 3, 4}


def test_nothing_but_a_releasing_case_decodes_one_sequence_with_no_prompt_unfinished() -> None:
    for case in make_cases(USUAL):
        alone = [a for a in case.actions if isinstance(a, Decode) and len(a.sequences) == 1]
        assert not alone or case.is_releasing


@pytest.mark.parametrize("num_parallel", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("num_ubatch", [1, 16, 40])
@pytest.mark.parametrize("longest", [2, 30, 100])
def test_every_case_can_be_planned_within_its_sizes(
    model: Model, longest: int, num_ubatch: int, num_parallel: int
) -> None:
    sizes = Sizes(longest, num_ubatch, num_parallel, 16)
    cases = make_cases(sizes)
    config = EngineConfig(
        context_len=longest + ROOM, num_ubatch=num_ubatch, num_parallel=num_parallel,
        kv_len=max(longest + ROOM, kv_len_of(cases, sizes)),
    )  # fmt: skip
    with Session(model, open_driver("cpu"), config, POLICIES["disabled"]) as session:
        num_free = session.core.num_free_blocks
        for number, case in enumerate(cases):
            with Planner(session, case, model.vocab_size, [number]) as planner:
                steps = [step for step in planner.steps() if isinstance(step, Step)]
                lens = {n: len(ids) for n, ids in planner.token_ids().items()}
                assert len(planner.kv_indices()) == sum(lens.values())
            assert lens == case.sequence_lens(num_ubatch)
            assert max(lens.values()) <= config.context_len
            for step in steps:
                assert len(step.sequences) == len(step.plan.parts) <= num_parallel
                assert 1 <= step.plan.num_tokens <= step.plan.capacity
        assert session.core.num_free_blocks == num_free


def test_a_plan_is_a_value_whatever_becomes_of_the_blocks(model: Model) -> None:
    config = EngineConfig(context_len=120, num_ubatch=32, num_parallel=4)
    [case] = [c for c in make_cases(Sizes(100, 32, 4, 16)) if "longer, equal, packed" in c.name]
    with Session(model, open_driver("cpu"), config, POLICIES["disabled"]) as session:
        with Planner(session, case, model.vocab_size, [1]) as planner:
            steps = [step for step in planner.steps() if isinstance(step, Step)]
            rows = [p.table.kv_indices(0, p.kv_len).tolist() for s in steps for p in s.plan.parts]
        again = [p.table.kv_indices(0, p.kv_len).tolist() for s in steps for p in s.plan.parts]
    assert again == rows
    # 33 tokens in two chunks; then 32 of them cached, as blocks of the first sequence.
    assert [s.plan.parts[0].start for s in steps] == [0, 32, 32, 32, 32]
    assert all(r[:32] == rows[1][:32] for r in rows[1:])
    assert [s.plan.namespace for s in steps] == [Namespace.PROMPT] * 5
    assert [s.has_more for s in steps] == [True, False, False, False, False]

"""A replayed observation is one graph launch, seen by the profiler."""

from collections import Counter

import pytest

from graphseed.capture import Namespace
from graphseed.engine.blocks import BlockTable
from graphseed.engine.plan import SequencePart, StepPlan
from tests.engine.conftest import prompt_of


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe"])
def test_a_replayed_observation_holds_one_graph_launch_and_no_kernel_launch(preset, make_engine):
    import numpy as np
    from torch.profiler import ProfilerActivity, profile

    engine = make_engine("seed", preset, "bf16")
    table = BlockTable(engine.pool, engine.config.max_blocks)
    table.grow(32)
    part = SequencePart(np.asarray(prompt_of(32), dtype=np.int32), 0, table)
    plan = StepPlan(Namespace.PROMPT, 32, (part,))
    for _ in range(2):  # seed, first replay
        engine.runner.run(plan)
    engine.driver.synchronize()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as trace:
        engine.runner.run(plan)
        engine.driver.synchronize()
    calls = Counter(event.name for event in trace.events())
    launches = {name: count for name, count in calls.items() if "Launch" in name}
    assert launches == {"cudaGraphLaunch": 1}, calls
    kernels = [event for event in trace.events() if event.device_type.name == "CUDA"]
    assert len(kernels) > 50  # the launch ran the whole step
    table.close()

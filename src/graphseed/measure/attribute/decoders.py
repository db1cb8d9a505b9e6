"""The near-empty decoders that a device is calibrated with.

Owns which they are: a small llama at two depths, of random weights in the dtype of the model under
test, and one chunk of it. Every kind of kernel of a prompt graph is there, in a model's order and
number, each with next to nothing to do. They are replayed and profiled by the same functions as a
model's chunks, but the least disturbed run counts, not the median: the gap is a small difference
between two processes, and what disturbs a run only adds to it. What the figures mean, and why it is
decoders, is launch_gap's.
"""

from collections.abc import Callable
from typing import Final

import torch

from graphseed.capture.driver import Driver
from graphseed.capture.errors import GraphseedError
from graphseed.measure.attribute.attribution import ChunkGrid
from graphseed.measure.attribute.context_bench import ContextBench
from graphseed.measure.attribute.launch_gap import DecoderTimes
from graphseed.measure.attribute.profile import LEAST, ChunkProfile
from graphseed.models.load import random_model
from graphseed.models.presets import preset_config

PRESET: Final = "tiny-llama"
DEPTHS: Final = (4, 28)  # layers: some 170 nodes, and some 1,150, as many as a small model has
CHUNK: Final = 32  # tokens: the smallest chunk that is usually asked for
NUM_PROFILED: Final = 10


class CalibrationFailed(GraphseedError, RuntimeError):
    """A near-empty decoder was not replayed, so no replay can be predicted."""

    def __init__(self, num_layers: int, why: str) -> None:
        super().__init__(
            f"the launch gap cannot be calibrated on this device: a near-empty decoder of "
            f"{num_layers} layers cannot be replayed: {why}"
        )


def replay_decoders(
    driver: Driver, dtype: torch.dtype, watch: Callable[[str], None]
) -> tuple[DecoderTimes, ...]:
    """Seed and replay each decoder, the shallow one first. Raises CalibrationFailed.

    Run it where nothing was profiled: a profiler that was loaded still costs something.
    """
    times = []
    for num_layers in DEPTHS:
        watch(f"launch gap: replay of {num_layers} layers")
        with _bench(driver, dtype, num_layers, "seed") as bench:
            replay, stage_ms = bench.replay(CHUNK), bench.stage_ms(CHUNK)
        if replay.wall is None:
            raise CalibrationFailed(num_layers, replay.refused)
        times.append(DecoderTimes(replay.wall.least_ms, stage_ms))
    return tuple(times)


def profile_decoders(
    driver: Driver, dtype: torch.dtype, watch: Callable[[str], None]
) -> tuple[ChunkProfile, ...]:
    """Profile the direct path of each decoder, in the same order. Raises NothingProfiled."""
    profiles = []
    for num_layers in DEPTHS:
        watch(f"launch gap: profile of {num_layers} layers")
        with _bench(driver, dtype, num_layers, "off") as bench:
            profiles.append(bench.profile(CHUNK, NUM_PROFILED, rank=LEAST))
    return tuple(profiles)


def _bench(driver: Driver, dtype: torch.dtype, num_layers: int, policy: str) -> ContextBench:
    config = preset_config(PRESET, num_hidden_layers=num_layers)
    name = str(dtype).removeprefix("torch.")
    model = random_model(config, device=driver.device, dtype=name)
    return ContextBench(model, driver, ChunkGrid((CHUNK,)), 0, policy)

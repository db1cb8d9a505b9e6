"""Measures where the host's time goes in a model's prompt path, and what replay saves.

Owns three measurements, each of every cell. `measure_direct` times the direct path without a
profiler, `profile_direct` profiles the same chunks, `measure_replay` seeds and replays them. On a
GPU a profiler leaves something behind that makes every later launch of its process dearer (seen on
an H200: 0.9 ms of host for a launch of 1,222 nodes instead of 0.1), so `profile_direct` wants a
process of its own; who gives it one is the caller's to say. Until `measure_replay` the only graphs
are those of the near-empty decoders: none of the model exists. What the figures are and how a
replay is predicted is attribution's; what they mean in words is verdict's. Does not print.
"""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from graphseed.capture.driver import Driver
from graphseed.measure.attribute.attribution import ChunkGrid, Profiled, Replay, Timed
from graphseed.measure.attribute.context_bench import ContextBench, num_runs_of
from graphseed.measure.attribute.decoders import profile_decoders, replay_decoders
from graphseed.measure.attribute.launch_gap import DecoderTimes
from graphseed.models.model import Model

MAX_PROFILED: Final = 5

Watch = Callable[[str], None]  # told what is about to be measured


def measure_direct(
    model: Model, driver: Driver, grid: ChunkGrid, watch: Watch
) -> tuple[tuple[DecoderTimes, ...], list[Timed]]:
    """Time replays of the near-empty decoders, then every cell; all without a profiler.

    Nothing is kept: the device's memory is given back, to whoever profiles the same model next.
    Raises CalibrationFailed.
    """
    times = replay_decoders(driver, model.dtype, watch)
    timed = []
    for context in grid.contexts:
        watch(f"context {context}: filling")
        with ContextBench(model, driver, grid, context, "off") as bench:
            for chunk in grid.chunks:
                watch(f"context {context}, chunk {chunk}: direct")
                wall, host_ms = bench.direct(chunk)
                timed.append(Timed(chunk, context, wall, host_ms, bench.stage_ms(chunk)))
        del bench
    _give_back(driver)
    return times, timed


def num_profiled(timed: Timed) -> int:
    """How often a chunk that was timed is worth profiling."""
    return num_runs_of(timed.wall.median_ms, 1, MAX_PROFILED)


def profile_direct(
    model: Model,
    driver: Driver,
    grid: ChunkGrid,
    nums: Sequence[int],
    watch: Watch,
    trace: Path | None = None,
) -> Profiled:
    """Profile the near-empty decoders, and each cell as often as `nums` says, in their order.

    `trace` gets a Chrome trace of one chunk of the first cell. Raises NothingProfiled.
    """
    decoders = profile_decoders(driver, model.dtype, watch)
    profiles, left = [], iter(nums)
    for context in grid.contexts:
        watch(f"context {context}: filling")
        with ContextBench(model, driver, grid, context, "off") as bench:
            for chunk in grid.chunks:
                watch(f"context {context}, chunk {chunk}: profile")
                profiles.append(bench.profile(chunk, next(left), trace))
                trace = None
    return Profiled(decoders, tuple(profiles))


def measure_replay(model: Model, driver: Driver, grid: ChunkGrid, watch: Watch) -> list[Replay]:
    """Seed every cell and time its replays, in the order of `measure_direct`."""
    replays = []
    for context in grid.contexts:
        watch(f"context {context}: filling")
        with ContextBench(model, driver, grid, context, "seed") as bench:
            for chunk in grid.chunks:
                watch(f"context {context}, chunk {chunk}: replay")
                replays.append(bench.replay(chunk))
    return replays


def _give_back(driver: Driver) -> None:
    """Give back what torch keeps of a closed session's memory."""
    gc.collect()
    if driver.device != "cpu":
        torch.accelerator.empty_cache()

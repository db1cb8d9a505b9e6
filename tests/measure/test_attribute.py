"""Attribution: predicted before any graph exists, and replayed afterwards."""

import pickle
import re
from dataclasses import replace

import pytest
import torch

from graphseed.capture.errors import Reason
from graphseed.capture.space import Space
from graphseed.drivers import host, open_driver
from graphseed.engine import BadParameter
from graphseed.engine.staging import Staging
from graphseed.measure.attribute import context_bench, decoders, runs
from graphseed.measure.attribute.attribution import (
    Cell,
    ChunkGrid,
    Direct,
    Prediction,
    Profiled,
    Replay,
    Timed,
    Timing,
    predict,
)
from graphseed.measure.attribute.context_bench import MIN_RUNS
from graphseed.measure.attribute.decoders import CHUNK, DEPTHS, NUM_PROFILED, CalibrationFailed
from graphseed.measure.attribute.launch_gap import DecoderTimes, LaunchGap, Point
from graphseed.measure.attribute.profile import ChunkProfile
from graphseed.measure.attribute.runs import (
    measure_direct,
    measure_replay,
    num_profiled,
    profile_direct,
)
from graphseed.measure.attribute.verdict import verdict
from graphseed.measure.session import Session
from graphseed.models import Model

GRID = ChunkGrid((16, 40), (0, 24))
CELLS = [(0, 16), (0, 40), (24, 16), (24, 40)]


def timing(median_ms: float, spread_ms: float = 0.1, num_runs: int = 20) -> Timing:
    return Timing(median_ms, spread_ms, num_runs, median_ms - spread_ms)


def ignore(text: str) -> None:
    """A watch that nobody looks at."""


def test_the_prediction_stands_before_any_graph_of_the_model_is_captured(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    seeds: list[tuple[Model, object]] = []
    init, seed = Session.__init__, Space.seed

    def opening(self: Session, *args) -> None:
        init(self, *args)
        sessions.append(self)

    def seeding(self: Space, entry, *args):
        [of] = [s for s in sessions if self in s.core.cache.spaces.values()]
        seeds.append((of.core.model, entry.identity.get("tokens")))
        return seed(self, entry, *args)

    monkeypatch.setattr(Session, "__init__", opening)
    monkeypatch.setattr(Space, "seed", seeding)
    driver = open_driver("cpu")
    times, timed = measure_direct(model, driver, GRID, ignore)
    nums = [num_profiled(one) for one in timed]
    profiled = profile_direct(model, driver, GRID, nums, ignore)
    gap, directs = predict(times, timed, profiled)
    # The only graphs there have been: one chunk of each near-empty decoder, drawn for it.
    assert [(len(of.layers), tokens) for of, tokens in seeds] == [(n, CHUNK) for n in DEPTHS]
    assert all(of is not model and of.source == "random, seed 0" for of, _ in seeds)
    seeds.clear()
    assert pickle.loads(pickle.dumps(profiled)) == profiled  # it comes from another process
    assert gap == LaunchGap.of(times, profiled.decoders)
    assert [(cell.context, cell.chunk) for cell in directs] == CELLS
    for cell in directs:
        assert cell.prediction.num_nodes == cell.profile.num_nodes > 100
        assert cell.prediction.gap_us == gap.gap_us
        assert cell.wall.num_runs >= MIN_RUNS and 0 < cell.host_ms <= cell.wall.median_ms
        assert 0 < cell.prediction.stage_ms < cell.wall.median_ms
    replays = measure_replay(model, driver, GRID, ignore)
    assert [(cell.context, cell.chunk) for cell in replays] == CELLS
    # One for each chunk, and one for the 24 tokens, padded, that fill the second context.
    assert seeds == [(model, tokens) for tokens in (16, 40, 32, 16, 40)]
    for direct, replay in zip(directs, replays, strict=True):
        assert replay.wall is not None and replay.direct is not None and not replay.refused
        assert replay.num_nodes == direct.profile.num_nodes - 1  # the staged copy is in no graph


def test_the_direct_path_is_timed_without_a_profiler(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*args: object, **named: object) -> None:
        raise AssertionError("the profiler was started")

    monkeypatch.setattr("graphseed.measure.attribute.profile.profile", refusing)
    driver = open_driver("cpu")
    _, timed = measure_direct(model, driver, ChunkGrid((16,)), ignore)
    [replay] = measure_replay(model, driver, ChunkGrid((16,)), ignore)
    assert [one.chunk for one in timed] == [16] and replay.wall is not None
    with pytest.raises(AssertionError, match="the profiler was started"):
        profile_direct(model, driver, ChunkGrid((16,)), [1], ignore)


def test_each_cell_is_profiled_as_often_as_asked_after_it_ran_without(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    profile_work = context_bench.profile_work

    def spied(driver, prepare, num, trace, rank):
        asked.append(num)
        return profile_work(driver, prepare, num, trace, rank)

    monkeypatch.setattr(context_bench, "profile_work", spied)
    profiled = profile_direct(model, open_driver("cpu"), GRID, [1, 2, 3, 1], ignore)
    assert asked == [*[NUM_PROFILED] * len(DEPTHS), 1, 2, 3, 1] and len(profiled.cells) == 4
    assert num_profiled(Timed(16, 0, timing(1.0, 0.1, 30), 1.0, 0.1)) == runs.MAX_PROFILED
    assert num_profiled(Timed(16, 0, timing(5000.0, 0.1, 3), 1.0, 0.1)) == 1


def test_a_context_filled_in_chunks_of_the_size_under_test_is_no_hindrance(model: Model) -> None:
    [replay] = measure_replay(model, open_driver("cpu"), ChunkGrid((32,), (32,)), ignore)
    assert not replay.refused and replay.wall is not None
    assert replay.num_nodes > 100  # of the graph that filling the context seeded


def test_a_timed_run_that_was_not_replayed_takes_the_figure_away(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, num_runs = Session.run, 0

    def losing(self: Session, plan, observer=None):
        nonlocal num_runs
        num_runs += 1
        if num_runs == 5:  # after the seed, what is not counted, and two that are
            self.core.cache.release(plan.namespace)
        return run(self, plan, observer)

    monkeypatch.setattr(Session, "run", losing)
    [replay] = measure_replay(model, open_driver("cpu"), ChunkGrid((16,)), ignore)
    assert replay.wall is None
    found = re.fullmatch(
        r"(\d+) of (\d+) replayed: no executable was there; see the log", replay.refused
    )
    assert found is not None and int(found[1]) == int(found[2]) - 1


def test_each_repetition_runs_fresh_tokens_at_the_same_positions(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bytes]] = []
    stage = Staging.stage

    def spied(self: Staging, plan) -> None:
        [part] = plan.parts
        if len(part.token_ids) == 16:
            seen.append((part.start, part.token_ids.tobytes()))
        stage(self, plan)

    monkeypatch.setattr(Staging, "stage", spied)
    [replay] = measure_replay(model, open_driver("cpu"), ChunkGrid((16,), (24,)), ignore)
    assert replay.wall is not None
    assert {start for start, _ in seen} == {24}
    assert len({ids for _, ids in seen}) == len(seen) >= 2 * (replay.wall.num_runs + 1) + 1


def test_a_chunk_that_is_refused_is_said_with_its_reason(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_record", lambda work: (Reason.HOST_SYNC, "aten::item"))
    [replay] = measure_replay(model, open_driver("cpu"), ChunkGrid((16,)), ignore)
    assert replay.wall is None and replay.num_nodes == 0
    assert replay.refused.startswith("0 of ")
    assert replay.refused.endswith(f"replayed: {Reason.HOST_SYNC.value}: aten::item")
    cell = Cell(direct(10.0, 5.0), replay)
    assert (cell.multiple, cell.error, cell.drift, cell.is_noise) == (None, None, None, False)
    assert verdict([cell])[0].startswith("was not replayed at chunks of 16: 0 of")


def seen(num_nodes: int, busy_ms: float, copy_in_ms: float = 0.0) -> ChunkProfile:
    return ChunkProfile(15.0, 5.0, 6.0, 4.0, 0.0, busy_ms, copy_in_ms, num_nodes - 20, num_nodes)


def test_the_gap_is_the_slope_of_what_replays_take_beyond_stage_and_busy() -> None:
    # Planted: 12 us to launch and 0.5 us a node.
    times = [
        DecoderTimes(replay_ms=0.25 + 0.02 + 0.012 + 0.1, stage_ms=0.02),
        DecoderTimes(replay_ms=1.75 + 0.04 + 0.012 + 0.6, stage_ms=0.04),
    ]
    gap = LaunchGap.of(times, [seen(200, 0.26, 0.01), seen(1200, 1.76, 0.01)])
    assert (gap.gap_us, gap.launch_us) == pytest.approx((0.5, 12))
    assert gap.few == Point(200, times[0].replay_ms, 0.25, 0.02)
    # What holds for the decoders themselves: they are predicted as they were measured.
    for point in (gap.few, gap.many):
        made = Prediction(
            point.stage_ms, gap.launch_us / 1e3, point.busy_ms, point.num_nodes, gap.gap_us
        )
        assert made.ms == pytest.approx(point.replay_ms)


def test_a_negative_gap_or_launch_is_reported_as_it_is() -> None:
    gap = LaunchGap(Point(100, 1.0, 1.0, 0.0), Point(300, 2.8, 3.0, 0.0))
    assert (gap.gap_us, gap.launch_us) == pytest.approx((-1.0, 100.0))
    assert LaunchGap(Point(100, 1.0, 1.0, 0.0), Point(300, 2.0, 1.6, 0.0)).launch_us < 0


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda:0", torch.bfloat16, marks=pytest.mark.cuda)],
)
def test_the_decoders_differ_in_depth_alone_and_are_replayed_and_profiled_alike(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[int, torch.dtype, str]] = []
    bench, driver = decoders._bench, open_driver(device)

    def spied(driver, dtype, num_layers, policy):
        made = bench(driver, dtype, num_layers, policy)
        model = made._session.core.model
        used.append((len(model.layers), model.dtype, policy))
        return made

    monkeypatch.setattr(decoders, "_bench", spied)
    times = decoders.replay_decoders(driver, dtype, ignore)
    profiles = decoders.profile_decoders(driver, dtype, ignore)
    assert used == [
        (num_layers, dtype, policy) for policy in ("seed", "off") for num_layers in DEPTHS
    ]
    gap = LaunchGap.of(times, profiles)
    assert 0 < gap.few.stage_ms < gap.few.replay_ms < gap.many.replay_ms
    assert 0 < gap.few.busy_ms < gap.many.busy_ms
    # A layer has the same nodes at each depth: what is left is the same too.
    few, many = gap.few.num_nodes, gap.many.num_nodes
    per_layer, rest = divmod(many - few, DEPTHS[1] - DEPTHS[0])
    assert rest == 0 and 10 < per_layer < few / DEPTHS[0]
    assert many > 500  # as long as a model's graph


def test_a_decoder_that_is_not_replayed_is_an_error_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []
    close = Session.close
    monkeypatch.setattr(Session, "close", lambda self: (closed.append(self), close(self))[1])
    monkeypatch.setattr(host, "_record", lambda work: (Reason.HOST_SYNC, "aten::item"))
    words = r"decoder of 4 layers cannot be replayed: 0 of \d+ replayed: host synchronisation"
    with pytest.raises(CalibrationFailed, match=words):
        decoders.replay_decoders(open_driver("cpu"), torch.float32, ignore)
    assert len(closed) == 1


def direct(wall_ms: float, busy_ms: float, chunk: int = 16, context: int = 0) -> Direct:
    profile = ChunkProfile(wall_ms, 0.0, 0.0, 0.0, 0.0, busy_ms, 0.0, 9, 10)
    prediction = Prediction(0.25, 0.05, busy_ms, 400, 0.5)
    return Direct(chunk, context, timing(wall_ms, 0.1, 20), wall_ms, profile, prediction)


def cell(multiple: float, idle: float, chunk: int, context: int = 0, spread: float = 0.01) -> Cell:
    wall, again = timing(10 / multiple, spread, 20), timing(10.0, spread, 20)
    made = direct(10.0, 10 * (1 - idle), chunk, context)
    return Cell(made, Replay(chunk, context, wall, again, 0.1, 400))


def test_a_prediction_is_the_sum_of_its_terms_and_its_error_is_against_the_measured_time() -> None:
    made = direct(wall_ms=10.0, busy_ms=1.5)
    assert made.prediction.ms == pytest.approx(0.25 + 0.05 + 1.5 + 400 * 0.5 / 1e3)
    assert made.predicted_multiple == pytest.approx(5.0)
    assert made.idle_share == pytest.approx(0.85)
    both = Cell(made, Replay(16, 0, timing(2.5, 0.1, 20), timing(11.0, 0.1, 20)))
    assert (both.multiple, both.error, both.drift) == pytest.approx((4.4, -0.2, 0.1))


def test_a_prediction_is_made_of_what_was_timed_and_what_was_profiled() -> None:
    timed = Timed(16, 24, timing(10.0, 0.1, 30), host_ms=9.0, stage_ms=0.25)
    times = (DecoderTimes(0.5, 0.25), DecoderTimes(2.0, 0.25))
    profiled = Profiled((seen(100, 0.25), seen(900, 1.25)), (seen(400, 1.75, copy_in_ms=0.25),))
    gap, [made] = predict(times, [timed], profiled)
    assert (gap.launch_us, gap.gap_us) == pytest.approx((-62.5, 0.625))
    # The staged copy is stage's, not the graph's.
    assert made.prediction == Prediction(0.25, gap.launch_us / 1e3, 1.5, 400, gap.gap_us)
    assert (made.chunk, made.context, made.wall, made.host_ms) == (16, 24, timed.wall, 9.0)


def test_a_host_is_idle_outside_its_kernels_in_the_profiled_run_and_is_said_to_be() -> None:
    profile = ChunkProfile(8.0, 1.0, 1.0, 0.0, 6.0, 6.0, 0.0, 10, 10)
    made = replace(direct(wall_ms=40.0, busy_ms=6.0), profile=profile)
    assert made.idle_share == pytest.approx(0.25)  # not 34 of 40 ms: another process's
    [said, _] = verdict([Cell(made, Replay(16, 0, timing(30.0), timing(40.0)))])
    assert said.endswith("the device is idle 25 % of a profiled direct chunk")


def test_busier_than_the_wall_clock_is_not_idle_at_all() -> None:
    assert direct(wall_ms=10.0, busy_ms=12.0).idle_share == 0


def test_the_verdict_tells_apart_who_gains_much_and_who_gains_little() -> None:
    cells = [cell(9.4, 0.89, 32), cell(7.1, 0.86, 128), cell(1.04, 0.04, 2048),
             cell(1.5, 0.3, 512), cell(1.0, 0.01, 32, context=32768)]  # fmt: skip
    assert verdict(cells) == [
        "gains a large multiple at chunks of 32-128 (7.10-9.40x): the device is idle 86-89 % of a "
        "direct chunk",
        "gains clearly at chunks of 512 (1.50x): the device is idle 30 % of a direct chunk",
        "gains a few percent at chunks of 2048 (1.04x): the device is busy 96 % of a direct chunk",
        "shows no gain that can be told from noise at chunks of 32 behind 32768 tokens (1.00x): "
        "the device is busy 99 % of a direct chunk",
        "prompt graphs are worth turning on where chunks are of a size that gains",
    ]


def test_a_model_with_little_or_nothing_to_gain_is_told_so() -> None:
    assert verdict([cell(1.05, 0.05, 2048)])[-1].startswith("there is little to gain here")
    for multiple in (1.01, 0.8):
        assert verdict([cell(multiple, 0.02, 2048)])[-1].startswith("there is nothing to gain here")
    assert verdict([cell(0.8, 0.02, 2048)])[0].startswith("loses at chunks of 2048 (0.80x)")


def test_a_gain_smaller_than_the_spread_of_either_side_is_noise() -> None:
    noisy = cell(1.3, 0.02, 64, spread=3.0)
    assert noisy.is_noise
    assert verdict([noisy]) == [
        "shows no gain that can be told from noise at chunks of 64 (1.30x): the device is busy "
        "98 % of a direct chunk",
        "there is nothing to gain here: leave prompt graphs off for this model on this device",
    ]


@pytest.mark.parametrize(
    ("chunks", "contexts", "context_len", "words"),
    [
        ((), (0,), 0, "--chunks is ''; expected different whole numbers from 1"),
        ((32, 0), (0,), 0, "--chunks is '32,0'; expected different whole numbers from 1"),
        ((32, 32), (0,), 0, "--chunks is '32,32'"),
        ((32,), (-1,), 0, "--contexts is '-1'; expected different whole numbers from 0"),
        ((32, 512), (0, 100), 611, r"context_len \(-c\) is 611; expected at least 612"),
    ],
)
def test_a_grid_that_cannot_be_measured_is_an_error(chunks, contexts, context_len, words) -> None:
    with pytest.raises(BadParameter, match=words):
        ChunkGrid(chunks, contexts, context_len)


def test_all_chunks_of_a_context_share_an_engine_that_holds_the_largest() -> None:
    grid = ChunkGrid((32, 2048), (0, 32768))
    assert (grid.config(0).context_len, grid.config(0).num_ubatch) == (2048, 2048)
    assert grid.config(32768).context_len == 34816
    assert ChunkGrid((16,), (100, 4096)).config(4096).num_ubatch == 512  # fills faster
    assert ChunkGrid((16,), context_len=4096).config(0).context_len == 4096
    assert ChunkGrid((1,)).config(0).context_len == 2

"""Attribution: predicted before any graph exists, and replayed afterwards."""

import pickle
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphseed.capture import Namespace, Work
from graphseed.capture.driver import Executable
from graphseed.capture.errors import Reason
from graphseed.capture.space import Space
from graphseed.drivers import host, open_driver
from graphseed.drivers.host import HostArena, HostDriver
from graphseed.engine import BadParameter
from graphseed.engine.staging import Staging
from graphseed.measure.attribute import launch_gap, runs
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
from graphseed.measure.attribute.launch_gap import (
    NODES,
    NUM_DIRECT,
    GraphLine,
    LaunchGap,
    measure_line,
    profile_kernel,
)
from graphseed.measure.attribute.profile import ChunkProfile, profile_work
from graphseed.measure.attribute.runs import (
    MIN_RUNS,
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


def ignore(text: str) -> None:
    """A watch that nobody looks at."""


def test_the_prediction_stands_before_any_graph_of_the_model_is_captured(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []
    seed = Space.seed
    monkeypatch.setattr(Space, "seed", lambda *args: (seeds.append(args[1]), seed(*args))[1])
    driver = open_driver("cpu")
    line, timed = measure_direct(model, driver, GRID, ignore)
    nums = [num_profiled(one) for one in timed]
    profiled = profile_direct(model, driver, GRID, nums, ignore)
    gap, directs = predict(line, timed, profiled)
    assert not seeds
    assert pickle.loads(pickle.dumps(profiled)) == profiled  # it comes from another process
    assert gap == LaunchGap(line.launch_us, line.node_us, profiled.kernel_us)
    assert [(cell.context, cell.chunk) for cell in directs] == CELLS
    for cell in directs:
        assert cell.prediction.num_nodes == cell.profile.num_nodes > 100
        assert cell.prediction.gap_us == gap.gap_us
        assert cell.wall.num_runs >= MIN_RUNS and 0 < cell.host_ms <= cell.wall.median_ms
        assert 0 < cell.prediction.stage_ms < cell.wall.median_ms
    replays = measure_replay(model, driver, GRID, ignore)
    assert [(cell.context, cell.chunk) for cell in replays] == CELLS
    # One for each chunk, and one for the 24 tokens, padded, that fill the second context.
    assert [entry.identity.get("tokens") for entry in seeds] == [16, 40, 32, 16, 40]
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
    profile_work = runs.profile_work

    def spied(driver, prepare, num, trace):
        asked.append(num)
        return profile_work(driver, prepare, num, trace)

    monkeypatch.setattr(runs, "profile_work", spied)
    profiled = profile_direct(model, open_driver("cpu"), GRID, [1, 2, 3, 1], ignore)
    assert asked == [1, 2, 3, 1] and len(profiled.cells) == 4
    assert num_profiled(Timed(16, 0, Timing(1.0, 0.1, 30), 1.0, 0.1)) == runs.MAX_PROFILED
    assert num_profiled(Timed(16, 0, Timing(5000.0, 0.1, 3), 1.0, 0.1)) == 1


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


class Operators(TorchDispatchMode):
    """Every operator that ran, by name, with what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.told.append((str(func), output))
        return output


class PlantedMark:
    """A point of a clock that only launches move."""

    def __init__(self, now_us: float) -> None:
        self.now_us = now_us

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def ms_since(self, earlier: "PlantedMark") -> float:
        return (self.now_us - earlier.now_us) / 1e3


class PlantedArena(HostArena):
    """Launches that take 12 us and 1.5 us a node, and every fifth one far longer."""

    def __init__(self, driver: "PlantedDriver") -> None:
        super().__init__(Namespace.PROMPT)
        self.driver = driver
        self.is_closed = False

    def launch(self, executable: Executable) -> None:
        self.driver.num_launches += 1
        disturbed_us = 400.0 if self.driver.num_launches % 5 == 0 else 0.0
        self.driver.now_us += 12 + 1.5 * executable.num_nodes + disturbed_us

    def close(self) -> int:
        self.is_closed = True
        return super().close()


class PlantedDriver(HostDriver):
    """A host whose graphs cost what was planted."""

    def __init__(self) -> None:
        self.now_us, self.num_launches = 0.0, 0
        self.arenas: list[PlantedArena] = []

    def open(self, namespace: Namespace) -> PlantedArena:
        self.arenas.append(PlantedArena(self))
        return self.arenas[-1]

    def mark(self, timed: bool = False) -> PlantedMark:
        return PlantedMark(self.now_us)


def test_the_calibration_finds_the_planted_cost_of_launch_and_node() -> None:
    driver = PlantedDriver()
    line = measure_line(driver)
    assert (line.launch_us, line.node_us) == pytest.approx((12, 1.5))
    assert [arena.is_closed for arena in driver.arenas] == [True]


def test_the_calibration_leaves_no_arena_open_when_it_cannot_launch() -> None:
    class Failing(PlantedArena):
        def capture(self, work: Work):
            raise RuntimeError("planted")

    class FailingDriver(PlantedDriver):
        def open(self, namespace: Namespace) -> PlantedArena:
            self.arenas.append(Failing(self))
            return self.arenas[-1]

    driver = FailingDriver()
    with pytest.raises(RuntimeError, match="planted"):
        measure_line(driver)
    assert [arena.is_closed for arena in driver.arenas] == [True]


def test_the_gap_is_what_a_node_costs_beyond_its_kernel_and_may_be_negative() -> None:
    assert LaunchGap(10, 3.0, 1.25).gap_us == 1.75
    assert LaunchGap(10, 1.0, 1.25).gap_us == -0.25


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def test_the_near_empty_kernels_fill_the_device_and_are_of_four_kinds_in_turn(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = open_driver(device)
    seen = []

    def spied(driver, prepare, num):
        with Operators() as operators:
            prepare()()
        seen.extend(operators.told)
        return profile_work(driver, prepare, num)

    monkeypatch.setattr(launch_gap, "profile_work", spied)
    assert 0 < profile_kernel(driver) < 1000
    names, outputs = zip(*seen, strict=True)
    assert len(names) == NUM_DIRECT and len(set(names)) == 4
    assert names == names[:4] * (NUM_DIRECT // 4)
    assert all(num_nodes % 4 == 0 for num_nodes in NODES)  # the same mix in every graph
    # Each writes over what the next one reads; some multiprocessors without a block are too few.
    assert len({output.data_ptr() for output in outputs}) == 1
    assert outputs[0].numel() == 4096 * driver.num_sms
    assert torch.isfinite(outputs[0]).all()


def test_noise_cannot_make_a_launch_take_less_than_no_time() -> None:
    line = GraphLine.through(((NODES[0], 0.1), (NODES[1], 10.0)))
    assert line.launch_us == 0 and line.node_us == pytest.approx(9.9e3 / (NODES[1] - NODES[0]))


def direct(wall_ms: float, busy_ms: float, chunk: int = 16, context: int = 0) -> Direct:
    profile = ChunkProfile(wall_ms, 0.0, 0.0, 0.0, 0.0, busy_ms, 0.0, 9, 10)
    prediction = Prediction(0.25, 0.05, busy_ms, 400, 0.5)
    return Direct(chunk, context, Timing(wall_ms, 0.1, 20), wall_ms, profile, prediction)


def cell(multiple: float, idle: float, chunk: int, context: int = 0, spread: float = 0.01) -> Cell:
    wall, again = Timing(10 / multiple, spread, 20), Timing(10.0, spread, 20)
    made = direct(10.0, 10 * (1 - idle), chunk, context)
    return Cell(made, Replay(chunk, context, wall, again, 0.1, 400))


def test_a_prediction_is_the_sum_of_its_terms_and_its_error_is_against_the_measured_time() -> None:
    made = direct(wall_ms=10.0, busy_ms=1.5)
    assert made.prediction.ms == pytest.approx(0.25 + 0.05 + 1.5 + 400 * 0.5 / 1e3)
    assert made.predicted_multiple == pytest.approx(5.0)
    assert made.idle_share == pytest.approx(0.85)
    both = Cell(made, Replay(16, 0, Timing(2.5, 0.1, 20), Timing(11.0, 0.1, 20)))
    assert (both.multiple, both.error, both.drift) == pytest.approx((4.4, -0.2, 0.1))


def test_a_prediction_is_made_of_what_was_timed_and_what_was_profiled() -> None:
    timed = Timed(16, 24, Timing(10.0, 0.1, 30), host_ms=9.0, stage_ms=0.25)
    seen = ChunkProfile(15.0, 5.0, 6.0, 4.0, 0.0, 1.75, 0.25, 380, 400)
    gap, [made] = predict(GraphLine(50, 1.5), [timed], Profiled(1.0, (seen,)))
    assert (gap.launch_us, gap.node_us, gap.kernel_us, gap.gap_us) == (50, 1.5, 1.0, 0.5)
    # The staged copy is stage's, not the graph's.
    assert made.prediction == Prediction(0.25, 0.05, 1.5, 400, 0.5)
    assert (made.chunk, made.context, made.wall, made.host_ms) == (16, 24, timed.wall, 9.0)


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

"""A row of the benchmark: what is run, what is timed, what is found."""

from collections.abc import Callable

import numpy as np
import pytest

from graphseed.capture import CannotCapture, Driver, Namespace, Reason
from graphseed.capture.events import Cause, Released, Seeded
from graphseed.capture.identity import FirstNode, GraphIdentity
from graphseed.drivers import open_driver
from graphseed.drivers.host import HostArena, HostDriver
from graphseed.engine.errors import DeviceMemoryError
from graphseed.engine.step import StepRunner
from graphseed.measure.bench.ceiling import Ceiling, measure_ceiling
from graphseed.measure.bench.grid import SHORT_DECODE_LEN, BenchTest
from graphseed.measure.bench.lane import Lane, Watch
from graphseed.measure.bench.rows import BenchRow, mean_and_sd, with_decode_beside
from graphseed.measure.bench.runs import BenchSettings, measure_test, num_runs
from graphseed.measure.policies import POLICIES
from graphseed.models import Model, load_model

CEILING = Ceiling({"float32": 0.05}, 10.0)
ALL = tuple(POLICIES)
TEST = BenchTest(40, 0, num_ubatch=16)  # three steps: 16, 16, 8 of 16


def measured(
    model: Model,
    test: BenchTest,
    policies: tuple[str, ...] = ALL,
    *,
    needs_decode: bool = False,
    driver: Callable[[], Driver] = lambda: open_driver("cpu"),
    **settings: object,
) -> BenchRow:
    how = BenchSettings(policies, **{"num_repetitions": 2, **settings})  # type: ignore[arg-type]
    ticks: list[None] = []
    row = measure_test(
        model, {name: driver() for name in policies}, test, how, CEILING,
        needs_decode=needs_decode, tick=lambda: ticks.append(None),
    )  # fmt: skip
    if row.is_side_by_side:
        assert len(ticks) == num_runs(test, how, needs_decode)
    return row


def test_prompts_without_a_decode_between_replay_under_seed_and_resident_only(model):
    row = measured(model, TEST)
    hits = {name: figures.hit_rate for name, figures in row.figures.items()}
    assert hits == {"disabled": 0, "off": 0, "seed": 1, "resident": 1}
    assert {n: f.num_seeds for n, f in row.figures.items()} == {
        "disabled": 0, "off": 0, "seed": 1, "resident": 1,
    }  # fmt: skip
    for name in ("seed", "resident"):
        figures = row.figures[name]
        assert figures.capture_ms > 0 and figures.instantiate_ms > 0 and figures.num_bytes > 0
    assert row.is_equal and row.is_side_by_side and not row.differences


def test_a_decode_behind_each_prompt_lets_seed_replay_later_chunks_alone(model):
    row = measured(model, BenchTest(40, 3, num_ubatch=16))
    assert row.figures["seed"].hit_rate == pytest.approx(2 / 3)  # the first chunk seeds again
    assert row.figures["resident"].hit_rate == 1
    short = measured(model, BenchTest(16, 3, num_ubatch=16), ("off", "seed"))
    assert short.figures["seed"].hit_rate == 0
    # Once a prompt: the warm-up, 2 repetitions, 2 proofs; and the one decode graph.
    assert short.figures["seed"].num_seeds == 5 + 1
    assert short.is_equal


def test_a_decode_row_tells_the_decode_graphs(model):
    row = measured(model, BenchTest(0, 4))
    assert {n: f.hit_rate for n, f in row.figures.items()} == {
        "disabled": 0, "off": 1, "seed": 1, "resident": 1,
    }  # fmt: skip
    assert row.prompt_multiple("seed") is None
    assert row.decode_ratio("off") == 1 and row.decode_ratio("disabled")


def test_without_a_warm_up_the_seeding_repetition_is_timed(model):
    row = measured(model, TEST, ("off", "seed"), warms_up=False)
    # Two repetitions of three observations, the very first direct.
    assert row.figures["seed"].hit_rate == pytest.approx(5 / 6)
    assert len(row.figures["seed"].samples_ms) == 2


def test_rates_are_tokens_over_the_whole_repetition_and_halves_are_kept_apart(model):
    row = measured(model, BenchTest(20, 2, num_ubatch=16, num_parallel=3), ("off",))
    figures = row.figures["off"]
    assert figures.num_tokens == 3 * 22
    for rate, total, prompt, decode in zip(
        figures.rates, figures.samples_ms, figures.prompt_ms, figures.decode_ms, strict=True
    ):
        assert total == prompt + decode and rate == pytest.approx(1e3 * 66 / total)
    assert row.ceiling_share("off") > 0


def test_every_repetition_has_fresh_tokens_and_all_policies_the_same(model, monkeypatch):
    seen: dict[str, list[tuple[int, bytes]]] = {}
    prompt = Lane.prompt

    def noted(self, token_ids, observer=None):
        start = self._slots[0].num_tokens
        seen.setdefault(self.policy, []).append((start, np.asarray(token_ids).tobytes()))
        prompt(self, token_ids, observer)

    monkeypatch.setattr(Lane, "prompt", noted)
    row = measured(model, BenchTest(20, 0, depth_len=7, num_ubatch=16, num_parallel=2))
    assert row.is_equal
    assert len({tuple(runs) for runs in seen.values()}) == 1 and set(seen) == set(ALL)
    (depth_start, _), *runs = seen["off"]
    assert depth_start == 0 and [start for start, _ in runs] == [7] * 5
    ids = [ids for _, ids in runs]
    assert len(set(ids)) == 5  # the warm-up, repetitions, and the digested ones


def test_policies_take_turns_in_each_repetition(model, monkeypatch):
    order: list[str] = []
    prompt = Lane.prompt

    def noted(self, token_ids, observer=None):
        order.append(self.policy)
        prompt(self, token_ids, observer)

    monkeypatch.setattr(Lane, "prompt", noted)
    measured(model, TEST, ("off", "seed"))
    assert order == ["off", "seed"] * 3 + ["off", "off", "seed", "seed"]


def test_a_prompt_row_that_needs_a_decode_gets_one_behind_its_prompt(model):
    row = measured(model, TEST, ("off", "seed"), needs_decode=True)
    assert row.decode_of == f"tg{SHORT_DECODE_LEN} after the prompt"
    for name in ("off", "seed"):
        figures = row.figures[name]
        assert len(figures.decode_ms) == 2 and row.decode_ratio(name) is not None
        assert figures.samples_ms == figures.prompt_ms  # it is not part of the repetition
    assert row.figures["seed"].hit_rate == 1 and row.is_equal


def test_a_prompt_row_stands_beside_the_longest_decode_row_of_its_group(model):
    tests = [TEST, BenchTest(0, 2, num_ubatch=16), BenchTest(0, 3, num_ubatch=16),
             BenchTest(8, 2, num_ubatch=16)]  # fmt: skip
    rows = [measured(model, test, ("off", "seed")) for test in tests]
    assert rows[0].decode_ratio("seed") is None
    beside = with_decode_beside(rows)
    assert [row.decode_of for row in beside] == ["tg3", "tg2", "tg3", "pp8+tg2"]
    assert beside[0].decode_ratio("seed") == rows[2].decode_ratio("seed")
    assert beside[0].figures["seed"].samples_ms == rows[0].figures["seed"].samples_ms
    assert beside[1:] == rows[1:]
    assert with_decode_beside(rows[:1]) == rows[:1]


@pytest.mark.parametrize(
    ("what", "words"), [("logits", ("logits under seed",)), ("kv", ("K/V under seed",))]
)
def test_bytes_that_differ_under_one_policy_are_found_and_named(model, monkeypatch, what, words):
    run = StepRunner.run

    def disturbed(self, plan, observer=None):
        is_seed = self._cache.selection is POLICIES["seed"]

        class _Between:
            def before(self, plan):
                observer.before(plan)

            def after(self, plan, logits):
                observer.after(plan, logits + 2.0**-20 if what == "logits" else logits)

        if observer is None or not is_seed:
            return run(self, plan, observer)
        logits = run(self, plan, _Between())
        if what == "kv" and plan.parts[0].start == 32:
            self.kv.v[-1].view(-1, *self.kv.v[-1].shape[2:])[
                plan.parts[0].table.kv_indices(33, 34)
            ] += 1
        return logits

    monkeypatch.setattr(StepRunner, "run", disturbed)
    row = measured(model, TEST)
    assert not row.is_equal and row.differences == words


class _IdleDriver(HostDriver):
    """A host whose prompt graphs, launched, do nothing."""

    def open(self, namespace: Namespace) -> HostArena:
        arena = HostArena(namespace)
        if namespace is Namespace.PROMPT:
            arena.launch = lambda executable: None  # type: ignore[method-assign]
        return arena


@pytest.mark.parametrize("needs_decode", [False, True])
def test_a_replay_that_writes_nothing_is_found_also_where_a_decode_stands_before_it(
    model, needs_decode
):
    test = BenchTest(16, 0, num_ubatch=16)
    row = measured(model, test, ("off", "seed"), needs_decode=needs_decode, driver=_IdleDriver)
    assert row.differences == ("logits under seed", "K/V under seed")


class _CrampedArena(HostArena):
    def capture(self, work):
        raise CannotCapture(Reason.MEMORY_FLOOR, "3 MiB are free")


class _CrampedDriver(HostDriver):
    """A host that finds no memory for graphs while more than one lane is open."""

    num_open = 0

    def open(self, namespace: Namespace) -> HostArena:
        return _CrampedArena(namespace) if type(self).num_open > 1 else HostArena(namespace)


@pytest.fixture
def counted_lanes(monkeypatch):
    monkeypatch.setattr(_CrampedDriver, "num_open", 0)
    init, close = Lane.__init__, Lane.close

    def opening(self, *args):
        _CrampedDriver.num_open += 1
        init(self, *args)

    def closing(self):
        _CrampedDriver.num_open -= 1
        close(self)

    monkeypatch.setattr(Lane, "__init__", opening)
    monkeypatch.setattr(Lane, "close", closing)


def test_graphs_refused_for_lack_of_memory_make_policies_run_one_after_another(
    model, counted_lanes
):
    row = measured(model, TEST, driver=_CrampedDriver)
    assert not row.is_side_by_side and tuple(row.figures) == ALL
    assert row.figures["seed"].hit_rate == 1 and not row.figures["seed"].refusals
    assert row.is_equal


def test_kv_memory_for_one_policy_at_a_time_is_enough(model, monkeypatch):
    init, num_open = Lane.__init__, []

    def cramped(self, *args):
        if num_open:
            raise DeviceMemoryError("KV memory", 1 << 20, 0, "lower -d")
        num_open.append(1)
        init(self, *args)

    close = Lane.close
    monkeypatch.setattr(Lane, "__init__", cramped)
    monkeypatch.setattr(Lane, "close", lambda self: (num_open.clear(), close(self))[1])
    row = measured(model, TEST, ("off", "resident"))
    assert not row.is_side_by_side and row.figures["resident"].hit_rate == 1


def test_too_little_memory_for_one_policy_is_a_clear_error(model, monkeypatch):
    def run_out(self, *args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(Lane, "prompt", run_out)
    with pytest.raises(DeviceMemoryError, match=r"test pp40 ran out, .* lower -p, -n, -d"):
        measured(model, TEST)


def test_other_errors_are_not_taken_for_a_lack_of_memory(model, monkeypatch):
    def fail(self, *args):
        raise RuntimeError("something else")

    monkeypatch.setattr(Lane, "prompt", fail)
    with pytest.raises(RuntimeError, match="something else"):
        measured(model, TEST)


def test_a_refused_graph_is_told_with_its_reason(model):
    class _Refusing(HostDriver):
        def open(self, namespace):
            arena = HostArena(namespace)

            def capture(work):
                raise CannotCapture(Reason.HOST_SYNC, "item")

            arena.capture = capture
            return arena

    row = measured(model, TEST, ("off", "seed"), driver=_Refusing)
    figures = row.figures["seed"]
    assert figures.refusals == ("prompt graph: host synchronisation (item)",)
    assert (figures.hit_rate, figures.num_seeds, figures.num_bytes) == (0, 0, 0)
    assert row.is_side_by_side and row.is_equal


def test_each_graph_counts_once_by_its_median_and_bytes_by_their_peak():
    watch = Watch()
    for name, tokens, capture_ms, num_bytes in (
        ("prompt", 16, 5, 100), ("prompt", 16, 7, 100), ("prompt", 16, 90, 100),
        ("prompt", 32, 1, 50), ("decode", 1, 1000, 9),
    ):  # fmt: skip
        namespace = Namespace(name)
        identity = GraphIdentity(
            namespace, "cpu", FirstNode("op", (tokens,), "float32"), (("tokens", tokens),)
        )
        watch(
            Seeded(
                device="cpu", namespace=namespace, identity=identity, num_nodes=1,
                num_bytes=num_bytes, capture_ns=capture_ms * 10**6, instantiate_ns=2 * 10**6,
                root="op", num_seeds=1,
            )
        )  # fmt: skip
        if tokens == 16:
            watch(
                Released(
                    device="cpu", namespace=namespace, cause=Cause.DECODE, num_entries=1,
                    bytes_held=100, bytes_returned=100, elapsed_ns=1,
                )
            )  # fmt: skip
    prompts = [Namespace.PROMPT]
    assert watch.capture_ms(prompts) == 7 + 1 and watch.instantiate_ms(prompts) == 2 + 2
    assert watch.num_seeds(prompts) == 4 and watch.most_bytes(prompts) == 100
    assert watch.capture_ms(Namespace) == 1008 and watch.most_bytes(Namespace) == 109


def test_the_deviation_is_the_samples():
    assert mean_and_sd([1.0, 2.0, 4.0]) == (
        pytest.approx(7 / 3), pytest.approx(((16 + 1 + 25) / 9 / 2) ** 0.5)
    )  # fmt: skip
    assert mean_and_sd([3.0]) == (3.0, 0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe"])
@pytest.mark.parametrize(
    "test",
    [
        BenchTest(40, 0, num_ubatch=32),
        BenchTest(40, 4, depth_len=50, num_ubatch=32),
        BenchTest(40, 4, num_ubatch=64, num_parallel=3),
        BenchTest(0, 8),
    ],
    ids=lambda test: test.name,
)
def test_policies_side_by_side_on_a_gpu_have_equal_bytes(preset, test):
    driver = open_driver("cuda")
    on_gpu = load_model(
        f"random:{preset}", device=driver.device, dtype="bf16", bf16_is_fast=True, progress=False
    )
    drivers = {name: open_driver("cuda") for name in ALL}
    ceiling = measure_ceiling(driver, (on_gpu.dtype,))
    row = measure_test(
        on_gpu, drivers, test, BenchSettings(ALL, num_repetitions=3), ceiling,
        needs_decode=not test.new_len,
    )  # fmt: skip
    assert row.is_equal and row.is_side_by_side
    assert row.figures["resident"].hit_rate == 1 and not row.figures["disabled"].hit_rate
    assert not any(figures.refusals for figures in row.figures.values())
    assert all(0 < row.ceiling_share(name) < 1 for name in ALL)  # tiny: nowhere near it

"""Reading a profile: what is the device's, what of the host's time is whose."""

from dataclasses import dataclass

import pytest
import torch
from torch._C._autograd import DeviceType

from graphseed.drivers import open_driver
from graphseed.engine import EngineConfig
from graphseed.measure.attribute.profile import (
    LEAST,
    MEDIAN,
    SUBMIT,
    WHOLE,
    HostOperators,
    NothingProfiled,
    Part,
    Span,
    exclusive_ns,
    pieces,
    profile_work,
    union_ns,
)
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session
from graphseed.models import load_model


@dataclass
class Told:
    """An event as kineto gives it: microseconds here, nanoseconds there."""

    what: str
    start: int
    end: int
    is_device: bool = False
    kind: str = ""

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return 1000 * self.start

    def end_ns(self) -> int:
        return 1000 * self.end

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.is_device else DeviceType.CPU

    def activity_type(self) -> str:
        return self.kind


def gpu_piece(at: int) -> list[Told]:
    """A staged copy, a GEMM of torch, a custom operator that launches, a device copy."""
    host = [
        Told(WHOLE, 0, 200), Told(SUBMIT, 0, 100),
        Told("aten::copy_", 5, 15), Told("cudaMemcpyAsync", 8, 12),
        Told("aten::linear", 20, 50), Told("aten::mm", 25, 45), Told("cudaLaunchKernel", 30, 40),
        Told("graphseed::paged_attention", 55, 85), Told("aten::empty", 60, 65),
        Told("cuLaunchKernelEx", 70, 78),
        Told("cudaDeviceSynchronize", 101, 199),
    ]  # fmt: skip
    device = [
        Told("Memcpy HtoD (Pinned -> Device)", 13, 15, True, "gpu_memcpy"),
        Told("sm90_gemm", 50, 90, True, "kernel"),
        Told("_attention", 95, 125, True, "kernel"),
        Told("Memcpy DtoD (Device -> Device)", 120, 130, True, "gpu_memcpy"),  # overlaps
        Told(WHOLE, 13, 130, True, "gpu_user_annotation"),
        Told("Context Sync", 0, 199, True, "cuda_sync"),
    ]  # fmt: skip
    told = [*host, *device]
    return [Told(e.what, e.start + at, e.end + at, e.is_device, e.kind) for e in told]


def test_a_gpu_is_busy_in_the_union_and_the_host_split_gives_each_instant_to_one() -> None:
    [found] = pieces(gpu_piece(0), is_host=False)
    assert found.host_ms == pytest.approx(0.100)
    assert found.driver_ms == pytest.approx((4 + 10 + 8) / 1e3)
    assert found.dispatcher_ms == pytest.approx((6 + 20 + 5) / 1e3)  # without what calls the driver
    assert found.python_ms == pytest.approx((100 - 22 - 31) / 1e3)  # a custom operator's body too
    assert found.kernel_ms == 0
    assert found.busy_ms == pytest.approx((2 + 40 + 35) / 1e3)
    assert found.copy_in_ms == pytest.approx(0.002)
    assert (found.num_kernels, found.num_nodes) == (2, 3)
    assert sum(found.share(part) for part in Part) == pytest.approx(1)


@pytest.mark.parametrize("skew", [-30, 30])
def test_a_skew_of_the_devices_clock_moves_no_kernel_into_another_piece(skew: int) -> None:
    events = [event for at in (0, 300, 600) for event in gpu_piece(at)]
    for event in events:
        if event.is_device:
            event.start, event.end = event.start + skew, event.end + skew
    found = pieces(events, is_host=False)
    assert len(found) == 3 and len(set(found)) == 1
    assert (found[0].num_kernels, found[0].num_nodes) == (2, 3)


def test_a_build_without_kinds_of_activity_is_read_by_name() -> None:
    class Older:
        def __init__(self, told: Told) -> None:
            self.name, self.device_type = told.name, told.device_type
            self.start_ns, self.end_ns = told.start_ns, told.end_ns

    events = [e for e in gpu_piece(0) if e.kind != "cuda_sync"]
    assert pieces([Older(e) for e in events], is_host=False) == pieces(events, is_host=False)


def test_every_instant_belongs_to_the_innermost_span_and_a_child_ends_with_its_parent() -> None:
    whole = Span(100, 200, Part.PYTHON)
    spans = [
        Span(110, 150, Part.DISPATCHER), Span(120, 130, Part.DRIVER),
        Span(145, 160, Part.DRIVER),  # ends after what called it: clocks
        Span(90, 99, Part.DRIVER), Span(200, 300, Part.DRIVER),  # outside
        Span(190, 260, Part.DISPATCHER),  # cut off
    ]  # fmt: skip
    times, num_kernels = exclusive_ns(spans, whole)
    assert times == {
        Part.PYTHON: 50, Part.DISPATCHER: 35, Part.DRIVER: 15, Part.KERNEL: 0,
    }  # fmt: skip
    assert num_kernels == 0


def test_what_is_inside_a_kernel_is_the_kernels_and_counts_once() -> None:
    spans = [
        Span(0, 50, Part.KERNEL), Span(10, 20, Part.KERNEL), Span(30, 40, Part.DISPATCHER),
        Span(60, 70, Part.KERNEL),
    ]  # fmt: skip
    times, num_kernels = exclusive_ns(spans, Span(0, 100, Part.PYTHON))
    assert (times[Part.KERNEL], times[Part.PYTHON], num_kernels) == (60, 40, 2)


def test_a_union_counts_what_overlaps_once() -> None:
    assert union_ns([(30, 40), (0, 10), (5, 20), (6, 8)]) == 30
    assert union_ns([]) == 0


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::linear", Part.DISPATCHER), ("aten::matmul", Part.DISPATCHER),
        ("aten::to", Part.DISPATCHER), ("aten::view", Part.DISPATCHER),
        ("aten::transpose", Part.DISPATCHER), ("aten::empty", Part.DISPATCHER),
        ("aten::mm", Part.KERNEL), ("aten::_to_copy", Part.KERNEL), ("aten::sum", Part.KERNEL),
        ("aten::mean", Part.KERNEL), ("aten::mul", Part.KERNEL), ("aten::add_", Part.KERNEL),
        ("graphseed::paged_attention", Part.KERNEL),
    ],
)  # fmt: skip
def test_a_host_operator_is_a_node_where_it_computes(name: str, part: Part) -> None:
    assert HostOperators().part(name) is part


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3", "tiny-gemma3"])
def test_a_profile_on_a_host_counts_the_nodes_that_a_recording_of_it_has(preset: str) -> None:
    driver = open_driver("cpu")
    model = load_model(
        f"random:{preset}", device="cpu", dtype="fp32", bf16_is_fast=False, progress=False
    )
    config = EngineConfig(context_len=32, num_ubatch=16)
    with Session(model, driver, config, POLICIES["seed"]) as session, session.slot() as slot:

        def prepare():
            slot.rewind()
            [plan] = slot.prompt(range(3, 19))
            return lambda: session.core.runner.run_direct(plan)

        found = profile_work(driver, prepare, 2)
        [plan] = slot.prompt(range(3, 19))
        session.run(plan)
        [entry] = session.core.cache.spaces[plan.namespace].entries.values()
        assert found.num_nodes - 1 == entry.executable.num_nodes  # the staged copy is no node
    assert 0 < found.busy_ms == found.kernel_ms < found.host_ms


@pytest.mark.parametrize(("rank", "num_nodes"), [(LEAST, 1), (MEDIAN, 20)])
def test_the_piece_at_a_rank_of_busy_time_is_returned_and_the_first_is_left_out(
    rank: float, num_nodes: int
) -> None:
    values, nums = torch.ones(100_000), iter([0, 400, 1, 20])

    def prepare():
        num = next(nums)
        return lambda: [values.neg_() for _ in range(num)]

    assert profile_work(open_driver("cpu"), prepare, 3, rank=rank).num_nodes == num_nodes


def test_work_without_a_kernel_is_an_error_that_says_what_is_needed() -> None:
    view = torch.zeros(4)
    with pytest.raises(NothingProfiled, match="saw no work on cpu: it needs a build of torch"):
        profile_work(open_driver("cpu"), lambda: lambda: view.view(2, 2), 1)

"""Engines over tiny random models, on the host driver and (marker cuda) on the CUDA driver."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from graphseed.capture import Driver, Event, Policy, Selection, WrongThread
from graphseed.drivers import open_driver
from graphseed.engine import EngineConfig, EngineCore, SamplingParams
from graphseed.engine.step import StepTrace
from graphseed.models import Model, load_model

SELECTIONS = {
    "disabled": Selection(Policy.OFF, Policy.OFF),
    "off": Selection(),
    "seed": Selection(Policy.SEED, was_asked=True, source="test"),
    "resident": Selection(Policy.RESIDENT, was_asked=True, source="test"),
}


@functools.cache
def driver_of(device: str) -> Driver:
    return open_driver(device)


@functools.cache
def model_of(preset: str, device: str, dtype: str) -> Model:
    return load_model(
        f"random:{preset}",
        device=device,
        dtype=dtype,
        bf16_is_fast=True,
        progress=False,
        takes_rerankers=True,
    )


@dataclass
class Answer:
    """The bytes of one request: logits of every step, and the KV rows it wrote."""

    tokens: tuple[int, ...]
    logits: tuple[bytes, ...]
    kv: str
    text: str


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def events() -> list[Event]:
    return []


MakeEngine = Callable[..., EngineCore]


@pytest.fixture
def make_engine(device: str, events: list[Event]) -> Iterator[MakeEngine]:
    """Opens engines on `device`; whatever the test leaves open is closed after it."""
    opened = []

    def make(
        policy: str = "seed", preset: str = "tiny-llama", dtype: str = "fp32", **more: object
    ) -> EngineCore:
        names = ("num_parallel", "kv_len", "reuses_prefixes", "max_waiting")
        sizes = {name: more.pop(name) for name in names if name in more}
        # Off unless asked for: a prompt that was seen before would have another plan.
        sizes.setdefault("reuses_prefixes", False)
        config = EngineConfig(
            context_len=int(more.pop("context_len", 256)),  # type: ignore[call-overload]
            num_ubatch=int(more.pop("num_ubatch", 32)),  # type: ignore[call-overload]
            **sizes,  # type: ignore[arg-type]
        )
        is_warm = more.pop("is_warm", True)
        driver = driver_of(device)
        engine = EngineCore(
            model_of(preset, driver.device, dtype), driver, config, SELECTIONS[policy],
            **more,  # type: ignore[arg-type]
        )  # fmt: skip
        engine.log.subscribe(events.append)
        if is_warm:
            engine.warm_up()
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        with contextlib.suppress(WrongThread):  # graphs belong to the thread that ran them
            engine.close()


def prompt_of(num_tokens: int, seed: int = 0, vocab: int = 256) -> list[int]:
    """Random token ids, the same for the same arguments."""
    return random.Random(seed).choices(range(vocab), k=num_tokens)


def answer(engine: EngineCore, prompt: list[int], new: int = 4, **params: object) -> Answer:
    """Run one request and return its bytes."""
    trace, last, text = StepTrace(engine.driver), None, ""
    sampling = SamplingParams(max_tokens=new, ignore_eos=True, **params)  # type: ignore[arg-type]
    for delta in engine.stream(prompt, sampling, observer=trace, kv_digest=True):
        last, text = delta, text + delta.text
    assert last is not None and last.kv_digest is not None
    logits = tuple(row.cpu().numpy().tobytes() for row in trace.logits)
    return Answer(tuple(last.request.output_ids), logits, last.kv_digest, text)

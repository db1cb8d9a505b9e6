"""One policy's lane in a benchmark: its session, its sequences, and what its cache did.

Owns Lane and Watch. A lane runs prompts and decodes as it is told; who runs when, and what is
timed, is bench's business. Does not compare.
"""

# S sequences, T tokens of each

import hashlib
import statistics
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from graphseed.capture.driver import Driver
from graphseed.capture.errors import Reason
from graphseed.capture.events import Event, Refused, Released, Seeded
from graphseed.capture.identity import GraphIdentity, Namespace
from graphseed.engine.config import EngineConfig
from graphseed.engine.plan import SequencePart, StepPlan
from graphseed.engine.step import StepObserver
from graphseed.measure.bench.grid import BenchTest, Piece
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session
from graphseed.models.model import Model

TokenIds = npt.NDArray[np.int32]

_MEMORY_REASONS: Final = frozenset({Reason.OUT_OF_MEMORY, Reason.MEMORY_FLOOR})


class Watch:
    """What graphs cost, by namespace. Subscribe it to a session's log before anything runs."""

    def __init__(self) -> None:
        self.refusals: list[Refused] = []
        self._seeds: dict[GraphIdentity, list[Seeded]] = {}
        self._held: dict[Namespace, int] = dict.fromkeys(Namespace, 0)
        self._most: dict[Namespace, int] = dict.fromkeys(Namespace, 0)

    def __call__(self, event: Event) -> None:
        match event:
            case Seeded():
                self._seeds.setdefault(event.identity, []).append(event)
                self._held[event.namespace] += event.num_bytes
                held = self._held[event.namespace]
                self._most[event.namespace] = max(self._most[event.namespace], held)
            case Released():
                self._held[event.namespace] -= event.bytes_held
            case Refused():
                self.refusals.append(event)

    @property
    def lacked_memory(self) -> bool:
        """Whether a graph was refused because memory was short."""
        return any(event.reason in _MEMORY_REASONS for event in self.refusals)

    def num_seeds(self, namespaces: Iterable[Namespace]) -> int:
        """Graphs captured and instantiated, every time counted."""
        return sum(len(seeds) for seeds in self._of(namespaces).values())

    def capture_ms(self, namespaces: Iterable[Namespace]) -> float:
        """Milliseconds to capture every graph once: the median of each, summed."""
        return _sum_of_medians([s.capture_ns for s in e] for e in self._of(namespaces).values())

    def instantiate_ms(self, namespaces: Iterable[Namespace]) -> float:
        """Milliseconds to instantiate every graph once: the median of each, summed."""
        return _sum_of_medians([s.instantiate_ns for s in e] for e in self._of(namespaces).values())

    def most_bytes(self, namespaces: Iterable[Namespace]) -> int:
        """The most device memory that graphs held."""
        return sum(self._most[namespace] for namespace in namespaces)

    def _of(self, namespaces: Iterable[Namespace]) -> Mapping[GraphIdentity, list[Seeded]]:
        wanted = set(namespaces)
        return {i: seeds for i, seeds in self._seeds.items() if i.namespace in wanted}


class StepDigest:
    """An observer that digests the logits of each step. It waits for the device: not for timing."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def before(self, plan: StepPlan) -> None:
        """Nothing to see yet."""

    def after(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Take one step's logits, [S, V]."""
        self._sha.update(logits.cpu().numpy().tobytes())

    def hexdigest(self) -> str:
        """SHA-256 of all logits so far."""
        return self._sha.hexdigest()


class Lane(AbstractContextManager["Lane"]):
    """A session under one policy, sized for one test. One thread; closed by its owner."""

    def __init__(self, policy: str, model: Model, driver: Driver, test: BenchTest) -> None:
        self.policy = policy
        self.driver = driver
        self.watch = Watch()
        self._test = test
        config = EngineConfig(
            context_len=test.context_len, num_ubatch=test.capacity,
            num_parallel=test.num_parallel, reuses_prefixes=False,
        )  # fmt: skip
        self._session = Session(model, driver, config, POLICIES[policy])
        self._session.core.log.subscribe(self.watch)
        self._slots = [self._session.slot() for _ in range(test.num_parallel)]

    def counts(self, namespace: Namespace) -> tuple[int, int]:
        """Observations of a namespace so far, and how many of them were replayed."""
        counts = self._session.core.tally.counts[namespace]
        return counts.candidates, counts.replayed

    def ready(self, depth_ids: TokenIds) -> None:
        """Initialise libraries and prefill the context before the test, [S, depth] ids."""
        self._session.core.warm_up()
        if depth_ids.size:
            self.prompt(depth_ids)
        self.settle()

    def settle(self) -> None:
        """Be idle: wait for the device, and capture what `resident` observed."""
        self._session.settle()

    def rewind(self, num_tokens: int) -> None:
        """Forget what every sequence holds behind a position."""
        for slot in self._slots:
            slot.rewind(num_tokens)

    def prompt(self, token_ids: TokenIds, observer: StepObserver | None = None) -> None:
        """Submit the next tokens of every sequence, [S, T] ids, as prompts that share steps."""
        start = self._slots[0].num_tokens
        steps = self._test.prompt_steps(start, start + token_ids.shape[1])
        plans = [self._session.packed(self._parts(step, token_ids, start)) for step in steps]
        self._session.run_prompt(plans, observer)

    def decode(self, token_ids: TokenIds, observer: StepObserver | None = None) -> None:
        """Decode the given tokens, [S, T] ids, one of every sequence in a step.

        The host waits for each step, as one that samples does.
        """
        start = self._slots[0].num_tokens
        for step in self._test.decode_steps(start, token_ids.shape[1]):
            self._session.run(self._session.decode(self._parts(step, token_ids, start)), observer)
            self.driver.synchronize()

    def kv_digest(self, start: int) -> str:
        """SHA-256 of the K/V that every sequence holds from a position on."""
        indices = torch.cat([slot.kv_indices()[start:] for slot in self._slots])
        return self._session.core.runner.kv.digest(indices)

    def close(self) -> None:
        """Give everything back. May be called twice."""
        for slot in self._slots:
            slot.close()
        self._session.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _parts(self, step: Iterable[Piece], token_ids: TokenIds, start: int) -> list[SequencePart]:
        return [
            self._slots[piece.sequence].part(
                token_ids[piece.sequence, piece.start - start :][: piece.num_tokens]  # type: ignore[arg-type]
            )
            for piece in step
        ]


def _sum_of_medians(times_ns: Iterable[list[int]]) -> float:
    return sum(statistics.median(times) for times in times_ns) / 1e6

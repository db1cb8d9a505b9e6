"""The requests that are being answered: what a step's logits bring them, and how they end.

Owns Answers: the open answers, the sampling of a batch, and the deltas that wait to be handed out.
One request's error is its own. Does not run steps and does not choose what runs.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from graphseed.capture.errors import DeviceLost
from graphseed.engine.answer import Answer, DeadlineExceeded, Delta, fail, finish
from graphseed.engine.grammar import Grammar
from graphseed.engine.guard import DeviceGuard
from graphseed.engine.kv import KvMemory
from graphseed.engine.plan import Reads
from graphseed.engine.pooling import Embedding
from graphseed.engine.request import Request
from graphseed.engine.sampler import Sampled, Sampler, SampleRow
from graphseed.engine.scheduler import Batch, Part, Scheduler, Sequence
from graphseed.models.model import Model


class Answers:
    """Open answers of one engine. Owned by the core; its thread only."""

    def __init__(self, model: Model, guard: DeviceGuard) -> None:
        self._model = model
        self._guard = guard
        self._sampler = Sampler(model.vocab_size, model.device)
        self._open: dict[int, Answer | Embedding] = {}  # by id of the request
        self._pending: list[Delta] = []
        self._scheduler: Scheduler
        self._kv: KvMemory

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_pending(self) -> bool:
        """Whether deltas wait to be taken."""
        return bool(self._pending)

    def bind(self, scheduler: Scheduler, kv: KvMemory) -> None:
        """Say which memory answers are read from now. Not while any is open."""
        self._scheduler, self._kv = scheduler, kv

    def open(self, request: Request, context_len: int, is_digesting: bool) -> None:
        """Let a request wait for its turn. Raises QueueFull."""
        self._scheduler.add(request)
        if request.pooling is not None:
            self._open[id(request)] = Embedding(request, self._model.scores)
            return
        self._open[id(request)] = Answer(
            request, context_len, self._model.eos_ids, self._model.decode, is_digesting
        )

    def read(self, batch: Batch, output: torch.Tensor) -> None:
        """Bring the requests of a batch what its step came to. Raises DeviceLost.

        `output` is what the batch reads: logits [S, V], or hidden states [T, H].
        """
        if batch.reads is Reads.HIDDEN:
            self._pool(batch, output)
        elif any(part.is_last for part in batch.parts):
            self._sample(batch, output)

    def _sample(self, batch: Batch, logits: torch.Tensor) -> None:
        # Every row is sampled, in one go; what is not a prompt's last row is not looked at.
        rows = [self._row(part) for part in batch.parts]
        sampled = self._guard.run("sampling", partial(self._sampler.sample, logits, rows))
        for part, result in zip(batch.parts, sampled, strict=True):
            if part.is_last:
                self._on_its_own(part, partial(self._take, part.sequence, result))

    def end(self, request: Request, error: Exception) -> None:
        """End one request with an error; nothing happens when it has ended."""
        answer = self._open.pop(id(request), None)
        if answer is not None:
            self._scheduler.finish(request)
            self._pending.append(fail(request, error))

    def fail(self, batch: Batch, error: Exception) -> None:
        """End the requests of one step."""
        for part in batch.parts:
            self.end(part.sequence.request, error)

    def fail_all(self, error: Exception) -> None:
        """End every open request."""
        for answer in list(self._open.values()):
            self.end(answer.request, error)

    def end_overdue(self) -> None:
        """End what did not finish in the time it was given."""
        now = time.perf_counter_ns()
        for answer in list(self._open.values()):
            request = answer.request
            if request.deadline_ns is not None and now >= request.deadline_ns:
                seconds = (request.deadline_ns - request.timings.submitted_ns) / 1e9
                self.end(request, DeadlineExceeded(seconds, len(request.output_ids)))

    def taken(self) -> list[Delta]:
        """Hand out what waits."""
        taken, self._pending = self._pending, []
        return taken

    def keep(self, deltas: list[Delta]) -> None:
        """Let deltas wait that were taken and not handed out."""
        self._pending += deltas

    def drop(self, request: Request) -> None:
        """Forget what waits for a request that nobody reads any more."""
        self._pending = [delta for delta in self._pending if delta.request is not request]

    def _pool(self, batch: Batch, hidden: torch.Tensor) -> None:
        row = 0
        for part in batch.parts:
            rows = hidden[row : row + part.num_tokens]
            row += part.num_tokens
            self._on_its_own(part, partial(self._pool_one, part, rows))

    def _pool_one(self, part: Part, rows: torch.Tensor) -> None:
        request = part.sequence.request
        answer = self._open.get(id(request))
        if not isinstance(answer, Embedding):
            return
        if part.start == 0:
            answer.begin()
        delta = self._guard.run("pooling", partial(answer.take, rows, part.is_last))
        if delta is not None:
            self._scheduler.finish(request)
            del self._open[id(request)]
            self._pending.append(delta)

    def _row(self, part: Part) -> SampleRow:
        request, mask = part.sequence.request, None
        if part.is_last and request.grammar is not None:
            mask = self._on_its_own(part, partial(self._mask_of, request.grammar))
        position = part.start + part.num_tokens - 1
        return SampleRow(request.params, position, part.sequence.tokens, mask)

    def _mask_of(self, grammar: Grammar) -> torch.Tensor | None:
        mask = grammar.allowed()
        if mask is None:
            return None
        copy = partial(mask.to, self._model.device, copy=True)  # its owner fills the buffer again
        return self._guard.run("a grammar mask", copy)

    def _on_its_own(
        self, part: Part, call: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Call for one request; what it raises ends that request and no other."""
        try:
            return call()
        except DeviceLost:
            raise
        except Exception as error:
            self.end(part.sequence.request, error)
            return None

    def _take(self, sequence: Sequence, sampled: Sampled) -> None:
        request = sequence.request
        answer = self._open.get(id(request))
        if not isinstance(answer, Answer):  # its grammar raised
            return
        if sampled.error is not None:
            raise sampled.error
        if request.grammar is not None:
            request.grammar.accept(sampled.token)
        delta = answer.take(sampled)
        if not delta.is_last:
            self._scheduler.appended(sequence, sampled.token)
            self._pending.append(delta)
            return
        if answer.is_digesting:
            # The last token was sampled, not run: its K/V does not exist.
            indices = torch.from_numpy(sequence.table.kv_indices(0, request.num_tokens - 1))
            read = partial(self._kv.digest, indices)
            delta = replace(delta, kv_digest=self._guard.run("reading KV memory", read))
        finish(request)
        self._scheduler.finish(request)
        del self._open[id(request)]
        self._pending.append(delta)

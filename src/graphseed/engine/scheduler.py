"""What the next step computes: which sequences, which of their tokens. Pure: no device, no torch.

Owns Scheduler: the waiting queue, the slots, and the fair rule below. Does not know sampling, when
an answer ends, or a request's status: whoever runs the steps says so. What a step computes depends
on the requests and the pool, never on the policy of graphs (I9).

The rule:

1. Requests are admitted in order of arrival, each as soon as a slot (the one it wants, if it wants
   one) and the KV blocks of its uncached prompt are there. Nobody overtakes.
2. While streams decode and prompts prefill, decode steps and prompt steps alternate strictly: a
   stream waits for one prompt step at most between two tokens, a prompt for one decode step between
   two chunks.
3. A prompt step takes the next chunk of the oldest unfinished prompt, then whole next chunks of the
   following ones in order, while all fit into `num_ubatch` tokens and read the same (logits, or
   hidden states for embeddings); it stops at the first that does not. How a prompt is cut does not
   depend on what it is packed with.
4. A decode step takes every stream.
5. Streams that need a block go before waiting requests. When the pool has none, the youngest
   admitted request is preempted, as often as needed: its blocks go back, its tokens stay, and it
   waits in front of those that arrived later. An older one is never preempted for a younger, so
   the oldest always goes on and every request ends.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from graphseed.capture.identity import Namespace
from graphseed.engine.blocks import BlockPool, BlockTable, OutOfBlocks
from graphseed.engine.chunks import capacity_of
from graphseed.engine.config import EngineConfig
from graphseed.engine.errors import BadParameter, QueueFull
from graphseed.engine.plan import Reads, SequencePart, StepPlan
from graphseed.engine.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One request between `add` and `finish`. Owned by the scheduler, which alone changes it."""

    request: Request
    table: BlockTable  # empty while it waits
    tokens: list[int]  # prompt and answer so far; grows, and changes in no other way
    arrival: int  # requests that were added before it
    is_admitted: bool = False  # it has a slot
    prompt_len: int = 0  # tokens at the last admission: these are prefilled
    num_computed: int = 0  # tokens whose K/V is written by the steps submitted so far, or cached
    num_cached: int = 0  # tokens whose K/V was reused at the first admission
    num_preempted: int = 0  # times that it lost its slot
    slot: int | None = None  # while it is admitted

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens it had when it was last admitted are still to be computed."""
        return self.is_admitted and self.num_computed < self.prompt_len

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is one sampled token; not while the sample is still due."""
        return self.is_admitted and self.prompt_len <= self.num_computed < len(self.tokens)


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of one sequence in a step."""

    sequence: Sequence
    start: int  # position of the first
    num_tokens: int
    is_last: bool  # it reaches the end of the known tokens: its logits are to be sampled


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: what to compute, and the shape it is padded to."""

    namespace: Namespace
    capacity: int  # rows, padding included
    seq_capacity: int  # sequences, padding included
    parts: tuple[Part, ...]  # in order of arrival
    reads: Reads = Reads.LOGITS

    def plan(self) -> StepPlan:
        """What to run, as a value; its tables are the sequences' own."""
        parts = tuple(
            SequencePart(np.asarray(tokens, dtype=np.int32), part.start, part.sequence.table)
            for part in self.parts
            for tokens in [part.sequence.tokens[part.start : part.start + part.num_tokens]]
        )
        return StepPlan(self.namespace, self.capacity, parts, self.seq_capacity, self.reads)


class Scheduler:
    """Admits requests and says what runs next. Owned by the engine; engine thread only.

    One step at a time: `next`, then `submitted`, then `appended` or `finish` for each part that is
    last, then `next` again. `finish` may come at any time.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, max_waiting: int = 1024) -> None:
        if max_waiting < 0:
            raise BadParameter("max_waiting", max_waiting, "0 or more")
        self.preempted = 0  # times that a sequence lost its slot
        self._config = config
        self._pool = pool
        self._max_waiting = max_waiting
        self._num_added = 0
        # Every waiting sequence arrived after every admitted one: the front of the queue takes the
        # slot, and the youngest that loses one goes back to the front.
        self._waiting: deque[Sequence] = deque()
        self._admitted: list[Sequence] = []
        self._by_request: dict[int, Sequence] = {}  # by id: requests compare by value
        self._last: Namespace | None = None
        # The front of the queue that did not fit, and the free blocks there were.
        self._blocked: Sequence | None = None
        self._free_slots = set(range(config.num_parallel))
        self._num_free_then = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._admitted)

    @property
    def num_unfinished_prompts(self) -> int:
        """Requests that had a slot and whose prefill is not finished, preempted ones included."""
        num_prefilling = sum(sequence.is_prefilling for sequence in self._admitted)
        preempted = takewhile(lambda sequence: sequence.num_preempted, self._waiting)
        return num_prefilling + sum(1 for _ in preempted)  # they wait in front of all others

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Every unfinished request in order of arrival: those with a slot, then the waiting."""
        return (*self._admitted, *self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether every request that was added is finished."""
        return not self._by_request

    def add(self, request: Request) -> Sequence:
        """Let a request wait for a slot.

        Raises QueueFull when `max_waiting` requests wait already besides those that a free slot is
        there for, and ValueError for a request that was added and is not finished.
        """
        if id(request) in self._by_request:
            raise ValueError("the request was added already and is not finished")
        num_without_slot = self.num_waiting - (self._config.num_parallel - self.num_running)
        if num_without_slot >= self._max_waiting:
            raise QueueFull(num_without_slot, self._max_waiting)
        table = BlockTable(self._pool, self._config.max_blocks)
        tokens = [*request.prompt_ids, *request.output_ids]
        sequence = Sequence(request, table, tokens, self._num_added)
        self._num_added += 1
        self._by_request[id(request)] = sequence
        self._waiting.append(sequence)
        return sequence

    def next(self) -> Batch | None:
        """The step to run now, or None when no sequence has anything to compute.

        Admits and preempts. Raises OutOfBlocks when a request that has the pool to itself does not
        fit into it: EngineConfig rules that out.
        """
        self._grow_streams()
        self._admit()
        prompts = [sequence for sequence in self._admitted if sequence.is_prefilling]
        streams = [sequence for sequence in self._admitted if sequence.is_decoding]
        if prompts and (not streams or self._last is not Namespace.PROMPT):
            batch = self._prompt_step(prompts)
        elif streams:
            batch = self._decode_step(streams)
        else:
            return None
        self._last = batch.namespace
        return batch

    def submitted(self, batch: Batch) -> None:
        """Say that a batch is on its way to the device, before anything that is submitted later.

        What it writes counts as computed, and whole blocks of it can be reused by other requests.
        Sequences that were finished meanwhile are passed over. Raises ValueError for a batch that
        was submitted before.
        """
        for part in batch.parts:
            sequence = part.sequence
            if not sequence.is_admitted:
                continue
            if sequence.num_computed != part.start:
                raise ValueError(
                    f"a step computes from position {part.start} on and {sequence.num_computed} "
                    "tokens of the sequence are computed; submit each batch once, in order"
                )
            sequence.num_computed += part.num_tokens
            sequence.table.publish(sequence.tokens, sequence.num_computed)

    def appended(self, sequence: Sequence, token: int) -> None:
        """Take the token that was sampled after all tokens of `sequence` were computed."""
        if sequence.num_computed != len(sequence.tokens):
            raise ValueError(
                f"a token was sampled with {sequence.num_computed} of {len(sequence.tokens)} "
                "tokens computed; only parts that are last are sampled, once"
            )
        sequence.tokens.append(token)

    def finish(self, ended: Sequence | Request) -> None:
        """Take a request out, wherever it stands: slot and blocks are free. May be called twice."""
        request = ended.request if isinstance(ended, Sequence) else ended
        sequence = self._by_request.pop(id(request), None)
        if sequence is None:
            return
        if sequence.is_admitted:
            self._admitted.remove(sequence)
            self._leave_slot(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.is_admitted = False
        sequence.table.close()

    def _grow_streams(self) -> None:
        """Hold the block of the next token of every stream, the oldest first."""
        for sequence in tuple(self._admitted):
            while sequence.is_decoding:  # until it has its block, or lost its slot
                try:
                    sequence.table.grow(len(sequence.tokens))
                except OutOfBlocks as error:
                    if len(self._admitted) == 1:
                        raise self._does_not_fit(sequence) from error
                    self._preempt_youngest()
                else:
                    break

    def _preempt_youngest(self) -> None:
        sequence = self._admitted.pop()
        self._leave_slot(sequence)
        sequence.table.close()
        sequence.is_admitted = False
        sequence.num_computed = 0
        sequence.num_preempted += 1
        self.preempted += 1
        self._waiting.appendleft(sequence)

    def _admit(self) -> None:
        while self._waiting and self.num_running < self._config.num_parallel:
            sequence = self._waiting[0]
            if self._blocked is sequence and self._pool.num_free <= self._num_free_then:
                return  # nothing came back since it did not fit
            slot = sequence.request.wanted_slot
            if slot is not None and slot not in self._free_slots:
                return
            num_cached = 0
            request = sequence.request
            if request.reuses_prefix and request.pooling is None:  # hidden states are not kept
                num_cached = sequence.table.match_prefix(sequence.tokens)
            try:
                sequence.table.grow(len(sequence.tokens))
            except OutOfBlocks as error:
                sequence.table.close()
                if not self._admitted:
                    raise self._does_not_fit(sequence) from error
                self._blocked, self._num_free_then = sequence, self._pool.num_free
                return
            self._admitted.append(self._waiting.popleft())
            sequence.is_admitted = True
            sequence.slot = min(self._free_slots) if slot is None else slot
            self._free_slots.remove(sequence.slot)
            sequence.prompt_len = len(sequence.tokens)
            sequence.num_computed = num_cached
            if not sequence.num_preempted:
                sequence.num_cached = num_cached

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._free_slots.add(sequence.slot)
            sequence.slot = None

    def _does_not_fit(self, sequence: Sequence) -> OutOfBlocks:
        num_needed = -(-len(sequence.tokens) // self._pool.block_len)
        return OutOfBlocks(
            f"a request of {len(sequence.tokens)} tokens needs {num_needed} KV blocks and has the "
            f"pool of {self._pool.num_blocks - 1} to itself; give the KV memory more tokens or "
            "refuse the request"
        )

    def _prompt_step(self, prompts: list[Sequence]) -> Batch:
        parts: list[Part] = []
        num_ubatch = self._config.num_ubatch
        num_rows = 0
        reads = _reads(prompts[0])
        for sequence in prompts:
            start = sequence.num_computed
            num_tokens = min(num_ubatch, sequence.prompt_len - start)
            if num_rows + num_tokens > num_ubatch or _reads(sequence) is not reads:
                break
            num_rows += num_tokens
            parts.append(_part(sequence, num_tokens))
        capacity = capacity_of(num_rows, num_ubatch)
        rung = self._seq_capacity(len(parts))
        return Batch(Namespace.PROMPT, capacity, rung, tuple(parts), reads)

    def _decode_step(self, streams: list[Sequence]) -> Batch:
        parts = tuple(_part(sequence, 1) for sequence in streams)
        rung = self._seq_capacity(len(parts))
        return Batch(Namespace.DECODE, rung, rung, parts)

    def _seq_capacity(self, num_sequences: int) -> int:
        """The rung of 1, 2, 4, 8, ... for a number of sequences, at most `num_parallel`."""
        return min(1 << (num_sequences - 1).bit_length(), self._config.num_parallel)


def _reads(sequence: Sequence) -> Reads:
    return Reads.LOGITS if sequence.request.pooling is None else Reads.HIDDEN


def _part(sequence: Sequence, num_tokens: int) -> Part:
    start = sequence.num_computed
    return Part(sequence, start, num_tokens, start + num_tokens == len(sequence.tokens))

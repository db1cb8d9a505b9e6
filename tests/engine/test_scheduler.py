"""The scheduler: fair by its stated rule, and every request ends with the right K/V before it.

`Device` is the model that it is driven against: a KV memory that remembers, for each index, which
tokens stood before it when it was written. Every step checks that all it reads is there, so a
block that was reused, shared or given back wrongly cannot go unseen.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphseed.capture.identity import Namespace
from graphseed.engine.blocks import BlockPool, BlockTable, OutOfBlocks
from graphseed.engine.chunks import capacity_of
from graphseed.engine.config import EngineConfig
from graphseed.engine.errors import BadParameter, QueueFull
from graphseed.engine.request import Request, SamplingParams
from graphseed.engine.scheduler import Scheduler, Sequence

LEN = 16
PROMPT, DECODE = Namespace.PROMPT, Namespace.DECODE


def request_of(num_tokens, new=4, first=0):
    prompt = tuple(range(first, first + num_tokens))
    return Request(prompt, SamplingParams(max_tokens=new))


def digests(tokens):
    """For each position a number that stands for all tokens up to it."""
    found, digest = [], 0
    for token in tokens:
        digest = hash((digest, token))
        found.append(digest)
    return found


def token_after(digest):
    return digest % 5


def answer_of(request, context_len):
    """What the request answers when it runs alone."""
    tokens = list(request.prompt_ids)
    while not is_over(request, len(tokens) - len(request.prompt_ids), len(tokens), context_len):
        tokens.append(token_after(digests(tokens)[-1]))
    return tokens[len(request.prompt_ids) :]


def is_over(request, num_new, num_tokens, context_len):
    return num_new > 0 and (num_new == request.params.max_tokens or num_tokens >= context_len)


@dataclass
class Device:
    """Runs batches over a KV memory of digests and checks each against the rule."""

    config: EngineConfig
    num_blocks: int
    reuses_prefixes: bool = True
    max_waiting: int = 1024
    memory: dict = field(default_factory=dict)  # kv index -> digest of the tokens up to it
    finished: list = field(default_factory=list)
    batches: list = field(default_factory=list)
    computed: dict = field(default_factory=dict)  # sequence -> [admission's start, next position]
    admissions: dict = field(default_factory=dict)  # sequence -> times preempted before its last
    num_held_up: Counter = field(default_factory=Counter)  # stream -> steps since its last token

    def __post_init__(self):
        self.pool = BlockPool(self.num_blocks, LEN, self.reuses_prefixes)
        self.scheduler = Scheduler(self.config, self.pool, self.max_waiting)

    def add(self, request):
        return self.scheduler.add(request)

    def step(self):
        """One step; False when there was nothing to run."""
        before = self._admitted()
        batch = self.scheduler.next()
        self._check_admission(before)
        self._check_blocks()
        if batch is None:
            return False
        self._check_choice(batch)
        self._check_shape(batch)
        self.batches.append(batch)
        for part in batch.parts:
            self._compute(part)
        self.scheduler.submitted(batch)
        for part in batch.parts:
            if part.is_last:
                self._sample(part.sequence)
        return True

    def run(self, max_steps=5000):
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("requests do not end")

    def _admitted(self):
        return tuple(s for s in self.scheduler.sequences if s.is_admitted)

    def _check_admission(self, before):
        every = self.scheduler.sequences
        arrivals = [sequence.arrival for sequence in every]
        assert arrivals == sorted(arrivals)
        admitted = self._admitted()
        assert every[: len(admitted)] == admitted, "somebody overtook"
        stayed = [s for s in before if s in admitted]
        assert tuple(stayed) == before[: len(stayed)], "an older one lost its slot to a younger"
        assert not before or before[0] in admitted
        # One may lose its slot and get it back at once: what others wrote meanwhile it shares.
        for sequence in admitted:
            if self.admissions.get(sequence) == sequence.num_preempted:
                continue
            self.admissions[sequence] = sequence.num_preempted
            start = sequence.num_computed
            assert start % LEN == 0 and start < len(sequence.tokens)
            assert start == 0 or self.reuses_prefixes
            self.computed[sequence] = [start, start]
            self.num_held_up.pop(sequence, None)
        waiting = every[len(admitted) :]
        assert (len(admitted), len(waiting)) == (
            self.scheduler.num_running, self.scheduler.num_waiting,
        )  # fmt: skip
        if waiting and len(admitted) < self.config.num_parallel:
            assert -(-len(waiting[0].tokens) // LEN) > self.pool.num_free, "left waiting"

    def _check_blocks(self):
        holders = Counter(b for s in self.scheduler.sequences for b in s.table.ids.tolist())
        assert self.pool.num_free == self.num_blocks - 1 - len(holders)
        assert 0 not in holders
        assert all(s.is_admitted or not s.table.num_blocks for s in self.scheduler.sequences)
        self.holders = holders

    def _check_choice(self, batch):
        streams = [s for s in self._admitted() if s.is_decoding]
        prompts = [s for s in self._admitted() if s.is_prefilling]
        again = [s for s in self.scheduler.sequences if s.num_preempted and not s.is_admitted]
        assert len(prompts) + len(again) == self.scheduler.num_unfinished_prompts
        last = self.batches[-1].namespace if self.batches else None
        if streams and prompts:
            assert batch.namespace is not last, "the two did not alternate"
        ran = [part.sequence for part in batch.parts]
        if batch.namespace is DECODE:
            assert ran == streams
        else:
            assert ran == prompts[: len(ran)]
        for stream in streams:
            self.num_held_up[stream] = 0 if stream in ran else self.num_held_up[stream] + 1
            assert self.num_held_up[stream] <= 1

    def _check_shape(self, batch):
        sizes = [part.num_tokens for part in batch.parts]
        rung = next(r for r in (1, 2, 4, 8, 16, 32) if r >= len(sizes))
        assert batch.seq_capacity == min(rung, self.config.num_parallel) >= len(sizes)
        if batch.namespace is DECODE:
            assert set(sizes) == {1} and batch.capacity == batch.seq_capacity
            return
        num_ubatch = self.config.num_ubatch
        assert batch.capacity == capacity_of(sum(sizes), num_ubatch)
        for part in batch.parts:  # cut as if it were alone
            sequence = part.sequence
            start, _ = self.computed[sequence]
            assert (part.start - start) % num_ubatch == 0
            assert part.num_tokens == min(num_ubatch, len(sequence.tokens) - part.start)
        prompts = [s for s in self._admitted() if s.is_prefilling]
        for following in prompts[len(sizes) : len(sizes) + 1]:
            left = min(num_ubatch, len(following.tokens) - following.num_computed)
            assert sum(sizes) + left > num_ubatch, "there was room for one more"

    def _compute(self, part):
        sequence, end = part.sequence, part.start + part.num_tokens
        assert self.computed[sequence][1] == part.start, "a position was left out or run twice"
        self.computed[sequence][1] = end
        assert part.is_last == (end == len(sequence.tokens))
        want = digests(sequence.tokens[:end])
        indices = sequence.table.kv_indices(0, end).tolist()
        for index, digest in zip(indices[part.start :], want[part.start :], strict=True):
            assert self.holders[index // LEN] == 1, "a block that others read is written"
            self.memory[index] = digest
        assert [self.memory[index] for index in indices] == want

    def _sample(self, sequence):
        request = sequence.request
        token = token_after(digests(sequence.tokens)[-1])
        request.output_ids.append(token)
        if is_over(
            request, len(request.output_ids), request.num_tokens, self.config.context_len
        ):  # fmt: skip
            self.scheduler.finish(sequence)
            self.finished.append(request)
        else:
            self.scheduler.appended(sequence, token)


def config_of(num_ubatch=64, num_parallel=4, context_len=96):
    return EngineConfig(context_len, num_ubatch, num_parallel, LEN)


def device_of(num_blocks=65, max_waiting=1024, **config):
    return Device(config_of(**config), num_blocks, max_waiting=max_waiting)


@st.composite
def workloads(draw):
    """Requests with shared prefixes: (arrives at step, prompt, new tokens, cancelled at step)."""
    prompts = st.builds(
        lambda family, shared, own, kind: tuple([family] * shared + [9 + kind] * own),
        st.integers(0, 1), st.integers(0, 60), st.integers(1, 35), st.integers(0, 2),
    )  # fmt: skip
    cancels = st.one_of(st.none(), st.none(), st.integers(0, 40))
    jobs = st.tuples(st.integers(0, 25), prompts, st.integers(1, 45), cancels)
    return sorted(draw(st.lists(jobs, min_size=1, max_size=12)), key=lambda job: job[0])


@settings(max_examples=150, deadline=None)
@given(
    workloads(), st.sampled_from([7, 8, 10, 13, 24]), st.integers(1, 5),
    st.sampled_from([5, 16, 40, 64, 200]), st.booleans(),
)  # fmt: skip
def test_every_request_ends_with_the_answer_it_has_alone(
    jobs, num_blocks, num_parallel, num_ubatch, reuses_prefixes
):
    config = config_of(num_ubatch, num_parallel)
    device = Device(config, num_blocks, reuses_prefixes)
    requests = [Request(prompt, SamplingParams(max_tokens=new)) for _, prompt, new, _ in jobs]
    cancelled = set()
    step = num_added = 0
    while num_added < len(jobs) or not device.scheduler.is_idle:
        while num_added < len(jobs) and jobs[num_added][0] <= step:
            device.add(requests[num_added])
            num_added += 1
        for index, (arrival, _, _, cancel) in enumerate(jobs[:num_added]):
            if cancel is not None and arrival + cancel == step:
                device.scheduler.finish(requests[index])
                cancelled.add(index)
        device.step()
        step += 1
        assert step < 5000, "requests do not end"
    ended = {id(request) for request in device.finished}
    for index, request in enumerate(requests):
        assert id(request) in ended or index in cancelled
        if id(request) in ended:
            assert request.output_ids == answer_of(request, config.context_len)
    assert device.pool.num_free == num_blocks - 1
    assert (device.scheduler.num_running, device.scheduler.num_waiting) == (0, 0)
    assert device.scheduler.sequences == () and device.scheduler.next() is None


def shape_of(batch):
    sizes = [part.num_tokens for part in batch.parts]
    return batch.namespace.value, batch.capacity, batch.seq_capacity, sizes


def test_a_stream_and_a_long_prompt_take_turns():
    device = device_of(num_ubatch=16)
    device.add(request_of(10, new=20))
    device.step()
    device.add(request_of(60, new=2, first=100))
    for _ in range(8):
        device.step()
    assert [shape_of(batch) for batch in device.batches] == [
        ("prompt", 16, 1, [10]), ("decode", 1, 1, [1]),
        ("prompt", 16, 1, [16]), ("decode", 1, 1, [1]),
        ("prompt", 16, 1, [16]), ("decode", 1, 1, [1]),
        ("prompt", 16, 1, [16]), ("decode", 1, 1, [1]),
        ("prompt", 16, 1, [12]),
    ]  # fmt: skip


def test_whole_chunks_are_packed_in_order_up_to_the_first_that_does_not_fit():
    device = device_of(num_ubatch=64, num_parallel=6)
    for index, num_tokens in enumerate((70, 20, 30, 30, 5)):
        device.add(request_of(num_tokens, new=1, first=100 * index))
    device.run()
    # 6 + 20 + 30 fit; the next 30 does not, and the 5 behind it do not overtake.
    assert [shape_of(batch) for batch in device.batches] == [
        ("prompt", 64, 1, [64]), ("prompt", 64, 4, [6, 20, 30]), ("prompt", 48, 2, [30, 5]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_streams", "num_parallel", "rung"),
    [(1, 1, 1), (1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (3, 3, 3), (5, 6, 6), (9, 16, 16)],
)
def test_decode_steps_are_padded_to_a_small_ladder(num_streams, num_parallel, rung):
    device = device_of(num_parallel=num_parallel, num_ubatch=512)
    for index in range(num_streams):
        device.add(request_of(4, new=3, first=10 * index))
    device.run()
    assert shape_of(device.batches[1]) == ("decode", rung, rung, [1] * num_streams)


def test_a_request_waits_for_a_slot_and_takes_the_first_that_is_free():
    device = device_of(num_parallel=2)
    one, two, three = [device.add(request_of(4, new, 10 * new)) for new in (9, 2, 3)]
    assert (device.scheduler.num_running, device.scheduler.num_waiting) == (0, 3)
    device.step()
    assert [s.is_admitted for s in (one, two, three)] == [True, True, False]
    device.step()  # the second answer ends
    assert device.step() and device.scheduler.sequences == (one, three)


def test_a_prompt_that_has_no_blocks_yet_lets_nobody_overtake():
    device = device_of(num_blocks=8)
    device.add(request_of(60, new=3))
    large, small = device.add(request_of(80, new=1, first=200)), device.add(request_of(4, new=1))
    device.step()
    assert not large.is_admitted and not small.is_admitted
    device.run()
    assert [len(request.prompt_ids) for request in device.finished] == [60, 80, 4]


def test_the_youngest_is_preempted_waits_in_front_and_answers_the_same():
    device = device_of(num_blocks=7)
    requests = [request_of(30, 30), request_of(30, 30, first=100), request_of(3, 30, first=300)]
    old, young, late = [device.add(request) for request in requests]
    while not device.scheduler.preempted:
        device.step()
    # Five of the six blocks were held when two streams wanted a third one each.
    assert (old.num_preempted, young.num_preempted, late.num_preempted) == (0, 0, 1)
    assert (late.is_admitted, late.num_computed, late.table.num_blocks) == (False, 0, 0)
    while not young.num_preempted:
        device.step()
    assert [s.is_admitted for s in device.scheduler.sequences] == [True, False, False]
    assert device.scheduler.sequences == (old, young, late)
    device.run()
    assert device.finished == requests
    for request in requests:
        assert request.output_ids == answer_of(request, 96)
    assert device.scheduler.preempted == young.num_preempted + late.num_preempted


def test_a_stream_takes_the_last_block_before_a_request_that_waits_for_it():
    device = device_of(num_blocks=7)
    stream = device.add(request_of(79, new=10))
    while len(stream.tokens) <= 80:  # five blocks
        device.step()
    assert device.pool.num_free == 1
    late = device.add(request_of(4, new=1, first=200))
    device.step()
    assert stream.table.num_blocks == 6 and not late.is_admitted
    assert device.scheduler.preempted == 0


def test_a_resumed_sequence_finds_its_own_blocks_and_reports_the_first_admissions():
    device = device_of(num_blocks=9, num_parallel=2)
    device.add(request_of(60, new=10))
    young = device.add(request_of(60, new=12, first=500))
    while not young.num_preempted:
        device.step()
    while not young.is_admitted:
        device.step()
    start, _ = device.computed[young]
    assert start > 0 and young.num_cached == 0
    device.run()
    assert device.finished[-1].output_ids == answer_of(young.request, 96)


def test_a_prompt_runs_behind_the_blocks_that_another_wrote():
    device = device_of()
    device.add(request_of(50, new=2))
    device.step()
    same = device.add(request_of(70, new=2))
    device.run()
    assert same.num_cached == 48
    prompts = [shape_of(b) for b in device.batches if b.namespace is PROMPT]
    assert prompts == [("prompt", 64, 1, [50]), ("prompt", 32, 1, [22])]


def test_a_full_queue_refuses_by_number_and_free_slots_do_not_count():
    device = device_of(num_parallel=2, max_waiting=1)
    for index in range(3):
        device.add(request_of(4, new=9, first=10 * index))
    with pytest.raises(QueueFull, match="1 requests wait for a slot and at most 1 may"):
        device.add(request_of(4))
    device.step()
    with pytest.raises(QueueFull):
        device.add(request_of(4))
    device.scheduler.finish(device.scheduler.sequences[0])
    device.add(request_of(4))
    with pytest.raises(BadParameter, match="max_waiting is -1"):
        Scheduler(config_of(), device.pool, -1)


def test_finishing_twice_or_what_waits_or_an_equal_request_takes_the_one_meant():
    device = device_of(num_parallel=1)
    requests = [request_of(40), request_of(40), request_of(40)]  # equal by value
    one, two, three = [device.add(request) for request in requests]
    device.step()
    device.scheduler.finish(requests[1])
    device.scheduler.finish(two)
    assert device.scheduler.sequences == (one, three)
    device.scheduler.finish(one)
    device.scheduler.finish(requests[0])
    assert device.scheduler.sequences == (three,) and device.pool.num_free == 64
    device.scheduler.finish(three)
    assert device.scheduler.is_idle and device.scheduler.next() is None


def test_a_request_that_is_cancelled_in_a_step_leaves_nothing_behind():
    device = device_of()
    one, two = device.add(request_of(20)), device.add(request_of(20, first=100))
    batch = device.scheduler.next()
    device.scheduler.finish(one)
    device.scheduler.submitted(batch)
    assert (one.num_computed, two.num_computed) == (0, 20)
    assert device.pool.num_free == 64 - 2
    # What was not said to be written is not found.
    assert BlockTable(device.pool, 6).match_prefix(one.tokens) == 0


def test_words_out_of_turn_are_errors():
    device = device_of()
    request = request_of(20)
    sequence = device.add(request)
    with pytest.raises(ValueError, match="was added already"):
        device.add(request)
    batch = device.scheduler.next()
    with pytest.raises(ValueError, match="0 of 20 tokens computed"):
        device.scheduler.appended(sequence, 1)
    device.scheduler.submitted(batch)
    with pytest.raises(ValueError, match="from position 0 on and 20 tokens"):
        device.scheduler.submitted(batch)
    assert device.scheduler.next() is None  # the sample is due
    device.scheduler.appended(sequence, 1)
    assert device.scheduler.next().namespace is DECODE


def test_a_request_that_fits_nowhere_is_said_so_whether_it_waits_or_runs():
    device = device_of(num_blocks=3)
    device.add(request_of(33))
    with pytest.raises(OutOfBlocks, match=r"33 tokens needs 3 KV blocks .* pool of 2"):
        device.scheduler.next()
    device = device_of(num_blocks=3)
    device.add(request_of(32, new=9))
    device.step()
    with pytest.raises(OutOfBlocks, match=r"33 tokens needs 3"):
        device.step()


def test_steps_of_the_longest_context_cost_the_scheduler_little():
    context_len = 131072
    config = EngineConfig(context_len, 512, 2, LEN)
    scheduler = Scheduler(config, BlockPool(config.num_blocks // 2 + 40, LEN))
    sequence = scheduler.add(request_of(context_len - 300))
    scheduler.add(
        request_of(4000, first=context_len)
    )  # waits for blocks all the time: looked at in every step
    laps_ms = []
    for _ in range(356):
        start = time.perf_counter()
        batch = scheduler.next()
        scheduler.submitted(batch)
        if sequence.num_computed == len(sequence.tokens):
            scheduler.appended(sequence, 7)
        laps_ms.append((time.perf_counter() - start) * 1e3)
    assert scheduler.num_waiting == 1 and isinstance(batch.parts[0].sequence, Sequence)
    assert batch.namespace is DECODE and batch.parts[0].start > context_len - 300
    # 0.1 ms on a slow host. One pass over the tokens alone would take 2 ms, hashing them 10.
    assert sorted(laps_ms)[len(laps_ms) // 2] < 1.0
    # The first step admits: it takes 8,174 blocks, once.
    assert laps_ms[0] < 100.0

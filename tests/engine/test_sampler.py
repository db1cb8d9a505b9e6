"""Sampling: each filter, the whole chain against a slow reference, and I9 across batches.

A sample depends only on the request's seed and parameters, the position and the logits (I9).
"""

import math
import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphseed.engine import BadParameter, NotFinite, SamplingParams
from graphseed.engine.candidates import TOPK_LIMIT, pick, rank
from graphseed.engine.errors import BadToken, NothingAllowed
from graphseed.engine.penalties import check_biases
from graphseed.engine.sampler import Sampled, Sampler, SampleRow, sample

CPU = torch.device("cpu")
INF = float("inf")
LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.9, -1.0])
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]


def logits_of(num_rows, vocab_size, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def one(logits, params, position=0, token_ids=(), mask=None) -> Sampled:
    row = SampleRow(params, position, token_ids, mask)
    (sampled,) = Sampler(len(logits), logits.device).sample(logits[None], [row])
    return sampled


def mask_of(vocab_size, allowed, device=CPU):
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    bits[list(allowed)] = True
    words = np.packbits(bits, bitorder="little").view(np.int32)
    return torch.from_numpy(words.copy()).to(device)


# A reference in float64 numpy, one row, written for reading.


def softmax(values):
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def edited(logits, params, token_ids):
    values = logits.numpy().astype(np.float64)
    for token, bias in params.logit_bias:
        values[token] += bias
    last = params.repeat_last_n
    recent = () if last == 0 else token_ids if last < 0 else token_ids[-last:]
    for token, count in Counter(recent).items():
        above = values[token] > 0
        values[token] *= 1 / params.repeat_penalty if above else params.repeat_penalty
        values[token] -= count * params.frequency_penalty + params.presence_penalty
    return values


def candidates_left(values, params):
    """Ids that the filters keep, best first."""
    ids = np.array(sorted(np.flatnonzero(values > -INF), key=lambda i: (-values[i], i)))
    if params.top_k:
        ids = ids[: params.top_k]
    if params.typical_p < 1:
        surprise = -np.log(softmax(values[ids]))
        entropy = (np.exp(-surprise) * surprise).sum()
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        sums = np.cumsum(np.exp(-surprise)[order])
        ids = ids[np.sort(order[: np.searchsorted(sums, params.typical_p, side="right") + 1])]
    if params.top_p < 1:
        sums = np.cumsum(softmax(values[ids]))
        ids = ids[: np.searchsorted(sums, params.top_p, side="left") + 1]
    if params.min_p > 0:
        weights = softmax(values[ids])
        ids = ids[weights >= params.min_p * weights.max()]
    return ids


def reference(logits, params, position=0, token_ids=(), allowed=None):
    values = edited(logits, params, token_ids)
    if allowed is not None:
        values[np.setdiff1d(np.arange(len(values)), list(allowed))] = -INF
    if params.temperature == 0:
        return int(values.argmax())
    ids = candidates_left(values, params)
    weights = softmax(values[ids] / params.temperature)
    philox = np.random.Philox(key=params.seed, counter=position)
    point = np.random.Generator(philox).random()
    return int(ids[min(np.searchsorted(np.cumsum(weights), point, side="right"), len(ids) - 1)])


def any_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Parameters of which each is neutral about half of the time."""

    def maybe(neutral, *others):
        return neutral if rng.random() < 0.5 else rng.choice(others)

    tokens = rng.choices(range(vocab_size), k=4)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.4, 1.0, 1.0, 3.0]),
        top_k=maybe(0, 1, 3, 40, 10**6),
        top_p=maybe(1.0, 0.2, 0.9, 0.99),
        min_p=maybe(0.0, 0.02, 0.3),
        typical_p=maybe(1.0, 0.3, 0.95),
        repeat_penalty=maybe(1.0, 1.3, 0.8),
        presence_penalty=maybe(0.0, 0.7, -0.5),
        frequency_penalty=maybe(0.0, 0.4),
        repeat_last_n=rng.choice([64, 3, 0, -1]),
        logit_bias=maybe((), tuple((token, rng.uniform(-4, 4)) for token in tokens), ((0, -INF),)),
        seed=rng.randrange(1 << 64),
        num_logprobs=maybe(0, 1, 5),
    )


def any_row(rng: random.Random, vocab_size: int, device: torch.device = CPU) -> SampleRow:
    tokens = rng.choices(range(vocab_size), k=rng.randrange(80))
    allowed = rng.sample(range(1, vocab_size), k=max(1, vocab_size // 3))
    mask = mask_of(vocab_size, allowed, device) if rng.random() < 0.3 else None
    return SampleRow(any_params(rng, vocab_size), rng.randrange(1 << 20), tokens, mask)


def allowed_by(mask: torch.Tensor | None):
    if mask is None:
        return None
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


@pytest.mark.parametrize("vocab_size", [7, 64, 1500])
def test_the_chain_is_the_reference_in_llama_cpps_order(vocab_size):
    rng = random.Random(vocab_size)
    rows = [any_row(rng, vocab_size) for _ in range(400)]
    logits = logits_of(len(rows), vocab_size, seed=1)
    sampled = Sampler(vocab_size, CPU).sample(logits, rows)
    for row, values, got in zip(rows, logits, sampled, strict=True):
        allowed = allowed_by(row.grammar_mask)
        want = reference(values, row.params, row.position, row.token_ids, allowed)
        assert got.error is None and got.token == want, row


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.sampled_from([5, 33, 257, TOPK_LIMIT + 1, 4099]),
    num_rows=st.integers(1, 9),
    num_spare=st.integers(0, 3),
)
def test_a_row_is_sampled_alike_alone_and_anywhere_in_any_batch(
    device, seed, vocab_size, num_rows, num_spare
):
    device, rng = torch.device(device), random.Random(seed)
    sampler = Sampler(vocab_size, device)
    logits = logits_of(num_rows + num_spare, vocab_size, seed).to(device)
    rows = [any_row(rng, vocab_size, device) for _ in range(num_rows)]
    together = sampler.sample(logits, rows)
    order = rng.sample(range(num_rows), num_rows)
    shuffled = sampler.sample(logits[order], [rows[index] for index in order])
    assert shuffled == [together[index] for index in order]
    for index, row in enumerate(rows):
        # Bitwise, log-probabilities too: dataclasses compare floats by ==.
        assert sampler.sample(logits[index : index + 1], [row]) == [together[index]]


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"typical_p": 0.5}, {"min_p": 0.5}])
def test_a_filter_of_one_row_leaves_anothers_unlikely_tokens_alone(filters):
    # At temperature 1 the second token has a weight of 0; at 100 it is drawn 2 times in 5.
    logits = torch.tensor([[0.0, -45.0], [0.0, -45.0]])
    free = SamplingParams(temperature=100.0)
    other = SamplingParams(temperature=100.0, **filters)
    drawn = set()
    for position in range(40):
        rows = [SampleRow(free, position), SampleRow(other, position)]
        together = Sampler(2, CPU).sample(logits, rows)
        assert together[0] == one(logits[0], free, position)
        assert together[1].token == 0
        drawn.add(together[0].token)
    assert drawn == {0, 1}


def test_the_last_point_of_a_draw_falls_on_the_last_candidate_of_weight():
    last = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)
    for total in (1, 2, 3, (1 << 53) + 1, (1 << 61) - 1, (1 << 61) + 767, (1 << 62) - 1):
        weights = torch.tensor([[total - 1, 1, 0], [0, total, 0]])
        picked = pick(weights, last.expand(2, 1)).flatten().tolist()
        # Of a total above 2**53 the last of its parts is too small for a number below 1.
        assert picked == [1 if total < 1 << 53 else 0, 1], total


@pytest.mark.cuda
def test_many_rows_of_a_real_vocabulary_are_sampled_alike_alone_and_together():
    # 50,257 is odd: on a GPU each row is aligned in its own way, and a float sum would show it.
    vocab_size, device = 50257, torch.device("cuda:0")
    rng = random.Random(3)
    rows = [any_row(rng, vocab_size, device) for _ in range(33)]
    logits = logits_of(len(rows), vocab_size, seed=4).to(device)
    sampler = Sampler(vocab_size, device)
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert alone == together
    on_cpu = [
        SampleRow(r.params, r.position, r.token_ids, None if r.grammar_mask is None
                  else r.grammar_mask.cpu()) for r in rows
    ]  # fmt: skip
    tokens = [s.token for s in Sampler(vocab_size, CPU).sample(logits.cpu(), on_cpu)]
    assert [s.token for s in together] == tokens


VIEWS = {f"aten::{name}" for name in ("view", "slice", "unsqueeze", "unbind", "lift_fresh")}


class CountingOps(TorchDispatchMode):
    """Counts what is dispatched and computes something: no views."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = func.overloadpacket._qualified_op_name in VIEWS
        self.ops[str(func)] += not is_view
        return func(*args, **(kwargs or {}))


def ops_of(num_rows, params, **row):
    sampler, logits = Sampler(64, CPU), logits_of(num_rows, 64)
    rows = [SampleRow(params, index, **row) for index in range(num_rows)]
    with CountingOps() as counting:
        sampler.sample(logits, rows)
    return counting.ops


EVERYTHING = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.1, typical_p=0.9, repeat_penalty=1.1,
    presence_penalty=0.1, frequency_penalty=0.1, logit_bias=((1, 2.0), (2, -INF)), num_logprobs=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), EVERYTHING], ids=lambda p: "-"
)
def test_the_number_of_kernels_does_not_grow_with_the_batch(params):
    more = {"token_ids": [1, 2, 3], "grammar_mask": mask_of(64, range(40))}
    assert ops_of(1, params, **more) == ops_of(8, params, **more)
    assert ops_of(1, params) == ops_of(8, params)


def test_a_greedy_batch_is_one_reduction_and_what_packs_its_answer():
    ops = ops_of(8, SamplingParams())
    assert ops == Counter({"aten.max.dim": 1, "aten._to_copy.default": 1, "aten.stack.default": 1})


def test_the_largest_id_of_a_large_vocabulary_comes_back_whole():
    logits = torch.zeros(2, 262_145)
    logits[:, 262_143] = 1.0
    row = SampleRow(SamplingParams(), 0)
    assert Sampler(262_145, CPU).sample(logits, [row, row]) == [Sampled(262_143)] * 2


def test_a_sampled_batch_is_sorted_once():
    ops = ops_of(8, SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1))
    assert ops["aten.sort.stable"] == 1 and ops["aten.topk.default"] == 0
    assert ops.total() <= 50


@pytest.mark.cuda
def test_the_host_waits_once():
    device = torch.device("cuda:0")
    sampler, logits = Sampler(64, device), logits_of(8, 64).to(device)
    mask = mask_of(64, range(40), device)
    rows = [SampleRow(EVERYTHING, index, [1, 2, 3], mask) for index in range(8)]
    sampler.sample(logits, rows)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # which itself warns of being a prototype
            sampler.sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchronizing" in str(w.message)]
    assert len([w for w in waits if "prototype" not in str(w.message)]) == 1


def test_the_logits_are_not_written_to():
    logits = logits_of(4, 64)
    before = logits.clone()
    rows = [SampleRow(EVERYTHING, index, [1, 2, 3], mask_of(64, [5])) for index in range(4)]
    Sampler(64, CPU).sample(logits, rows)
    assert torch.equal(logits, before)


def test_no_rows_are_no_answers():
    assert Sampler(5, CPU).sample(LOGITS[None], []) == []


def frequencies(params, draws=3000):
    rows = [SampleRow(params, position) for position in range(draws)]
    sampled = Sampler(5, CPU).sample(LOGITS.expand(draws, 5), rows)
    return np.bincount([s.token for s in sampled], minlength=5) / draws


def test_greedy_takes_the_largest():
    assert sample(LOGITS, SamplingParams(), 7) == 1


def test_a_draw_depends_on_seed_position_and_logits_alone():
    params = SamplingParams(temperature=1.0, seed=5)
    draws = [sample(LOGITS, params, position) for position in range(50)]
    assert draws == [sample(LOGITS.clone(), params, position) for position in range(50)]
    other = SamplingParams(temperature=1.0, seed=6)
    assert draws != [sample(LOGITS, other, position) for position in range(50)]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
def test_draws_follow_the_softmax(temperature):
    # 3,000 draws: three standard deviations of a frequency are at most 0.028.
    want = torch.softmax(LOGITS.double() / temperature, 0).numpy()
    assert np.abs(frequencies(SamplingParams(temperature=temperature)) - want).max() < 0.03


def test_the_smallest_temperature_is_greedy():
    assert set(np.flatnonzero(frequencies(SamplingParams(temperature=1e-308), 50))) == {1}
    assert set(np.flatnonzero(frequencies(SamplingParams(temperature=5e-324), 50))) == {1}


def test_the_largest_temperature_draws_evenly():
    # 3,000 draws of 1 in 5: three standard deviations are 0.022.
    assert np.abs(frequencies(SamplingParams(temperature=1e308)) - 0.2).max() < 0.025


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), INF, -INF])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_logits_that_are_no_numbers_are_an_error(value, params):
    logits = torch.full((5,), value)
    with pytest.raises(NotFinite, match="after position 3 is"):
        sample(logits, SamplingParams(**params), 3)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 2}, {"num_logprobs": 2}])
def test_one_nan_is_an_error_of_its_row_alone_even_under_a_mask(params):
    logits = LOGITS.repeat(3, 1)
    logits[1, 0] = float("nan")
    row = SampleRow(SamplingParams(**params), 9, grammar_mask=mask_of(5, [1, 3]))
    first, bad, last = Sampler(5, CPU).sample(logits, [row] * 3)
    assert isinstance(bad.error, NotFinite) and bad.token == -1 and bad.logprob is None
    assert first.error is None and first == last == one(LOGITS, row.params, 9, (), row.grammar_mask)


def test_a_row_of_minus_infinities_beside_a_number_is_sampled():
    logits = torch.tensor([-INF, -INF, -5.0, -INF])
    for temperature in (0.0, 1.0, 1e308):
        assert sample(logits, SamplingParams(temperature=temperature, typical_p=0.5), 0) == 2


def test_equal_logits_are_taken_by_rising_id():
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0])
    assert sample(logits, SamplingParams(), 0) == 1
    draws = {sample(logits, SamplingParams(temperature=1e-9), p) for p in range(50)}
    assert draws == {1, 2, 3}
    two = SamplingParams(temperature=1.0, top_k=2)
    assert {sample(logits, two, p) for p in range(50)} == {1, 2}


@pytest.mark.parametrize("num", [1, 7, 150, 299, 300, 5000])
def test_both_ways_to_rank_give_falling_logits_and_rising_ids(num):
    # Coarse values, so that most are equal; both zeros are one number.
    logits = (logits_of(3, max(num, 300), seed=2).round() * 0.5).masked_fill_(
        logits_of(3, max(num, 300), seed=3) > 6, -0.0
    )
    values, ids = rank(logits, num)
    for row, row_values, row_ids in zip(logits.tolist(), values, ids, strict=True):
        want = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num]
        assert row_ids.tolist() == want
        assert row_values.tolist() == [row[i] for i in want]


@pytest.mark.parametrize(
    ("params", "kept"),
    [({"top_k": 2}, {1, 3}), ({"top_p": 0.6}, {1, 3}), ({"top_p": 0.1}, {1}),
     ({"min_p": 0.5}, {1, 3}), ({"top_k": 1}, {1}), ({"top_k": 4, "min_p": 0.1}, {1, 2, 3}),
     ({"top_k": 99}, {0, 1, 2, 3, 4}), ({"top_p": 5e-324}, {1}), ({"min_p": 1.0}, {1}),
     ({"typical_p": 5e-324}, {3}), ({"typical_p": 0.99}, {0, 1, 2, 3})],
)  # fmt: skip
def test_filters_keep_the_most_likely_or_the_most_typical(params, kept):
    seen = frequencies(SamplingParams(temperature=2.0, **params), draws=400)
    assert set(np.flatnonzero(seen)) == kept


def test_temperature_comes_after_the_filters():
    # At temperature 1 the best two hold 0.85 of the weight; at 100 they would hold 0.41.
    seen = frequencies(SamplingParams(temperature=100.0, top_p=0.8), draws=400)
    assert set(np.flatnonzero(seen)) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_penalties_look_at_the_last_tokens_alone(temperature):
    params = {"temperature": temperature, "presence_penalty": 2.5}
    assert one(LOGITS, SamplingParams(**params), token_ids=[1, 0, 0]).token == 3
    assert one(LOGITS, SamplingParams(**params, repeat_last_n=2), token_ids=[1, 0, 0]).token == 1
    assert one(LOGITS, SamplingParams(**params, repeat_last_n=0), token_ids=[1, 0, 0]).token == 1
    far = [1] + [0] * 64
    assert one(LOGITS, SamplingParams(**params), token_ids=far).token == 1
    assert one(LOGITS, SamplingParams(**params, repeat_last_n=-1), token_ids=far).token == 3
    assert one(LOGITS, SamplingParams(**params), token_ids=[]).token == 1


def test_the_frequency_penalty_counts_and_the_repeat_penalty_divides_or_multiplies():
    seen = SamplingParams(frequency_penalty=0.06)
    assert one(LOGITS, seen, token_ids=[1]).token == 1  # 2.94
    assert one(LOGITS, seen, token_ids=[1, 1]).token == 3  # 2.88
    repeat = SamplingParams(repeat_penalty=1.1)
    assert one(LOGITS, repeat, token_ids=[1, 1]).token == 3  # 2.73, however often
    assert one(torch.tensor([0.5, 0.45]), repeat, token_ids=[0]).token == 0  # 0.4545
    assert one(torch.tensor([0.5, 0.46]), repeat, token_ids=[0]).token == 1
    below = torch.tensor([-1.0, -1.05])
    assert one(below, repeat, token_ids=[0]).token == 1  # -1.1


def test_biases_of_a_token_named_twice_add_up():
    assert one(LOGITS, SamplingParams(logit_bias=((2, 1.1), (2, 1.1)))).token == 2  # 3.2
    assert one(LOGITS, SamplingParams(logit_bias=((2, 1.1),))).token == 1
    twice = SamplingParams(logit_bias=((1, 1e308), (1, 1e308), (1, -INF)))
    assert one(LOGITS, twice).token == 3


def test_a_forbidden_token_is_never_drawn_and_a_forced_one_always():
    never = SamplingParams(temperature=5.0, logit_bias=((1, -INF), (4, -INF)))
    assert set(np.flatnonzero(frequencies(never, 400))) == {0, 2, 3}
    always = SamplingParams(temperature=5.0, logit_bias=((4, 1e9),))
    assert set(np.flatnonzero(frequencies(always, 100))) == {4}
    beyond = SamplingParams(temperature=5.0, logit_bias=((4, 1e308),), repeat_penalty=5e-324)
    assert one(LOGITS, beyond, token_ids=[4]).token == 4


@pytest.mark.parametrize("vocab_size", [5, 32, 33, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_mask_leaves_what_its_bits_allow(vocab_size, temperature):
    params = SamplingParams(temperature=temperature)
    for allowed in (0, 4, vocab_size - 1, 31 % vocab_size):
        mask = mask_of(vocab_size, [allowed])
        assert one(logits_of(1, vocab_size)[0], params, 0, (), mask).token == allowed


def test_a_row_without_a_mask_beside_one_with_it_is_free():
    rows = [SampleRow(SamplingParams(), 0), SampleRow(SamplingParams(), 0, (), mask_of(5, [4]))]
    assert [s.token for s in Sampler(5, CPU).sample(LOGITS.expand(2, 5), rows)] == [1, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_allowed_is_an_error_of_that_row(temperature):
    params = SamplingParams(temperature=temperature, num_logprobs=2)
    banned = SamplingParams(
        temperature=temperature, logit_bias=tuple((token, -INF) for token in range(5))
    )
    rows = [
        SampleRow(params, 1), SampleRow(params, 2, (), mask_of(5, [])), SampleRow(banned, 3),
        SampleRow(params, 1),
    ]  # fmt: skip
    first, masked, biased, last = Sampler(5, CPU).sample(LOGITS.expand(4, 5), rows)
    assert first == last and first.error is None
    assert isinstance(masked.error, NothingAllowed) and "position 2" in str(masked.error)
    assert isinstance(biased.error, NothingAllowed) and "position 3" in str(biased.error)
    with pytest.raises(NothingAllowed, match="forbid every token"):
        sample(LOGITS, banned, 3)


def test_log_probabilities_are_those_of_the_raw_logits():
    logits = logits_of(1, 1000)[0]
    # 1e-9: a weight is rounded to a multiple of 2**-52, and the reference rounds its own way.
    want = torch.log_softmax(logits.double(), 0)
    params = SamplingParams(
        temperature=0.1, top_k=3, logit_bias=((7, 30.0),), num_logprobs=5, repeat_penalty=1.5
    )
    got = one(logits, params, token_ids=[1, 2])
    assert got.token == 7
    assert got.logprob == pytest.approx(want[7].item(), abs=1e-9)
    best = torch.topk(want, 5)
    assert [token for token, _ in got.top] == best.indices.tolist()
    assert [value for _, value in got.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_log_probabilities_come_only_when_asked_for_and_as_many_as_there_are():
    assert one(LOGITS, SamplingParams()) == Sampled(1)
    rows = [SampleRow(SamplingParams(num_logprobs=n), 0) for n in (0, 1, 3, 99)]
    sampled = Sampler(5, CPU).sample(LOGITS.expand(4, 5), rows)
    assert [len(s.top) for s in sampled] == [0, 1, 3, 5]
    assert sampled[0].logprob is None and sampled[1].top == sampled[3].top[:1]
    assert sampled[1].logprob == sampled[1].top[0][1]


def test_a_token_of_no_probability_is_not_among_the_most_likely():
    logits = torch.tensor([-INF, 4.0, -INF])
    got = one(logits, SamplingParams(num_logprobs=3))
    assert got.top == ((1, 0.0),) and got.logprob == 0.0


def test_what_is_wrong_with_a_row_is_told_in_its_place():
    rows = [
        SampleRow(SamplingParams(), 0),
        SampleRow(SamplingParams(logit_bias=((5, 1.0),)), 0),
        SampleRow(SamplingParams(presence_penalty=1.0), 0, [1, 5]),
        SampleRow(SamplingParams(), 0, (), torch.zeros(2, dtype=torch.int32)),
        SampleRow(SamplingParams(), 0, (), torch.zeros(1, dtype=torch.int64)),
    ]
    good, bias, token, shape, dtype = Sampler(5, CPU).sample(LOGITS.expand(5, 5), rows)
    assert good == Sampled(1)
    assert isinstance(bias.error, BadParameter) and "logit_bias is 5" in str(bias.error)
    assert isinstance(token.error, BadToken) and "token id 5 at position 1" in str(token.error)
    assert isinstance(shape.error, BadParameter) and "(2,) torch.int32" in str(shape.error)
    assert isinstance(dtype.error, BadParameter) and "(1,) torch.int64" in str(dtype.error)


def test_a_biased_token_can_be_checked_before_anything_runs():
    check_biases(SamplingParams(logit_bias=((4, -INF),)), 5)
    for token in (5, -1):
        with pytest.raises(BadParameter, match=f"is {token}; expected 0 to 4"):
            check_biases(SamplingParams(logit_bias=((token, 1.0),)), 5)


def test_logits_of_another_shape_or_dtype_are_refused():
    rows = [SampleRow(SamplingParams(), 0)] * 2
    for logits in (LOGITS[None], LOGITS[:4].expand(2, 4)):
        with pytest.raises(BadParameter, match="the shape of logits"):
            Sampler(5, CPU).sample(logits, rows)
    with pytest.raises(BadParameter, match="torch.float64 on cpu"):
        Sampler(5, CPU).sample(LOGITS.double().expand(2, 5), rows)


def test_penalties_without_the_tokens_so_far_are_refused():
    with pytest.raises(BadParameter, match="token_ids is None"):
        sample(LOGITS, SamplingParams(repeat_penalty=1.1), 0)
    assert sample(LOGITS, SamplingParams(repeat_penalty=1.1), 0, [1]) == 3


@pytest.mark.parametrize(
    ("name", "values"),
    [("temperature", [-0.1, INF, math.nan, "1"]), ("top_k", [-1, 2.5]),
     ("top_p", [0.0, 1.1, math.nan]), ("min_p", [-0.1, 1.1]), ("typical_p", [0.0, 1.1, math.nan]),
     ("repeat_penalty", [0.0, -1.0, math.nan, 1e7]), ("presence_penalty", [INF, math.nan]),
     ("frequency_penalty", [-INF, math.nan]), ("repeat_last_n", [-2, 1.5]),
     ("logit_bias", [((1, INF),), ((1, math.nan),), ((1.5, 1.0),), ((1,),), (1, 2)]),
     ("seed", [-1, 1 << 64]), ("num_logprobs", [-1, 0.5]), ("max_tokens", [0, -2, 1.5]),
     ("stop", ["word", ("",)])],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused_by_its_name(name, values):
    for value in values:
        with pytest.raises(BadParameter, match=name):
            SamplingParams(**{name: value})

"""Grammars: a request's own, moved token by token, and wrong on its own account only."""

import asyncio

import pytest
import torch

from graphseed.engine import BadParameter, Engine, FinishReason, Grammar, SamplingParams
from graphseed.engine.errors import NothingAllowed
from tests.engine.conftest import prompt_of


class Counting:
    """Allows one token after another: `first`, `first + 1`, ..., and then the end of sequence.

    One buffer is filled again and again, as a library made for grammars does.
    """

    def __init__(self, vocab_size: int, first: int, length: int, eos: int) -> None:
        self._mask = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
        self._script = [*range(first, first + length), eos]
        self.accepted: list[int] = []

    def allowed(self) -> torch.Tensor:
        token = self._script[len(self.accepted)]
        self._mask.zero_()
        self._mask.view(torch.uint8)[token // 8] = 1 << token % 8
        return self._mask

    def accept(self, token: int) -> None:
        self.accepted.append(token)


class Raising(Counting):
    def __init__(self, *args: int, raises_in: str) -> None:
        super().__init__(*args)
        self._raises_in = raises_in

    def allowed(self) -> torch.Tensor:
        if self._raises_in == "allowed" and len(self.accepted) == 2:
            raise LookupError("no rule for this token")
        if self._raises_in == "nothing" and len(self.accepted) == 2:
            return torch.zeros_like(self._mask)
        if self._raises_in == "no tensor" and len(self.accepted) == 2:
            return super().allowed().tolist()
        return super().allowed()

    def accept(self, token: int) -> None:
        if self._raises_in == "accept" and len(self.accepted) == 2:
            raise LookupError("no rule for this token")
        super().accept(token)


PARAMS = SamplingParams(max_tokens=12)


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    errors = {}
    while not engine.is_idle:
        for delta in engine.step():
            if delta.error is not None:
                errors[id(delta.request)] = delta.error
    return [errors.get(id(request)) for request in requests]


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=12, temperature=1.5)])
def test_each_answer_of_a_batch_follows_its_own_grammar(make_engine, params):
    engine = make_engine(num_parallel=4)
    vocab, (eos,) = engine.model.vocab_size, engine.model.eos_ids
    grammars: list[Grammar] = [Counting(vocab, first, 5, eos) for first in (3, 31, 100)]
    requests = [engine.request(prompt_of(9, n), params, g) for n, g in enumerate(grammars)]
    free = engine.request(prompt_of(9, 7), SamplingParams(max_tokens=6, ignore_eos=True))
    assert run(engine, *requests, free) == [None] * 4
    for request, first in zip(requests, (3, 31, 100), strict=True):
        assert request.output_ids == [*range(first, first + 5), eos]
        assert request.finish_reason is FinishReason.END_OF_SEQUENCE
    alone = make_engine("disabled", num_parallel=4)
    assert free.output_ids == alone.generate(free.prompt_ids, free.params)[1].output_ids


def test_a_preempted_answer_goes_on_where_its_grammar_stands(make_engine):
    engine = make_engine(num_parallel=2, context_len=64, kv_len=64)
    vocab, (eos,) = engine.model.vocab_size, engine.model.eos_ids
    requests = [
        engine.request(prompt_of(20, n), SamplingParams(max_tokens=40), Counting(vocab, 3, 30, eos))
        for n in range(2)
    ]
    assert run(engine, *requests) == [None, None]
    assert engine.scheduler.preempted
    for request in requests:
        assert request.output_ids == [*range(3, 33), eos]


ERRORS = {
    "allowed": LookupError, "accept": LookupError, "nothing": NothingAllowed,
    "no tensor": AttributeError,
}  # fmt: skip


@pytest.mark.parametrize("where", ERRORS)
def test_a_grammar_that_fails_ends_its_own_request_and_no_other(make_engine, where):
    engine = make_engine(num_parallel=2)
    vocab, (eos,) = engine.model.vocab_size, engine.model.eos_ids
    bad = engine.request(prompt_of(9), PARAMS, Raising(vocab, 3, 5, eos, raises_in=where))
    good = engine.request(prompt_of(9, 1), PARAMS, Counting(vocab, 40, 5, eos))
    error, nothing = run(engine, bad, good)
    assert nothing is None and good.output_ids == [*range(40, 45), eos]
    assert isinstance(error, ERRORS[where])
    assert bad.output_ids == [3, 4]
    assert engine.num_free_blocks == engine.pool.num_blocks - 1


def test_a_grammar_reaches_the_thread_from_submit_and_from_an_event_loop(make_engine):
    core = make_engine(is_warm=False)
    vocab, (eos,) = core.model.vocab_size, core.model.eos_ids
    with Engine(core) as engine:
        handle = engine.submit(prompt_of(9), PARAMS, grammar=Counting(vocab, 3, 4, eos))
        assert [delta.token_id for delta in handle] == [3, 4, 5, 6, eos]

        async def read() -> list[int | None]:
            deltas = engine.astream(prompt_of(9), PARAMS, grammar=Counting(vocab, 50, 2, eos))
            return [delta.token_id async for delta in deltas]

        assert asyncio.run(read()) == [50, 51, eos]


def test_an_unknown_biased_token_is_refused_to_the_caller(make_engine):
    core = make_engine(is_warm=False)
    with Engine(core) as engine, pytest.raises(BadParameter, match="logit_bias is 100000"):
        engine.submit(prompt_of(9), SamplingParams(logit_bias=((100000, 1.0),)))

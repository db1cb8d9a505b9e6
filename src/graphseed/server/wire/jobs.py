"""The generations of one HTTP request: each of its prompts, `n` times, all at once.

Owns how they are made, read together, and given up together. Does not know any wire format.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, cast

from graphseed.engine import Grammar, Status
from graphseed.server.errors import InvalidRequest
from graphseed.server.generation import GenerateOptions, Generation, Piece
from graphseed.server.state import ServerState
from graphseed.server.wire.params import Asked

HEAD_START: Final = 0.001  # seconds


async def open_generations(
    state: ServerState, prompts: Sequence[Iterable[int]], asked: Asked
) -> list[Generation]:
    """Make a generation for each prompt and choice, choices of one prompt side by side.

    All are checked before any runs. Raises RequestError and ApiError.
    """
    served = state.ready
    config = served.engine.core.config
    num, room = len(prompts) * asked.num_choices, config.num_parallel + config.max_waiting
    if num > room:
        raise InvalidRequest(
            f"the request asks for {num} answers at once; expected at most {room}, which is what "
            "this server lets run and wait"
        )
    generations = []
    for prompt in prompts:
        for choice in range(asked.num_choices):
            options = GenerateOptions(
                asked.params_of(choice),
                grammar=await _grammar(state, asked),
                seconds=asked.seconds,
                max_predict_ms=asked.max_predict_ms,
                caches_prompt=asked.caches_prompt,
                slot=asked.slot,
                reports_progress=asked.reports_progress and asked.is_streaming,
            )
            generations.append(Generation(served.engine, prompt, options))
    return generations


@dataclass(frozen=True, slots=True)
class Begun:
    """Generations that were handed in ahead of being read. Owned by what reads them."""

    generations: Sequence[Generation]
    are_running: bool  # all of them, and there was nothing to read yet

    def close(self) -> None:
        """Give up what has not ended."""
        for generation in self.generations:
            generation.close()


async def begin(generations: Sequence[Generation]) -> Begun:
    """Hand all in, ahead of what it takes to read them.

    Waits a millisecond, or until there is something to read: what the caller does next would keep
    the interpreter from the engine's thread. The first error ends all and is raised.
    """
    try:
        news = [generation.begin() for generation in generations]
        told, _ = await asyncio.wait(news, timeout=HEAD_START, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        Begun(generations, are_running=False).close()
        raise
    are_running = all(one.request.status is Status.PREFILL for one in generations)
    return Begun(generations, are_running=are_running and not told)


async def read_all(generations: Sequence[Generation]) -> list[list[Piece]]:
    """Run all and return the pieces of each. The first error ends all and is raised."""
    if len(generations) == 1:
        return [await generations[0].read()]
    tasks = [asyncio.create_task(generation.read()) for generation in generations]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def read_merged(
    generations: Sequence[Generation],
) -> AsyncGenerator[tuple[int, Piece | None], None]:
    """Run all; pieces as they come, with the number of their generation, and None at its end.

    The first error ends all and is raised. Closing it early gives all up.
    """
    if len(generations) == 1:
        async with aclosing(_pieces(generations[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        yield 0, None
        return
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_pump(index, generation, queue))
        for index, generation in enumerate(generations)
    ]
    try:
        num_open = len(tasks)
        while num_open:
            index, got = await queue.get()
            if isinstance(got, BaseException):
                raise got
            num_open -= got is None
            yield index, got
    finally:
        await _end(tasks)


async def _pump(
    index: int,
    generation: Generation,
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]],
) -> None:
    try:
        async with aclosing(_pieces(generation)) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))
    except Exception as error:
        queue.put_nowait((index, error))
    else:
        queue.put_nowait((index, None))


def _pieces(generation: Generation) -> AsyncGenerator[Piece, None]:
    return cast(AsyncGenerator[Piece, None], generation.pieces())


async def _grammar(state: ServerState, asked: Asked) -> Grammar | None:
    if not asked.has_grammar:
        return None
    from graphseed.server.grammar.compile import compile_grammar

    return await asyncio.to_thread(
        compile_grammar, state, gbnf=asked.gbnf, json_schema=asked.json_schema
    )


async def _end(tasks: Sequence[asyncio.Task[None]] | Sequence[asyncio.Task[list[Piece]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

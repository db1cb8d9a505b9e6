"""Prompts that are asked for no token: an embedding, or a score.

Owns how several run together, and what a client is told of one that is too long. Does not know any
wire format.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import ClassVar

from graphseed.engine import Request
from graphseed.server.errors import InvalidRequest
from graphseed.server.state import ServerState


class InputTooLong(InvalidRequest):
    """An input does not fit into the context."""

    kind: ClassVar[str] = "exceed_context_size_error"

    def __init__(self, num_tokens: int, context_len: int) -> None:
        super().__init__(
            f"input ({num_tokens} tokens) is too large to process: the context takes "
            f"{context_len - 1} tokens; increase the context size (-c) or shorten the input",
            n_prompt_tokens=num_tokens, n_ctx=context_len,
        )  # fmt: skip


async def run_all(state: ServerState, requests: Sequence[Request]) -> None:
    """Run all at once. The first error ends all and is raised."""
    engine = state.ready.engine

    async def read(one: Request) -> None:
        async with aclosing(engine.aread(one)) as deltas:
            async for _ in deltas:
                pass

    tasks = [asyncio.create_task(read(one)) for one in requests]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

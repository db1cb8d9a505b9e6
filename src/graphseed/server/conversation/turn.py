"""One turn of a chat: the conversation's prompt run, and its answers read as they come.

Owns Turn, Answer and Step. Every chat dialect is told from these; the bodies that the others have
are turned into OpenAI's first. Does not know any dialect's answers.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from graphseed.server.conversation.messages import Call
from graphseed.server.conversation.prompt import Conversation, opened, tokens_of
from graphseed.server.conversation.reading import AnswerReader, Kind, Part
from graphseed.server.conversation.tools import forced_form, form_beside_schema
from graphseed.server.errors import InvalidRequest
from graphseed.server.generation import Generation, Piece
from graphseed.server.grammar.compile import compile_format
from graphseed.server.state import ServerState
from graphseed.server.wire.fields import Fields
from graphseed.server.wire.jobs import open_generations, read_all, read_merged
from graphseed.server.wire.llama_shapes import Telling
from graphseed.server.wire.params import Asked, parse


class Answer:
    """One answer of a turn, as far as it has come."""

    def __init__(self, telling: Telling, reader: AnswerReader) -> None:
        self.telling = telling
        self._reader = reader
        self.text = ""
        self.thought = ""
        self.calls: list[Call] = []

    def take(self, piece: Piece) -> tuple[list[Part], dict[str, Any] | None]:
        """Take a piece: what became certain, and what is known of its token where asked for."""
        num_before = len(self.telling.text)
        entry = self.telling.take(piece)
        return self._kept(self._reader.push(self.telling.text[num_before:])), entry

    def finish(self) -> list[Part]:
        """What was held back until it was known that no more comes."""
        return self._kept(self._reader.finish())

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        if self.telling.is_cut:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _kept(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            if part.call is not None:
                self.calls.append(part.call)
            elif part.kind is Kind.THOUGHT:
                self.thought += part.text
            else:
                self.text += part.text
        return parts


@dataclass(frozen=True, slots=True)
class Step:
    """What one event of the engine came to, for one answer."""

    answer: Answer
    piece: Piece | None  # None: the answer has ended
    parts: Sequence[Part] = ()
    entry: dict[str, Any] | None = None  # log-probabilities of its token, where asked for


@dataclass(frozen=True, slots=True)
class Turn:
    """One request for an answer, or several, to a conversation. Checked, and not begun."""

    asked: Asked
    answers: tuple[Answer, ...]

    @property
    def tellings(self) -> list[Telling]:
        """What the answers are told from."""
        return [answer.telling for answer in self.answers]

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Run it, step by step. The first error ends all answers; closing it early does too."""
        async with aclosing(read_merged(self.generations)) as pieces:
            async for index, piece in pieces:
                answer = self.answers[index]
                if piece is None:
                    yield Step(answer, None, answer.finish())
                else:
                    parts, entry = answer.take(piece)
                    yield Step(answer, piece, parts, entry)

    @property
    def generations(self) -> list[Generation]:
        """What runs, an answer each."""
        return [answer.telling.generation for answer in self.answers]


async def open_turn(state: ServerState, body: Mapping[str, Any]) -> Turn:
    """Check a body in OpenAI's form and make what it asks for. Raises RequestError and ApiError."""
    state.check_can_generate()
    conversation = await opened(state, body)
    asked = parse(state, _with_usual_format(body))
    form = _form(conversation, asked)
    if form is not None:
        asked = replace(asked, json_schema=None)  # it is in the form, or gives way to a call
    prompt_ids = await tokens_of(state.ready.model, conversation)
    generations = await open_generations(state, [prompt_ids], asked)
    if form is not None:
        for generation in generations:
            generation.request.grammar = await asyncio.to_thread(compile_format, state, form)
    is_read = Fields(body).flag("parse_tool_calls", True)
    names = conversation.tools.names if is_read else frozenset()
    answers = []
    for index, generation in enumerate(generations):
        reader = AnswerReader(
            names,
            reads_thoughts=conversation.reads_thoughts,
            is_thinking=conversation.is_thinking,
        )
        answers.append(Answer(Telling(state, generation, asked, index), reader))
    return Turn(asked, tuple(answers))


async def read_turns(*turns: Turn) -> None:
    """Run turns to their end, together. The first error ends all and is raised."""
    answers = [answer for turn in turns for answer in turn.answers]
    pieces = await read_all([answer.telling.generation for answer in answers])
    for answer, own in zip(answers, pieces, strict=True):
        for piece in own:
            answer.take(piece)
        answer.finish()


async def count_tokens(state: ServerState, body: Mapping[str, Any]) -> int:
    """Tokens of the prompt that a body in OpenAI's form makes. Raises as `open_turn`."""
    return len(await tokens_of(state.ready.model, await opened(state, body)))


def _with_usual_format(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """llama-server also takes a schema that is beside `json_schema`, and not in it."""
    form = body.get("response_format")
    if not isinstance(form, dict) or form.get("type") != "json_schema" or "schema" not in form:
        return body
    return {**body, "response_format": {"json_schema": {"schema": form["schema"]}, **form}}


def _form(conversation: Conversation, asked: Asked) -> dict[str, Any] | None:
    """What tools do to the form of the answer; None: nothing."""
    tools, style = conversation.tools, conversation.template.abilities.call_style
    if not tools.names:
        return None
    if asked.gbnf is not None:
        raise InvalidRequest("Cannot use custom grammar constraints with tools.")
    if tools.must_call:
        return forced_form(tools, style, is_thinking=conversation.is_thinking)
    if asked.json_schema is not None:
        return form_beside_schema(tools, style, asked.json_schema)
    return None

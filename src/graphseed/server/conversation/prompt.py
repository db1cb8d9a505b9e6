"""The prompt of a chat request, from its body in OpenAI's form, which the other dialects become.

Owns Conversation and the fields that shape a prompt: messages, tools, what the template is told,
whether the last message is continued, what is done with thoughts. Does not know sampling, and
generates nothing.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from graphseed.models.model import Model
from graphseed.server.conversation.chat_template import RESERVED, ChatTemplate, chat_template_of
from graphseed.server.conversation.messages import Message, messages_of
from graphseed.server.conversation.tools import Tools, tools_of
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.settings import ServerSettings
from graphseed.server.state import ServerState
from graphseed.server.text.tokens import encode
from graphseed.server.wire.fields import Fields, wrong

THINK: Final = "<think>"
END_THINK: Final = "</think>"
BLOCKING_MESSAGES: Final = 500  # more of them are rendered beside the event loop


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt, and what must be known of it to read the answer."""

    prompt: str  # without the beginning of sequence that the tokenizer puts
    tools: Tools
    template: ChatTemplate
    is_thinking: bool  # the prompt has opened a thought, which the answer begins with
    reads_thoughts: bool  # they are told apart from the answer


def open_conversation(state: ServerState, body: Mapping[str, Any]) -> Conversation:
    """Check what a body says and render its prompt. Raises InvalidRequest and NotSupported."""
    fields = Fields(body)
    messages = messages_of(fields.get("messages"))
    tools = tools_of(body, uses_jinja=state.settings.uses_jinja)
    template = chat_template_of(state)
    values = _values(fields, state.settings)
    if _is_continued(fields, messages):
        prompt = template.render(messages[:-1], tools, values)
        prompt, is_thinking = _continue(prompt, messages[-1])
    else:
        opens = fields.flag("add_generation_prompt", True)
        prompt = template.render(messages, tools, values, opens_answer=opens)
        is_thinking = _opens_thought(prompt)
    reads_thoughts = _reads_thoughts(fields, state.settings)
    prompt = _without_bos(state.ready.model, prompt)
    return Conversation(prompt, tools, template, is_thinking, reads_thoughts)


async def opened(state: ServerState, body: Mapping[str, Any]) -> Conversation:
    """`open_conversation`, beside the event loop where it takes long. Raises as it does."""
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > BLOCKING_MESSAGES:
        return await asyncio.to_thread(open_conversation, state, body)
    return open_conversation(state, body)


async def tokens_of(model: Model, conversation: Conversation) -> Sequence[int]:
    """The prompt's tokens, led by a BOS where the tokenizer puts one."""
    ids = await encode(model, conversation.prompt, adds_special=True)
    if not ids:
        raise InvalidRequest("the chat template made an empty prompt of the conversation")
    return ids


def _values(fields: Fields, settings: ServerSettings) -> dict[str, Any]:
    """Further variables of the template."""
    values: dict[str, Any] = {"enable_thinking": settings.reasoning != "off"}
    effort = fields.text("reasoning_effort")
    if effort == "none":
        values["enable_thinking"] = False
    elif effort:
        values["reasoning_effort"] = effort
    given = dict(fields.inner("chat_template_kwargs").body)
    for name in given:
        if name in RESERVED:
            raise wrong("chat_template_kwargs", name, "a variable that is the template's own")
    if not isinstance(given.get("enable_thinking", True), bool):
        raise wrong("enable_thinking", given["enable_thinking"], "true or false")
    return values | given


def _is_continued(fields: Fields, messages: Sequence[Message]) -> bool:
    """Whether the answer goes on with the last message, as it does after an assistant's."""
    wanted = fields.get("continue_final_message")
    if wanted is not None:
        fields.flag("continue_final_message", False)
    opens = fields.get("add_generation_prompt")
    if wanted and opens:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both true; expected one of them"
        )
    can = bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls
    if wanted and not can:
        raise InvalidRequest(
            "continue_final_message is true; expected the last message to be an assistant's, "
            "without tool calls"
        )
    return can if wanted is None and opens is not False else bool(wanted)


def _continue(prompt: str, last: Message) -> tuple[str, bool]:
    """A prompt with the beginning of the answer, and whether that is within a thought."""
    begun = "\n\n".join(last.texts)
    if last.reasoning is not None or (begun and _opens_thought(prompt)):
        prompt += "" if _opens_thought(prompt) else f"{THINK}\n"
        prompt += last.reasoning or ""
        if not begun:
            return prompt, True
        prompt += f"\n{END_THINK}\n\n"
    return prompt + begun, not begun and _opens_thought(prompt)


def _opens_thought(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK)


def _reads_thoughts(fields: Fields, settings: ServerSettings) -> bool:
    form = fields.text("reasoning_format", settings.reasoning_format)
    if form == "deepseek-legacy":
        raise NotSupported("reasoning_format is deepseek-legacy; this server has deepseek and none")
    if form not in ("auto", "deepseek", "none"):
        raise wrong("reasoning_format", form, "auto, deepseek or none")
    return form != "none"


def _without_bos(model: Model, prompt: str) -> str:
    """The prompt without what the tokenizer will put before it."""
    tokenizer = model.tokenizer
    ids = tokenizer("a", verbose=False).input_ids
    puts_bos = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    return prompt.removeprefix(str(tokenizer.bos_token)) if puts_bos else prompt

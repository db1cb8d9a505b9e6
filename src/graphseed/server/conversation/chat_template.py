"""Chat templates: conversations into prompts, as the model was trained to read them.

Owns ChatTemplate, and which template is in use. Rendering is transformers', in its sandbox. Does
not tokenise, and does not know requests.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from graphseed.engine import BadParameter
from graphseed.server.conversation.abilities import abilities_of, first_line
from graphseed.server.conversation.adapting import adapted_to, as_written
from graphseed.server.conversation.messages import Message
from graphseed.server.conversation.named_templates import CHATML, NAMED
from graphseed.server.conversation.tools import Tools
from graphseed.server.errors import InvalidRequest
from graphseed.server.state import ServerState

logger = logging.getLogger(__name__)

# What a template is given by other means than further variables.
RESERVED: Final = frozenset({
    "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
})  # fmt: skip


class ChatTemplate:
    """One template with the special tokens of one tokenizer. May be used from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises BadParameter where it is no Jinja."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        _check_jinja(source)
        self.abilities = abilities_of(self._raw)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        values: Mapping[str, Any],
        *,
        opens_answer: bool = True,
    ) -> str:
        """The prompt of a conversation. Raises InvalidRequest where the template refuses it.

        `values` are further variables of the template; with `opens_answer` the prompt ends where
        the answer begins.
        """
        abilities = self.abilities
        offered = list(tools.offered) if tools.names and abilities.takes_tools else []
        try:
            adapted = adapted_to(abilities, messages, tools)
            return self._raw(
                [as_written(abilities, message) for message in adapted],
                offered or ([] if abilities.wants_tool_list else None),
                values,
                opens_answer=opens_answer,
            )
        except RecursionError:
            raise InvalidRequest("the conversation is nested too deeply") from None
        except Exception as error:  # a template can raise anything
            raise InvalidRequest(
                f"the chat template refused the conversation: {first_line(error)}"
            ) from error

    def _raw(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        values: Mapping[str, Any] = MappingProxyType({}),
        *,
        opens_answer: bool = True,
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        # Variables that some templates need and that llama-server gives them.
        today = date.today()
        common = {
            "enable_thinking": True,
            "datetime": today.strftime("%b %d %Y"),
            "date_string": today.strftime("%d %b %Y"),
            "functions": json.dumps(tools, indent=4) if tools else "",
        }
        prompts, _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.source,
            add_generation_prompt=opens_answer,
            **(self._special_tokens | common | dict(values)),
        )
        return str(prompts[0])


def chat_template_of(state: ServerState) -> ChatTemplate:
    """The template that is in use: the server's, the model's, or ChatML where it has none."""
    tokenizer = state.ready.model.tokenizer
    wanted = state.settings.chat_template
    source = NAMED.get(wanted, wanted) if wanted is not None else _own(tokenizer) or CHATML
    tokens = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    return _made(source, tuple(sorted(tokens.items())))


def check_template(value: str) -> None:
    """Refuse a `--chat-template`, a name or a text, that is no Jinja. Raises BadParameter.

    What has nothing to fill in is a template too, and more likely a name that was misspelt: that is
    logged.
    """
    if value not in NAMED and "{{" not in value and "{%" not in value:
        logger.warning(
            "the chat template %r has nothing to fill in, and is not a name (%s): every prompt "
            "will be this text", value[:40], ", ".join(sorted(NAMED)),
        )  # fmt: skip
    _check_jinja(NAMED.get(value, value))


@lru_cache(maxsize=4)
def _made(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _own(tokenizer: Any) -> str | None:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):  # several, by name
        own = own.get("default") or next(iter(own.values()), None)
    return own or None


def _check_jinja(source: str) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=source)
    except TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise BadParameter("--chat-template", source[:40], f"Jinja ({where})") from None

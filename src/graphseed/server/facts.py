"""What is told about a model, also while it sleeps.

Owns ModelFacts. Does not know how it is told.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from graphseed.capture.errors import GraphseedError
from graphseed.server.conversation.abilities import Abilities
from graphseed.server.conversation.chat_template import chat_template_of
from graphseed.server.state import ServerState

# llama.cpp's numbers for kinds of vocabulary, by what the tokenizers library calls them.
_NO_VOCABULARY: Final = 0
_SENTENCEPIECE: Final = 1
_VOCABULARIES: Final = {"BPE": 2, "WordPiece": 3, "Unigram": 4}
_TYPES: Final = {"float32": "all F32", "float16": "F16", "bfloat16": "BF16"}  # its names for files


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model in one engine."""

    slot_context_len: int  # tokens of prompt and answer
    num_slots: int
    model_context_len: int  # that it was trained for
    vocab_type: int
    vocab_size: int
    hidden_size: int
    can_generate: bool
    num_parameters: int
    weight_bytes: int
    file_type: str
    device: str
    chat_template: str
    chat_template_caps: Mapping[str, bool]
    bos_token: str
    eos_token: str

    @staticmethod
    def of(state: ServerState) -> "ModelFacts":
        """Read them off a model that is there."""
        served = state.ready
        model, config = served.model, served.engine.core.config
        template, abilities = _chat_template(state)
        return ModelFacts(
            slot_context_len=config.context_len,
            num_slots=config.num_parallel,
            model_context_len=model.context_len,
            vocab_type=_vocab_type(model.tokenizer),
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            can_generate=model.can_generate,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            file_type=_TYPES.get(str(model.dtype).removeprefix("torch."), str(model.dtype)),
            device=str(model.device),
            chat_template=template,
            chat_template_caps=abilities,
            bos_token=model.tokenizer.bos_token or "",
            eos_token=model.tokenizer.eos_token or "",
        )


def _vocab_type(tokenizer: Any) -> int:
    inner = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if inner is None:
        return _NO_VOCABULARY
    kind = type(inner).__name__
    if kind == "BPE" and getattr(inner, "byte_fallback", False):
        return _SENTENCEPIECE
    return _VOCABULARIES.get(kind, _NO_VOCABULARY)


def _chat_template(state: ServerState) -> tuple[str, Mapping[str, bool]]:
    """The template in use, and what it can do; of one that cannot be used, nothing."""
    try:
        template = chat_template_of(state)
    except GraphseedError:  # it is told to whoever sends a conversation
        return "", {}
    return template.source, _caps(template.abilities)


def _caps(abilities: Abilities) -> Mapping[str, bool]:
    """In llama-server's words."""
    return {
        "supports_system_role": abilities.takes_system,
        "supports_string_content": not abilities.wants_parts,
        "supports_typed_content": abilities.wants_parts,
        "supports_tools": abilities.takes_tools,
        "supports_tool_calls": abilities.takes_calls,
        "supports_object_arguments": not abilities.wants_argument_texts,
    }

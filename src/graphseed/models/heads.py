"""What a model's head is for: the next token, or one score of the text that was read.

Owns ModelKind, how a config tells it, and which of transformers' classes has such a head. Does not
load weights and does not run anything.

A reranker is a causal decoder with transformers' own classification head of one label: a linear map
without a bias over the hidden state of the last token (`Qwen3ForSequenceClassification`, and so
on). Since the attention is causal, a text in chunks has the same last token as a whole one.
"""

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from graphseed.models.errors import ModelUnsupported

_CLASSIFIER: Final = "ForSequenceClassification"  # how the names of such classes end


class ModelKind(Enum):
    """What a model answers with."""

    CAUSAL = "causal model"  # logits of the next token
    RERANKER = "reranker"  # one score of a query with a document


def kind_of(architectures: Sequence[str] | None) -> ModelKind:
    """The kind that a config's `architectures` name; a causal model where they name nothing."""
    names = architectures or ()
    is_classifier = any(str(name).endswith(_CLASSIFIER) for name in names)
    return ModelKind.RERANKER if is_classifier else ModelKind.CAUSAL


def kind_of_folder(folder: Path) -> ModelKind:
    """The kind that a folder's config.json tells.

    A file that cannot be read tells nothing: whoever loads the folder says what is wrong with it.
    """
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return kind_of(said.get("architectures"))
    except (OSError, ValueError, AttributeError, TypeError):
        return ModelKind.CAUSAL


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model of `config` with its head.

    Raises ModelUnsupported for a head that is not one label read from the last token.
    """
    import transformers

    if kind_of(config.architectures) is ModelKind.CAUSAL:
        return transformers.AutoModelForCausalLM
    _check_classifier(config)
    return transformers.AutoModelForSequenceClassification


def is_reranker(module: Any) -> bool:
    """Whether a module of transformers has the head of a reranker."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(module, GenericForSequenceClassification)


def _check_classifier(config: Any) -> None:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    named = ", ".join(config.architectures)
    if config.num_labels != 1:
        raise ModelUnsupported(
            f"its config names {named} with {config.num_labels} labels; graphseed reranks with a "
            "head of one label and runs no other classifier"
        )
    made = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if made is None or made.__name__ not in config.architectures:
        has = f"has {made.__name__}" if made is not None else "has no such class"
        raise ModelUnsupported(
            f"its config names {named}, and for {config.model_type} transformers {has}: code that "
            "comes with a model is never run, and another class would give other scores"
        )
    if not issubclass(made, GenericForSequenceClassification):
        raise ModelUnsupported(
            f"{named} is not a causal decoder whose head reads the last token, which is what "
            "graphseed reranks with"
        )

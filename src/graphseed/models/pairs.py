"""A query and a document into one prompt, as a reranker was trained to read them.

Owns the choice of the template and what it is given. Rendering is transformers', in its sandbox.
Does not know models and runs nothing.

The order of what is taken, the first that there is:

1. a template that the caller names,
2. the tokenizer's template named "rerank" (llama.cpp's name for it),
3. the tokenizer's chat template where it has the roles "query" and "document", as vLLM's score
   templates and those of Sentence Transformers have,
4. the tokenizer's own way to join two texts: `tokenizer(query, document)`.

A template is Jinja, given two messages of these roles and the variables `query` and `document`, or
llama.cpp's plain text with {query} and {document}. It writes its special tokens itself, so none are
added. Texts are read as transformers reads them: special tokens may be written out in them.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from graphseed.models.errors import ModelError, ModelUnsupported

RERANK: Final = "rerank"
_PLACES: Final = re.compile(r"\{(query|document)\}")
_ROLES: Final = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))
_NEEDLES: Final = ("qzxjk", "vwpfy")  # texts that no template has of its own


def pair_ids(tokenizer: Any, query: str, document: str, template: str | None = None) -> list[int]:
    """Token ids of a query with a document.

    Raises ModelUnsupported where the template never shows both texts, and ModelError where it
    refuses these.
    """
    source = template or _own(tokenizer)
    if source is None:
        joined: list[int] = tokenizer(query, document, verbose=False).input_ids
        return joined
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    has_parts = _has_parts(source, tuple(sorted(special.items())))
    text = _rendered(source, query, document, special, has_parts)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _own(tokenizer: Any) -> str | None:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):  # several, by name
        if own.get(RERANK):
            return str(own[RERANK])
        own = own.get("default")
    if own and all(role.search(own) for role in _ROLES):
        return str(own)
    return None


@lru_cache(maxsize=8)
def _has_parts(source: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template takes contents as lists of parts; found out by trying it."""
    for has_parts in (False, True):
        try:
            text = _rendered(source, *_NEEDLES, dict(special_tokens), has_parts)
        except ModelError:
            continue  # it may take the other form
        if all(needle in text for needle in _NEEDLES):
            return has_parts
    raise ModelUnsupported(
        "the template for a query with a document does not show both of them; expected Jinja with "
        'the roles "query" and "document", or a text with {query} and {document}'
    )


def _rendered(
    source: str, query: str, document: str, special_tokens: Mapping[str, str], has_parts: bool
) -> str:
    texts = {"query": query, "document": document}
    if "{{" not in source and "{%" not in source:
        # In one go: what stands in a text is not looked at again.
        return _PLACES.sub(lambda found: texts[found[1]], source)
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text}
        for role, text in texts.items()
    ]
    try:
        prompts, _ = render_jinja_template(
            conversations=[messages], chat_template=source, add_generation_prompt=True,
            **{**special_tokens, **texts},
        )  # fmt: skip
    except Exception as error:  # a template can raise anything
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the template for a query with a document refused them: {told}"
        ) from error
    return str(prompts[0])

"""A query and a document as one prompt: which template is taken, and what it is given."""

import copy
from typing import Any

import pytest

from graphseed.models.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, byte_tokenizer
from graphseed.models.errors import ModelError, ModelUnsupported
from graphseed.models.load import load_model
from graphseed.models.pairs import pair_ids

ROLES = (
    '{{ bos_token }}Q: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") '
    '| first }} D: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") '
    "| first }}{% if add_generation_prompt %} A:{% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ {'query': 'q', 'document': 'd'}[m.role] }}={{ m.content[0].text }};"
    "{% endfor %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def tokenizer_with(template: Any) -> Any:
    tokenizer = byte_tokenizer(512)
    tokenizer.split_special_tokens = False  # as most tokenizers are
    tokenizer.chat_template = template
    return tokenizer


def text_of(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids)
    return text


def test_without_a_template_the_tokenizer_joins_the_two() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(None)
    assert pair_ids(tokenizer, "ab", "c") == [97, 98, 99]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|eos|> $B:1 <|eos|>:1",
        special_tokens=[("<|bos|>", BOS_ID), ("<|eos|>", EOS_ID)],
    )  # fmt: skip
    assert pair_ids(tokenizer, "ab", "c") == [BOS_ID, 97, 98, EOS_ID, 99, EOS_ID]


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (ROLES, "<|bos|>Q: dogs? D: wolf A:"),
        (PARTS, "q=dogs?;d=wolf;"),
        ({"default": CHATML, "rerank": ROLES}, "<|bos|>Q: dogs? D: wolf A:"),
        ({"default": CHATML, "rerank": "<{query}|{document}>"}, "<dogs?|wolf>"),
        ({"rerank": "{{ query }}/{{ document }}"}, "dogs?/wolf"),
        (CHATML, "dogs?wolf"),  # a conversation's, and this is none
        ({"default": CHATML}, "dogs?wolf"),
    ],
)
def test_a_template_is_taken_that_is_for_a_query_with_a_document(template: Any, want: str) -> None:
    tokenizer = tokenizer_with(template)
    assert text_of(tokenizer, pair_ids(tokenizer, "dogs?", "wolf")) == want


def test_the_callers_template_comes_first() -> None:
    tokenizer = tokenizer_with({"rerank": ROLES})
    assert text_of(tokenizer, pair_ids(tokenizer, "a", "b", "{document}{query}")) == "ba"


def test_a_template_writes_its_own_special_tokens_and_none_is_added() -> None:
    ids = pair_ids(tokenizer_with(ROLES), "a", "b")
    assert ids[0] == BOS_ID and ids.count(BOS_ID) == 1


def test_what_looks_like_a_place_in_a_text_stays_text() -> None:
    tokenizer = tokenizer_with({"rerank": "{query}|{document}"})
    ids = pair_ids(tokenizer, "{document} {query}", "{query} {{ bos_token }}")
    assert text_of(tokenizer, ids) == "{document} {query}|{query} {{ bos_token }}"


def test_a_template_that_shows_one_of_the_two_is_refused() -> None:
    for template in ("{query}", "{{ document }}", "{% for m in messages %}{% endfor %}"):
        with pytest.raises(ModelUnsupported, match="does not show both"):
            pair_ids(tokenizer_with({"rerank": template}), "a", "b")


def test_a_template_that_refuses_a_text_says_why() -> None:
    template = "{% if query | length > 9 %}{{ raise_exception('too long') }}{% endif %}" + ROLES
    tokenizer = tokenizer_with({"rerank": template})
    assert pair_ids(tokenizer, "short", "b")
    with pytest.raises(ModelError, match="refused them: too long"):
        pair_ids(tokenizer, "a query that is long", "b")


def test_padding_at_the_end_is_cut_off_since_the_head_reads_the_token_before_it() -> None:
    model = load_model(
        "random:tiny-qwen3-reranker", device="cpu", dtype="fp32", bf16_is_fast=False,
        progress=False, takes_rerankers=True,
    )  # fmt: skip
    model = copy.copy(model)
    object.__setattr__(model, "tokenizer", tokenizer_with(None))
    assert model.module.config.pad_token_id == PAD_ID
    assert model.pair("a<|pad|>", "b<|pad|><|pad|>") == [97, PAD_ID, 98]
    assert model.pair("<|pad|>", "<|pad|>") == [PAD_ID]

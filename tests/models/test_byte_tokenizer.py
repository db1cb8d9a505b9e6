"""The byte tokenizer: exact for any text, never at a loss for an id."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphseed.models.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, byte_tokenizer

_TOKENIZER = byte_tokenizer(2000)
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(_TEXTS)
def test_any_text_comes_back_exactly_and_is_its_own_bytes(text: str) -> None:
    ids = _TOKENIZER(text).input_ids
    assert ids == list(text.encode())
    assert _TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    text = "a<|eos|>b<|bos|><|pad|>"
    ids = _TOKENIZER(text).input_ids
    assert not {BOS_ID, EOS_ID, PAD_ID} & set(ids)
    assert _TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_every_id_decodes_and_those_beyond_the_bytes_to_words_of_their_own() -> None:
    texts = [_TOKENIZER.decode([i], skip_special_tokens=True) for i in range(2000)]
    assert texts[ord("a")] == "a"
    assert texts[BOS_ID] == texts[EOS_ID] == texts[PAD_ID] == ""
    words = texts[259:]
    assert words[:2] == [" a", " b"]
    assert len(set(words)) == len(words)
    assert all(word.strip().isalpha() for word in words)


def test_the_special_ids_are_the_tokenizers() -> None:
    assert _TOKENIZER.bos_token_id == BOS_ID
    assert _TOKENIZER.eos_token_id == EOS_ID
    assert _TOKENIZER.pad_token_id == PAD_ID
    assert len(_TOKENIZER) == 2000


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 258"):
        byte_tokenizer(258)

"""Text into tokens and back: /tokenize, /detokenize, and the shapes of a prompt."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from graphseed.engine import EngineConfig, PromptTooLong
from graphseed.engine.request import TokenIds
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.text.tokens import BLOCKING_CHARACTERS, Pieces, encode, prompts_of
from tests.server.conftest import model_of
from tests.server.small import Small, small_server

SIZES = EngineConfig(context_len=64, num_parallel=2, max_waiting=3)
TEXT = "What is the capital of 媽 and 🤗?"


class OtherTokenizer:
    """A model in all but its tokenizer, as far as tokenising goes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server() as server:
        yield server


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """A tokenizer of SentencePiece's kind: BOS, a space in front, bytes for unknown letters."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("\u2581", "a", "b", "\u2581a", "\u2581ab", "ab"):
        vocab[piece] = len(vocab)
    inner = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("\u2581", "a"), ("\u2581a", "b"), ("a", "b")], unk_token="<unk>",
            byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def prompts(model: Any, value: Any) -> list[list[int]]:
    return [list(map(int, ids)) for ids in asyncio.run(prompts_of(model, SIZES, value))]


def test_tokens_written_as_text_are_the_text(server: Small) -> None:
    tokens = server.post("/tokenize", content=TEXT)["tokens"]
    assert tokens == list(TEXT.encode())
    assert server.post("/detokenize", tokens=tokens) == {"content": TEXT}


def test_pieces_are_text_or_the_bytes_of_a_part_of_a_character(server: Small) -> None:
    pieces = server.post("/tokenize", content="aé ", with_pieces=True)["tokens"]
    assert pieces == [
        {"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]},
        {"id": 32, "piece": " "},
    ]  # fmt: skip


def test_special_tokens_are_written_out(server: Small) -> None:
    assert server.post("/detokenize", tokens=[256, 72, 257]) == {"content": "<|bos|>H<|eos|>"}


def test_nothing_is_no_tokens(server: Small) -> None:
    assert server.post("/tokenize") == {"tokens": []}
    assert server.post("/tokenize", content="", add_special=True) == {"tokens": []}
    assert server.post("/detokenize") == {"content": ""}


@pytest.mark.parametrize("tokens", ["a", [1, "a"], [1, True], [1, 2.5], [512], [-1], [1 << 70]])
def test_what_is_no_token_id_is_refused(server: Small, tokens: Any) -> None:
    assert "tokens" in server.refused("/detokenize", 400, tokens=tokens)["message"]


@pytest.mark.parametrize("body", [{"content": 7}, {"content": "a", "add_special": "yes"}])
def test_tokenize_names_the_field_that_is_wrong(server: Small, body: dict[str, Any]) -> None:
    name = list(body)[-1]
    assert server.refused("/tokenize", 400, **body)["message"].startswith(f"{name} is ")


def test_what_is_no_json_is_a_server_error_and_no_object_a_clients(server: Small) -> None:
    def told(content: bytes) -> tuple[int, str]:
        reply = server.client.post("/tokenize", content=content)
        return reply.status_code, reply.json()["error"]["type"]

    assert told(b"{") == (500, "server_error")
    assert told(b"\xff") == (500, "server_error")
    assert told(b"[]") == (400, "invalid_request_error")
    assert told(b'{"content": "\\ud800"}') == (400, "invalid_request_error")
    assert told(b"[" * 100_000) == (400, "invalid_request_error")


def test_a_whole_surrogate_pair_is_a_character(server: Small) -> None:
    reply = server.client.post("/tokenize", content=b'{"content": "\\ud83e\\udd17"}')
    assert reply.json() == {"tokens": list("🤗".encode())}


def test_special_tokens_may_be_written_out_in_a_text(sentencepiece: Any) -> None:
    model: Any = OtherTokenizer(sentencepiece)
    assert asyncio.run(encode(model, "a</s>", adds_special=True))[-1] == 2


def test_a_beginning_of_sequence_goes_before_text_alone(sentencepiece: Any) -> None:
    model = OtherTokenizer(sentencepiece)
    (text,) = prompts(model, "ab")
    assert text == [1, sentencepiece.convert_tokens_to_ids("\u2581ab")]
    assert prompts(model, [5, 6]) == [[5, 6]]
    assert prompts(model, ["ab", 5]) == [[*text, 5]]
    assert prompts(model, [5, "ab"]) == [[5, text[1]]]


def test_pieces_of_a_vocabulary_with_bytes_for_unknown_letters(sentencepiece: Any) -> None:
    pieces = Pieces(sentencepiece)
    ids = sentencepiece("ab é", add_special_tokens=True).input_ids
    assert b"".join(pieces.of(token) for token in ids) == "<s> ab é".encode()
    assert pieces.of(3 + 0xC3) == b"\xc3"
    assert pieces.of(100_000) == b""


def test_every_piece_of_the_byte_vocabulary_is_its_bytes() -> None:
    pieces = Pieces(model_of("tiny-llama").tokenizer)
    assert [pieces.of(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert pieces.of(256) == b"<|bos|>"
    assert pieces.of(259) == b" a"
    assert pieces.of(512) == b""


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("ab", [[97, 98]]),
        ([1, 2], [[1, 2]]),
        ([1, "ab", 2], [[1, 97, 98, 2]]),
        (["a", "b"], [[97], [98]]),
        ({"prompt_string": "a"}, [[97]]),
        ({"prompt_string": "a", "multimodal_data": []}, [[97]]),
        ([[1, "a"], [2], "b", {"prompt_string": "c"}], [[1, 97], [2], [98], [99]]),
        (["a"], [[97]]),
        ("", [[256]]),
        ([""], [[256]]),
    ],
)
def test_a_prompt_has_many_shapes(value: Any, want: list[list[int]]) -> None:
    assert prompts(model_of("tiny-llama"), value) == want


@pytest.mark.parametrize(
    "value",
    [None, 7, True, [], [[]], [None], {}, {"prompt_string": 7}, [1, True], [False, 9], [1, 2.0],
     ["a", 512], ["a", -1], [1, [2]], [["a", ["b"]]]],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        prompts(model_of("tiny-llama"), value)


def test_media_are_not_supported() -> None:
    with pytest.raises(NotSupported, match="multimodal_data"):
        prompts(
            model_of("tiny-llama"), {"prompt_string": "<__media__>", "multimodal_data": ["aaaa"]}
        )


def test_a_long_text_is_tokenised_beside_the_event_loop() -> None:
    text = "ab" * BLOCKING_CHARACTERS
    assert prompts(model_of("tiny-llama"), text) == [list(text.encode())]


def test_plain_text_is_tokenised_without_touching_the_engines_tokenizer(server: Small) -> None:
    backend = server.state.ready.model.tokenizer.backend_tokenizer
    before = backend.encode_special_tokens
    tokens = server.post("/tokenize", content="<|eos|>", parse_special=False)["tokens"]
    assert tokens == list(b"<|eos|>")
    assert backend.encode_special_tokens == before


def test_ids_of_a_text_are_known_to_be_under_the_highest_of_them(server: Small) -> None:
    (ids,) = asyncio.run(prompts_of(server.state.ready.model, SIZES, "ab"))
    assert type(ids) is TokenIds and list(ids) == [97, 98] and ids.below == 99


def test_an_id_that_the_model_lacks_is_refused_whoever_wrote_it() -> None:
    with small_server() as server:
        inner = server.state.ready.model.tokenizer.backend_tokenizer
        before = inner.post_processor
        inner.post_processor = processors.TemplateProcessing(
            single="<x> $A", special_tokens=[("<x>", 900)]
        )
        try:
            error = server.refused("/completion", 400, prompt="ab")
        finally:
            inner.post_processor = before
    assert "token id 900 at position 0" in error["message"]


def test_lists_that_can_never_run_are_refused_before_they_are_looked_at() -> None:
    model = model_of("tiny-llama")
    assert len(prompts(model, ["a"] * 5)) == 5
    with pytest.raises(InvalidRequest, match="6 prompts; expected at most 5"):
        prompts(model, [object()] * 6)
    for many in ([1] * 64, [1] + [object()] * 63, [[1] * 64]):
        with pytest.raises(PromptTooLong, match="64 tokens"):
            prompts(model, many)


@pytest.mark.parametrize(
    "raw", [b'{"content":"\xed\xa0\x80"}', '{"content":"\\ud800"}'.encode("utf-16")]
)
def test_half_a_character_is_no_text_however_it_is_written(raw: bytes) -> None:
    with small_server() as server:
        reply = server.client.post("/tokenize", content=raw)
    assert reply.status_code == 400 and "surrogate" in reply.json()["error"]["message"]

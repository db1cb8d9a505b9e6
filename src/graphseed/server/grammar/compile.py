"""What constrains an answer: grammars and JSON schemas, compiled by xgrammar.

Owns `compile_grammar`, `compile_format` and the adapter to the engine's Grammar protocol. Does not
know how requests name their grammars (params and tools do), and touches no tensor: the library
fills one, the engine reads it.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from graphseed.engine import Grammar
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.grammar.gbnf import to_ebnf
from graphseed.server.grammar.schemas import MAX_CHARS, checked_schema
from graphseed.server.state import ServerState

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

# As llama.cpp's own grammar of JSON: a model that only writes blanks would never end.
MAX_BLANKS: Final = 20
CACHE_BYTES: Final = 128 << 20
NUM_THREADS: Final = 4

_PLACE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and source line of the library


def compile_grammar(
    state: ServerState, *, gbnf: str | None = None, json_schema: object | None = None
) -> Grammar | None:
    """The constraint of one answer, by a grammar or by a JSON schema; None where neither is given.

    Takes up to seconds for a large one, without Python's lock: call it off the event loop. The
    result belongs to one request. Raises InvalidRequest, with what the library says, and
    NotSupported.
    """
    if gbnf and json_schema is not None:
        raise InvalidRequest('Either "json_schema" or "grammar" can be specified, but not both')
    if gbnf:
        source = to_ebnf(_checked_text(gbnf))
        return _compiled(state, "grammar", lambda compiler: compiler.compile_grammar(source))
    if json_schema is None:
        return None
    schema = json.dumps(checked_schema(json_schema))
    return _compiled(
        state, "json_schema",
        lambda compiler: compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_BLANKS),
    )  # fmt: skip


def compile_format(state: ServerState, form: dict[str, Any]) -> Grammar:
    """The constraint of an answer that mixes text and JSON, as tool calls do.

    `form` is a format of xgrammar's structural tags. As `compile_grammar` otherwise.
    """
    tag = json.dumps({"type": "structural_tag", "format": form})
    return _compiled(state, "tools", lambda compiler: compiler.compile_structural_tag(tag))


class Constraint:
    """Where one answer stands in its compiled grammar. Belongs to one request; engine thread only.

    Once an end of sequence was taken it allows nothing else. Other special tokens are never allowed
    where anything is not: they have no text, and the library takes them for what they are called.
    """

    def __init__(self, compiled: "CompiledGrammar", masks: "_Masks") -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled)
        self._masks = masks
        self._mask = masks.texts.clone()  # to be filled

    def allowed(self) -> Any:
        """Tokens that may come next: [W] int32 in the host's memory; None: all."""
        if self._matcher.is_terminated():  # the library has no mask for that
            return self._masks.ends
        if not self._matcher.fill_next_token_bitmask(self._mask, 0):
            return None
        self._mask.bitwise_and_(self._masks.texts)
        return self._mask[0]

    def accept(self, token: int) -> None:
        """Take the token that was chosen, an end of sequence included."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise InvalidRequest(f"the grammar does not allow token {token} here")


class _Masks:
    """Sets of tokens, as the engine reads them. Nobody writes to them."""

    def __init__(self, vocab_size: int, eos_ids: frozenset[int], special_ids: set[int]) -> None:
        from xgrammar import allocate_token_bitmask

        self.texts = allocate_token_bitmask(1, vocab_size)  # [1, W]: all but special ones
        self.texts.fill_(-1)
        for index, bits in _words(special_ids - eos_ids).items():
            self.texts[0, index] = ~_signed(bits)
        self.ends = allocate_token_bitmask(1, vocab_size)[0]  # [W]: ends of sequence
        self.ends.zero_()
        for index, bits in _words(eos_ids).items():
            self.ends[index] = _signed(bits)


def _words(ids: Iterable[int]) -> dict[int, int]:
    """The words of a mask that are not 0, for a set of tokens."""
    words: dict[int, int] = {}
    for token in ids:
        words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
    return words


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def _compiled(
    state: ServerState, name: str, compiled: "Callable[[GrammarCompiler], CompiledGrammar]"
) -> Grammar:
    model = state.ready.model
    if not model.eos_ids:
        raise NotSupported(f"{model.name} has no end of sequence, which an answer would end with")
    compiler, masks = _compiler(model.tokenizer, model.vocab_size, model.eos_ids)
    try:
        return Constraint(compiled(compiler), masks)
    except RuntimeError as error:
        why = _PLACE.sub("", str(error)).strip()
        raise InvalidRequest(f"failed to parse {name}: {why}") from None


@lru_cache(maxsize=1)
def _compiler(
    tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]
) -> "tuple[GrammarCompiler, _Masks]":
    """Reading a large vocabulary takes a second, once for each model; holds no weights."""
    try:
        from xgrammar import GrammarCompiler, TokenizerInfo
    except ImportError as error:
        raise NotSupported(f"grammars need the extra graphseed[serve]: {error}") from None
    info = TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(eos_ids)
    )
    compiler = GrammarCompiler(info, max_threads=NUM_THREADS, cache_limit_bytes=CACHE_BYTES)
    added = tokenizer.added_tokens_decoder
    special_ids = {index for index, token in added.items() if token.special and index < vocab_size}
    return compiler, _Masks(vocab_size, eos_ids, special_ids)


def _checked_text(gbnf: object) -> str:
    if not isinstance(gbnf, str):
        raise InvalidRequest(f"grammar is {gbnf!r:.100}; expected a text in GBNF")
    if len(gbnf) > MAX_CHARS:
        raise InvalidRequest(f"grammar has {len(gbnf)} characters; expected {MAX_CHARS} or less")
    return gbnf

"""GBNF, llama.cpp's grammar language, in the dialect that xgrammar reads.

Owns the words of the language and `to_ebnf`. xgrammar reads GBNF but for three things: an empty
alternative must be written, `.` is not known, and a rule's name must begin with a letter. Does not
know what a grammar means: the library parses it and says what is wrong.
"""

import re
from typing import Final

from graphseed.server.errors import InvalidRequest, NotSupported

_WORD: Final = re.compile(
    r"""
      (?P<blank>    \s+ | \#[^\r\n]* )
    | (?P<literal>  "(?:\\.|[^"\\])*" )
    | (?P<letters>  \[(?:\\.|[^\]\\])*\] )
    | (?P<token>    !?<[^<>\s]+> )
    | (?P<name>     [A-Za-z0-9_-]+ )
    | (?P<begin>    ::= | \| | \( )
    | (?P<end>      \) )
    | (?P<any>      \. )
    | (?P<repeat>   [*+?] | \{\s*\d+\s*(?:,\s*\d*\s*)?\} )
    """,
    re.VERBOSE | re.DOTALL,
)
_ANY: Final = r"[\u0000-\U0010ffff]"
_SHOWN: Final = 20  # characters of a grammar that an error shows


def to_ebnf(gbnf: str) -> str:
    """The same grammar for xgrammar. Raises InvalidRequest and NotSupported."""
    written: list[str] = []
    is_open = False  # an alternative has begun and has nothing in it yet
    position = 0
    while position < len(gbnf):
        word = _WORD.match(gbnf, position)
        if word is None:
            raise InvalidRequest(f"grammar: {_where(gbnf, position)} is not GBNF")
        kind, text = str(word.lastgroup), word.group()
        if kind == "token":
            raise NotSupported(
                f"grammar: {_where(gbnf, position)}: tokens in a grammar are not supported; write "
                "their text"
            )
        if is_open and (kind == "end" or text == "|"):
            written.append('"" ')
        if kind != "blank":
            is_open = kind == "begin"
        written.append(_in_dialect(kind, text))
        position = word.end()
    return "".join(written) + (' ""' if is_open else "")


def _in_dialect(kind: str, text: str) -> str:
    if kind == "any":
        return _ANY
    if kind == "name" and not text[0].isalpha():
        return f"_{text}"
    return text


def _where(gbnf: str, position: int) -> str:
    line = gbnf.count("\n", 0, position) + 1
    column = position - gbnf.rfind("\n", 0, position)
    return f"{gbnf[position : position + _SHOWN]!r} in line {line}, column {column}"

"""From token ids to text that can be shown at once.

Owns Detokenizer (never emits half a character), StopMatcher (never emits part of a stop string) and
AnswerText, which joins them. All are incremental and hold only what is not yet certain. They do not
know requests.
"""

from collections.abc import Callable, Sequence
from typing import Final

INCOMPLETE: Final = "\ufffd"  # what decoders show for bytes that are no character (yet)
MAX_HELD: Final = 64  # ids that may be undecided; a run this long is no unfinished character
MAX_CHARACTER: Final = 3  # ids behind which a character that is still unfinished can begin


class Detokenizer:
    """Decodes a growing list of ids. One for each request."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # decoding begins here: one clean point back, for joining spaces
        self._clean = 0  # everything before it was shown in full
        self._shown = 0  # characters shown of the text from `_start`

    def push(self, token_id: int) -> str:
        """Take one id and return the text that became certain."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])
        certain = text.rstrip(INCOMPLETE)
        if len(self._ids) - self._clean > MAX_HELD:
            return self._give_up()
        # All marks at the end are undecided: byte-level decoders write one for an unfinished
        # character, byte-fallback decoders one for each byte of the whole run it ends.
        new = self._show(certain)
        if new and certain == text:  # an id without text must not become where decoding begins
            if self._clean > self._start:
                text = self._decode(self._ids[self._clean :])
            self._start, self._clean = self._clean, len(self._ids)
            self._shown = len(text)
        return new

    def flush(self) -> str:
        """Return what is still held, as it is: no more ids will come."""
        if self._clean == len(self._ids):
            return ""
        return self._show(self._decode(self._ids[self._start :]))

    def _give_up(self) -> str:
        """Show a long undecided run as the decoder writes it, but for what could yet be text."""
        cut = len(self._ids) - MAX_CHARACTER
        new = self._show(self._decode(self._ids[self._start : cut]))
        self._start, self._clean, self._shown = cut, cut, 0
        return new

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new


class StopMatcher:
    """Finds stop strings across pieces of text. One for each request."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Begun(stop) for stop in stops]
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take a piece and return what may be shown; after a match, nothing more."""
        if self.found is not None:
            return ""
        ends = [(stop.push(text), stop.text) for stop in self._stops]
        hits = [(end - len(stop), stop) for end, stop in ends if end is not None]
        before = len(self._held)
        self._held += text
        if hits:
            position, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            shown, self._held = self._held[: before + position], ""
            return shown
        keep = max((stop.length for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return what was held back: no more text will come."""
        shown, self._held = self._held, ""
        return shown


class _Begun:
    """How much of one stop string the end of a growing text has (Knuth, Morris and Pratt).

    Each character costs the same in the long run, whatever the texts are: a request's stop strings
    are looked for between two steps of everybody's.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._shorter = [0]  # by length - 1: the longest beginning that ends a beginning of it too

    def push(self, piece: str) -> int | None:
        """Take a piece; where in it the stop string ends for the first time. Not after that."""
        text, at = self.text, self.length
        for place, letter in enumerate(piece):
            while at and text[at] != letter:
                at = self._shorter[at - 1]
            at += text[at] == letter
            if at == len(text):
                return place + 1
            if at > len(self._shorter):
                self._learn()
        self.length = at
        return None

    def _learn(self) -> None:
        text, shorter = self.text, self._shorter
        end, at = text[len(shorter)], shorter[-1]
        while at and text[at] != end:
            at = shorter[at - 1]
        shorter.append(at + (text[at] == end))


class AnswerText:
    """The visible text of one answer: ids in, text out, stop strings honoured."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopMatcher(stops)

    @property
    def stopping_word(self) -> str | None:
        """The stop string that was found, which is not shown."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """Take one id and return the text that may be shown."""
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """Return what is still held: no more ids will come."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()

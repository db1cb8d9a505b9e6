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
            self._start, self._clean = self._clean, len(self._ids)
            self._shown = len(self._decode(self._ids[self._start :]))
        return new

    def flush(self) -> str:
        """Return what is still held, as it is: no more ids will come."""
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
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take a piece and return what may be shown; after a match, nothing more."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if hits:
            position, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            shown, self._held = self._held[:position], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return what was held back: no more text will come."""
        shown, self._held = self._held, ""
        return shown


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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

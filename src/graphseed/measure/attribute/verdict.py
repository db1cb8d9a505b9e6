"""What a model's cells mean, in words: who gains a large multiple, and who is told not to bother.

Owns the thresholds. Measures nothing.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from graphseed.measure.attribute.attribution import Cell

# From this multiple of the direct chunk's speed on; in words a user can act on.
GAINS: Final = (
    (2.0, "gains a large multiple"),
    (1.10, "gains clearly"),  # more than two runs on one machine differ by
    (1.03, "gains a few percent"),
    (0.97, "shows no gain that can be told from noise"),
    (0.0, "loses"),
)
NOISE: Final = GAINS[3][1]
MUCH_IDLE: Final = 0.25  # share of idle time below which the device is called busy
CLEAR: Final = GAINS[1][0]
FEW: Final = GAINS[2][0]


def gain(multiple: float) -> str:
    """The words for a multiple."""
    return next(words for least, words in GAINS if multiple >= least)


def verdict(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each run of chunks with the same gain, then what to do about it."""
    sentences = []
    for context, of_context in groupby(cells, key=lambda cell: cell.direct.context):
        by_size = sorted(of_context, key=lambda cell: cell.direct.chunk)
        for words, alike in groupby(by_size, key=_words):
            sentences.append(_sentence(words, list(alike), context))
    return [*sentences, _advice(cells)]


def _words(cell: Cell) -> str:
    if cell.multiple is None:
        return "was not replayed"
    return NOISE if cell.is_noise else gain(cell.multiple)


def _sentence(words: str, cells: Sequence[Cell], context: int) -> str:
    sizes = _range([cell.direct.chunk for cell in cells], "{}")
    where = f"at chunks of {sizes}" + (f" behind {context} tokens" if context else "")
    multiples = [cell.multiple for cell in cells if cell.multiple is not None]
    if not multiples:
        return f"{words} {where}: {cells[0].replay.refused}"
    idle = [cell.direct.idle_share for cell in cells]
    is_idle = max(idle) >= MUCH_IDLE
    shares = _range(sorted(100 * (share if is_idle else 1 - share) for share in idle), "{:.0f}")
    state = "idle" if is_idle else "busy"
    of_what = "a profiled direct chunk" if cells[0].direct.profile.is_host else "a direct chunk"
    return (
        f"{words} {where} ({_range(sorted(multiples), '{:.2f}')}x): the device is {state} "
        f"{shares} % of {of_what}"
    )


def _advice(cells: Sequence[Cell]) -> str:
    best = max((cell.multiple or 0.0 for cell in cells if not cell.is_noise), default=0.0)
    if best >= CLEAR:
        return "prompt graphs are worth turning on where chunks are of a size that gains"
    if best >= FEW:
        return "there is little to gain here: a few percent is all that prompt graphs can save"
    return "there is nothing to gain here: leave prompt graphs off for this model on this device"


def _range(values: Sequence[float], form: str) -> str:
    first, last = form.format(values[0]), form.format(values[-1])
    return first if first == last else f"{first}-{last}"

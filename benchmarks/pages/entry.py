"""What an entry of the timeline is made of. Knows no benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One run, shown."""

    body: Sequence[str]  # lines of Markdown
    not_shown: str  # sentences that end the line "Not shown: ..."
    headline: str  # the run in a few words, for when a later one has taken its place


def bytes_said(are_equal: bool | None) -> str:
    """Whether bytes were compared, and were equal."""
    return "not compared" if are_equal is None else "equal" if are_equal else "DIFFER"

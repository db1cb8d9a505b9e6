"""Counters over the event log, and the summary line they print.

Owns Tally (counts for each namespace). A plain subscriber: it changes nothing. Does not know
policies; it counts what the events say.
"""

from collections import Counter
from dataclasses import dataclass, field, fields

from graphseed.capture.errors import Reason
from graphseed.capture.events import Deferred, Direct, Event, Refused, Released, Replayed, Seeded
from graphseed.capture.events import Stale as StaleEvent
from graphseed.capture.identity import Namespace
from graphseed.capture.selector import Policy, Selection


@dataclass(slots=True)
class Counts:
    """What happened in one namespace. candidates = replayed + direct."""

    candidates: int = 0
    seeded: int = 0
    replayed: int = 0
    direct: int = 0
    stale: int = 0
    refused: int = 0
    quarantined: int = 0
    released: int = 0
    deferred: int = 0
    bytes: int = 0  # held now
    reasons: Counter[Reason] = field(default_factory=Counter)  # of refusals


class Tally:
    """Counts for each namespace of one device. Subscribe it to an EventLog."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.counts = {namespace: Counts() for namespace in Namespace}

    def __call__(self, event: Event) -> None:
        counts = self.counts[event.namespace]
        match event:
            case Replayed():
                counts.candidates += 1
                counts.replayed += 1
            case Direct():
                counts.candidates += 1
                counts.direct += 1
            case Seeded():
                counts.seeded += 1
                counts.bytes += event.num_bytes
            case Refused():
                counts.refused += 1
                counts.reasons[event.reason] += 1
            case Released():
                counts.released += event.num_entries
                counts.bytes = max(0, counts.bytes - event.bytes_held)
            case StaleEvent():
                counts.stale += event.num_entries
            case Deferred():
                counts.deferred += 1

    def line(self, namespace: Namespace) -> str:
        """The summary line of one namespace, as the exit log and /props print it."""
        counts = self.counts[namespace]
        names = [f.name for f in fields(counts) if f.name != "reasons"]
        pairs = " ".join(f"{name}={getattr(counts, name)}" for name in names)
        return f"{namespace.value} graphs: device={self.device} {pairs}"

    def no_effect(self, selection: Selection) -> str | None:
        """Why prompt graphs that were asked for were never instantiated, or None (I10)."""
        counts = self.counts[Namespace.PROMPT]
        if not selection.was_asked or selection.prompt is Policy.OFF or counts.seeded:
            return None
        if not counts.candidates:
            why = "no prompt was run"
        elif counts.refused:
            reasons = ", ".join(sorted({reason.value for reason in counts.reasons}))
            why = f"every graph was refused ({reasons})"
        else:
            why = "no prompt was captured before the end"
        return f"{selection.source} had no effect: {why}"

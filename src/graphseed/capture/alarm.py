"""Notices a namespace that captures and never replays (I10), and says why.

Owns SeedWatch, a subscriber that emits Alarm events into the same log. It tells "the identity
differed, and in which field" from "released before it was seen again". Does not know policies.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from graphseed.capture.events import Alarm, Event, EventLog, Replayed, Seeded
from graphseed.capture.identity import GraphIdentity, Namespace

ALARM_SEEDS: Final = 8


@dataclass(slots=True)
class _Watch:
    """What was seen in one namespace since its last replay."""

    num_seeds: int = 0
    num_again: int = 0  # seeds of an identity that had been seeded, and given back, before
    differing: Counter[str] = field(default_factory=Counter)
    last: GraphIdentity | None = None
    is_raised: bool = False
    num_replays: int = 0  # ever


class SeedWatch:
    """Raises an alarm at 8 seeds without a replay, and at the end for any. One thread."""

    def __init__(self, log: EventLog, device: str) -> None:
        self._log = log
        self._device = device
        self._watches = {namespace: _Watch() for namespace in Namespace}
        log.subscribe(self)

    def __call__(self, event: Event) -> None:
        watch = self._watches[event.namespace]
        match event:
            case Seeded():
                watch.num_seeds += 1
                watch.num_again += event.num_seeds > 1
                if watch.last is not None:
                    watch.differing.update(event.identity.differs_from(watch.last))
                watch.last = event.identity
                if watch.num_seeds >= ALARM_SEEDS and not watch.is_raised:
                    self._raise(event.namespace, watch)
            case Replayed() if watch.num_seeds or watch.is_raised:
                self._watches[event.namespace] = _Watch(
                    last=watch.last, num_replays=watch.num_replays + 1
                )
            case Replayed():
                watch.num_replays += 1

    def finish(self) -> None:
        """Raise the alarm of the end: any seeds and no replay ever."""
        for namespace, watch in self._watches.items():
            if watch.num_seeds and not watch.num_replays and not watch.is_raised:
                self._raise(namespace, watch)

    def _raise(self, namespace: Namespace, watch: _Watch) -> None:
        watch.is_raised = True
        differing = None
        if watch.num_again * 2 >= watch.num_seeds:
            cause = "released before it was seen again (policy resident keeps graphs)"
        elif watch.differing:
            differing = watch.differing.most_common(1)[0][0]
            cause = f"the identity differed each time, most often in field {differing!r}"
        else:
            cause = "the identity was not seen again"
        message = f"{watch.num_seeds} {namespace.value} graphs seeded and none replayed: {cause}"
        self._log.emit(
            Alarm(device=self._device, namespace=namespace, message=message, field=differing)
        )

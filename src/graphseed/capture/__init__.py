"""The core of graphseed: identities, entries, the policy. Standard library only.

Owns the contract's states, policies and events. Does not know torch, models or requests.
"""

from graphseed.capture.alarm import SeedWatch
from graphseed.capture.budget import Budget
from graphseed.capture.cache import GraphCache
from graphseed.capture.driver import Arena, Definition, Driver, Executable, Mark, Work
from graphseed.capture.entry import EDGES, Entry, State
from graphseed.capture.errors import (
    CannotCapture,
    Closed,
    DeviceLost,
    GraphseedError,
    IllegalMove,
    LaunchFailed,
    Reason,
    SelectorError,
    WrongThread,
)
from graphseed.capture.events import Cause, Event, EventLog, Why
from graphseed.capture.identity import Bindings, FirstNode, GraphIdentity, Namespace
from graphseed.capture.log import LogLines
from graphseed.capture.selector import Policy, Selection, read_selectors
from graphseed.capture.tally import Counts, Tally

__all__ = [
    "EDGES", "Arena", "Bindings", "Budget", "CannotCapture", "Cause", "Closed", "Counts",
    "Definition", "DeviceLost", "Driver", "Entry", "Event", "EventLog", "Executable", "FirstNode",
    "GraphCache", "GraphIdentity", "GraphseedError", "IllegalMove", "LaunchFailed", "LogLines",
    "Mark",
    "Namespace", "Policy", "Reason", "SeedWatch", "Selection", "SelectorError", "State", "Tally",
    "Why", "Work", "WrongThread", "read_selectors",
]  # fmt: skip

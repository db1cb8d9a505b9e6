"""What makes two graphs the same, and what a recording baked in.

Owns GraphIdentity (structure: the key) and Bindings (addresses: never the key). Does not know how
a graph is captured, nor what the values of a structure mean to the step that declares them.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

# Values that may stand in a structure: plain, hashable, comparable by value.
Plain = bool | int | float | str | None | tuple[object, ...]

_PLAIN_TYPES: Final = (bool, int, float, str, type(None))


class Namespace(Enum):
    """Which graphs an identity belongs with. Each has its own entries, memory and budget (I4)."""

    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class FirstNode:
    """The operation a step says it begins with; capture checks it against the recording."""

    operation: str  # e.g. "aten.embedding"
    shape: tuple[int, ...]  # of its output
    dtype: str  # of its output, e.g. "bfloat16"

    def __str__(self) -> str:
        return f"{self.operation}{list(self.shape)}:{self.dtype}"


@dataclass(frozen=True)
class GraphIdentity:
    """Namespace + device + first node + structure; never an address (I6).

    `structure` holds every plain value that reaches a kernel, as (name, value) pairs. The pair
    named "batch" is the number of sequences of a decode graph (the release rule I5 reads it).
    Raises TypeError for a value that is not plain.
    """

    namespace: Namespace
    device: str
    first_node: FirstNode
    structure: tuple[tuple[str, Plain], ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self.structure:
            _require_plain(name, value)
        key = (self.namespace, self.device, self.first_node, self.structure)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    def get(self, name: str) -> Plain:
        """Value of one structure field, or None when the structure does not have it."""
        return next((value for field_name, value in self.structure if field_name == name), None)

    def differs_from(self, other: "GraphIdentity") -> tuple[str, ...]:
        """Names of the fields that differ, in order; empty when the two are equal."""
        fixed = ("namespace", "device", "first_node")
        names = [name for name in fixed if getattr(self, name) != getattr(other, name)]
        mine, theirs = dict(self.structure), dict(other.structure)
        every = list(mine) + [name for name in theirs if name not in mine]
        missing = object()
        names += [n for n in every if mine.get(n, missing) != theirs.get(n, missing)]
        return tuple(names)

    def __str__(self) -> str:
        pairs = " ".join(f"{name}={value}" for name, value in self.structure)
        return f"{self.namespace.value} first={self.first_node} {pairs}"


@dataclass(frozen=True, slots=True)
class Bindings:
    """The addresses that recordings of one generation baked in, by name (I7)."""

    addresses: tuple[tuple[str, int], ...] = ()

    def stale(self, current: "Bindings") -> tuple[str, ...]:
        """Names bound here whose address is another, or gone, in `current`, and names new there."""
        mine, theirs = dict(self.addresses), dict(current.addresses)
        every = list(mine) + [name for name in theirs if name not in mine]
        return tuple(name for name in every if mine.get(name) != theirs.get(name))


def _require_plain(name: str, value: object) -> None:
    if isinstance(value, tuple):
        for item in value:
            _require_plain(name, item)
    elif not isinstance(value, _PLAIN_TYPES):
        raise TypeError(
            f"structure field {name!r} is a {type(value).__name__}; an identity holds plain "
            "values only (bool, int, float, str, None, tuples of these)"
        )

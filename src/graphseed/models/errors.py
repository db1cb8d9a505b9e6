"""Errors of model loading.

GraphseedError
`-- ModelError            a model cannot be made ready
    |-- ModelNotFound     no source has the name; lists what was tried and why each failed
    `-- ModelUnsupported  found, but graphseed cannot run it rightly, and why
"""

from collections.abc import Sequence

from graphseed.capture.errors import GraphseedError


class ModelError(GraphseedError):
    """A model could not be made ready; the message says what to do."""


class ModelNotFound(ModelError):
    """No source knows the name."""

    def __init__(self, name: str, tried: Sequence[tuple[str, str]]) -> None:
        lines = [f"model {name!r} was not found. Tried:"]
        lines += [f"  - {what}: {why}" for what, why in tried]
        super().__init__("\n".join(lines))
        self.name = name
        self.tried = tuple(tried)


class ModelUnsupported(ModelError):
    """The model was found but would not run rightly."""

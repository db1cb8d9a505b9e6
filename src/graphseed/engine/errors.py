"""Errors of the engine.

GraphseedError
|-- RequestError            this request cannot run; the engine and other requests go on
|   |-- EmptyPrompt
|   |-- PromptTooLong
|   |-- BadToken            a token id that is no whole number, or not one of the model's
|   |-- BadParameter        a sampling or engine parameter is out of its range
|   |-- ModelCannot         the model has not the head for it
|   |-- QueueFull           as many requests wait for a slot as may
|   `-- NothingAllowed      bias and grammar leave no token to choose
|-- DeviceMemoryError       the device has too little memory; names what was asked and is free
|-- EngineBusy              not while an answer is being streamed
`-- NotFinite               the model's logits are no numbers
"""

from graphseed.capture.errors import GraphseedError
from graphseed.models.heads import ModelKind


class RequestError(GraphseedError, ValueError):
    """The request cannot run as it is; nothing else is affected."""


class EmptyPrompt(RequestError):
    """The prompt has no token."""

    def __init__(self) -> None:
        super().__init__("the prompt is empty (0 tokens); expected at least 1 token")


class PromptTooLong(RequestError):
    """The prompt does not leave room for one new token in the context."""

    def __init__(self, num_tokens: int, context_len: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens and the context holds {context_len}, of which the "
            f"answer needs at least 1; shorten the prompt to {context_len - 1} tokens or raise the "
            "context size (-c)"
        )
        self.num_tokens = num_tokens
        self.context_len = context_len


class BadToken(RequestError):
    """A token id that the model does not have."""

    def __init__(self, position: int, token: object, vocab_size: int | None = None) -> None:
        if vocab_size is None:
            kind = type(token).__name__
            message = f"token {token!r} at position {position} is a {kind}; expected a whole number"
        else:
            message = (
                f"token id {token} at position {position} is out of range; the model has ids 0 to "
                f"{vocab_size - 1}"
            )
        super().__init__(message)


class BadParameter(RequestError):
    """A parameter is outside its range."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(f"{name} is {value!r}; expected {expected}")


class ModelCannot(RequestError):
    """The model has no head for what is asked; another kind of model has."""

    def __init__(self, name: str, kind: ModelKind) -> None:
        if kind is ModelKind.CAUSAL:
            lacks = "cannot rerank: it has no classification head; take a reranker"
        else:
            lacks = "cannot generate: it has no head for a next token; take a causal model"
        super().__init__(f"{name} is a {kind.value} and {lacks}")


class QueueFull(RequestError):
    """As many requests wait for a slot as may; nothing is wrong with this one."""

    def __init__(self, num_waiting: int, max_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} requests wait for a slot and at most {max_waiting} may; send the "
            "request again when others have ended"
        )
        self.num_waiting = num_waiting
        self.max_waiting = max_waiting


class EngineBusy(GraphseedError, RuntimeError):
    """The engine's memory cannot change under answers that are being streamed."""


class NotFinite(GraphseedError, ArithmeticError):
    """The model computed no usable logits."""

    def __init__(self, position: int, value: float) -> None:
        super().__init__(
            f"the best logit after position {position} is {value}; expected a finite number. The "
            "weights or the dtype are unfit (try --dtype fp32)"
        )


class NothingAllowed(RequestError):
    """Biases and grammar together forbid every token."""

    def __init__(self, position: int) -> None:
        super().__init__(
            f"no token may follow position {position}: the request's logit_bias and grammar forbid "
            "every token; allow at least one"
        )


class DeviceMemoryError(GraphseedError, MemoryError):
    """The device could not hold what was asked of it."""

    def __init__(self, what: str, num_bytes: int | None, free_bytes: int, advice: str) -> None:
        asked = f" needs {num_bytes / 2**20:,.0f} MiB" if num_bytes is not None else " ran out"
        super().__init__(
            f"out of device memory: {what}{asked}, {free_bytes / 2**20:,.0f} MiB are free; {advice}"
        )

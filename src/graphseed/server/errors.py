"""What a client is told when something is wrong: llama-server's error objects.

ApiError
|-- InvalidRequest       400 invalid_request_error
|   `-- TooManyTokens    400 exceed_context_size_error, with n_prompt_tokens and n_ctx
|-- NotAuthenticated     401 authentication_error
|-- NotPermitted         403 permission_error
|-- NotFound             404 not_found_error
|-- NotSupported         501 not_supported_error: what this model or this server cannot do
|-- Unavailable          503 unavailable_error: loading, queue full (with Retry-After)
`-- Failed               500 server_error

Owns the hierarchy and `of_exception`, the one place where the engine's errors become these. Does
not know HTTP frameworks.
"""

from typing import Any, ClassVar

from graphseed.capture.errors import Closed, DeviceLost
from graphseed.engine import (
    Cancelled,
    DeadlineExceeded,
    DeviceMemoryError,
    ModelCannot,
    PromptTooLong,
    QueueFull,
    RequestError,
)


class ApiError(Exception):
    """An answer that is an error object."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message)
        self.message = message
        self.more = more  # further fields of the error object

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        error = {"code": self.status, "message": self.message, "type": self.kind, **self.more}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer besides the usual ones."""
        return {}


class InvalidRequest(ApiError):
    """The request cannot be understood or carried out as it is."""

    status = 400
    kind = "invalid_request_error"


class TooManyTokens(InvalidRequest):
    """The prompt does not fit into the context."""

    kind = "exceed_context_size_error"

    def __init__(self, num_tokens: int, context_len: int) -> None:
        super().__init__(
            f"request ({num_tokens} tokens) exceeds the available context size ({context_len} "
            "tokens), try increasing it",
            n_prompt_tokens=num_tokens, n_ctx=context_len,
        )  # fmt: skip


class NotAuthenticated(ApiError):
    """No key, or a wrong one."""

    status = 401
    kind = "authentication_error"


class NotPermitted(ApiError):
    """Not with this server's settings."""

    status = 403
    kind = "permission_error"


class NotFound(ApiError):
    """Nothing is there."""

    status = 404
    kind = "not_found_error"


class NotSupported(ApiError):
    """This model or this server cannot do it."""

    status = 501
    kind = "not_supported_error"


class Unavailable(ApiError):
    """Not now."""

    status = 503
    kind = "unavailable_error"

    def __init__(self, message: str, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self._retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        if self._retry_after_seconds is None:
            return {}
        return {"Retry-After": str(self._retry_after_seconds)}


class Failed(ApiError):
    """It went wrong here."""


def of_exception(error: BaseException) -> ApiError:
    """The error object for what the engine raised. Never shows a traceback or an unknown text."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return TooManyTokens(error.num_tokens, error.context_len)
        case ModelCannot():
            return NotSupported(str(error))
        case QueueFull():
            return Unavailable(str(error), retry_after_seconds=1)
        case Closed() | Cancelled():
            return Unavailable("the server is shutting down")
        case DeviceLost():
            return Unavailable("the device was lost; the server must be started again")
        case DeadlineExceeded():
            return Unavailable(str(error))
        case DeviceMemoryError():
            return Failed(str(error))
        case RequestError():
            return InvalidRequest(str(error))
        case _:
            return Failed("internal error; the server's log has the details")

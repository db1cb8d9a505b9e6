"""What torch and CUDA say when a capture fails, as one of our reasons.

Owns the mapping from messages to Reason. Does not know graphs or arenas.
"""

from typing import Final

import torch

from graphseed.capture.errors import CannotCapture, Reason

# What torch says, in order of precedence; the first that occurs in the message decides.
_REASONS: Final = (
    ("out of memory", Reason.OUT_OF_MEMORY),
    ("ALLOC_FAILED", Reason.OUT_OF_MEMORY),
    ("NOT_INITIALIZED", Reason.NOT_INITIALISED),
    ("CUDNN_STATUS", Reason.NOT_INITIALISED),
    ("Cannot copy between CPU and CUDA tensors", Reason.HOST_MEMORY),
    ("Offset increment outside graph capture", Reason.RANDOM),
    ("registered with the CUDA graph", Reason.RANDOM),
    ("during capture to the graph", Reason.RANDOM),
    ("previous error during capture", Reason.INTERFERENCE),
    ("StreamCaptureInvalidated", Reason.INTERFERENCE),
    ("when stream is capturing", Reason.HOST_SYNC),
    ("StreamCapture", Reason.HOST_SYNC),
)


def refusal_of(raised: BaseException | None, end_error: RuntimeError | None) -> CannotCapture:
    """The refusal of a capture whose step raised, whose end failed, or both."""
    if isinstance(raised, torch.OutOfMemoryError):
        return CannotCapture(Reason.OUT_OF_MEMORY, first_line(raised))
    # The step's own error says most, where it is one of these. Where it is not, and the end says
    # that the capture had been invalidated, it is a consequence: a library call fails in many ways
    # once another thread has waited for the whole device.
    for error in (raised, end_error):
        for needle, reason in _REASONS:
            if error is not None and needle in str(error):
                return CannotCapture(reason, first_line(raised or end_error))
    reason = Reason.INTERFERENCE if raised is None else Reason.WORK_RAISED
    error = raised or end_error
    return CannotCapture(reason, f"{type(error).__name__}: {first_line(error)}")


def lost_message(error: BaseException) -> str:
    """What to tell a user whose CUDA context is poisoned."""
    return (
        f"the CUDA context is lost ({first_line(error)}); nothing more can run in this process: "
        "start it again"
    )


def first_line(error: BaseException | None) -> str:
    """The first line of a message; torch writes pages of advice behind it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__

"""Errors of the drivers.

GraphseedError
`-- UnknownDevice    no driver has a device of that name
"""

from graphseed.capture.errors import GraphseedError


class UnknownDevice(GraphseedError, ValueError):
    """The device does not exist here; the message names those that do."""

    def __init__(self, name: str, num_cuda: int, cuda_version: str | None) -> None:
        here = ["cpu"] + [f"cuda:{index}" for index in range(num_cuda)]
        message = f"device {name!r} is not on this machine; expected auto or one of {here}"
        if name.startswith("cuda") and num_cuda == 0:
            why = "no CUDA device is visible" if cuda_version else "this torch has no CUDA support"
            message += f" ({why})"
        super().__init__(message)

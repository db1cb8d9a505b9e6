"""Drivers: one device each behind the Driver protocol of the core.

Owns the choice of a driver by device name. Does not know models or requests.
"""

from graphseed.capture.driver import Driver
from graphseed.drivers.errors import UnknownDevice

__all__ = ["UnknownDevice", "open_driver"]


def open_driver(name: str = "auto") -> Driver:
    """Open the driver of a device: "auto" (CUDA when there is one), "cpu", "cuda", "cuda:N".

    Raises UnknownDevice, which names what this machine has.
    """
    import torch

    count = torch.accelerator.device_count() if torch.version.cuda else 0
    kind, _, number = name.partition(":")
    if kind == "auto" and not number:
        kind = "cuda" if count else "cpu"
    if kind == "cpu" and not number:
        from graphseed.drivers.host import HostDriver

        return HostDriver()
    if kind == "cuda" and (not number or number.isdigit()) and int(number or 0) < count:
        from graphseed.drivers.cuda import CudaDriver

        return CudaDriver(int(number or 0))
    raise UnknownDevice(name, count, torch.version.cuda)

"""Time on the device's clock. Owns one function; does not know what is timed."""

from collections.abc import Callable

from graphseed.capture.driver import Driver


def laps_ms(driver: Driver, *works: Callable[[], object]) -> tuple[float, ...]:
    """Milliseconds of each of several pieces of work that are submitted one after another.

    From an idle device to the end of what was submitted; the host's submission is in it, as it is
    in a user's wall clock. The device is idle afterwards.
    """
    driver.synchronize()
    marks = [driver.mark(timed=True)]
    for work in works:
        work()
        marks.append(driver.mark(timed=True))
    marks[-1].wait()
    return tuple(after.ms_since(before) for before, after in zip(marks, marks[1:], strict=False))

"""What a slow start shows while it works: named phases, a bar on stderr, a line in the log.

Owns the display and the silence of the libraries below while they load. Does not know what the
phases do. Nothing is drawn before the first phase begins, so a start that has nothing to do is
silent.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_log = logging.getLogger(__name__)


class Phases:
    """Named phases, one after the other. Owned by the caller of `phase`; used by one thread."""

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted

    @property
    def is_drawn(self) -> bool:
        """Whether there is someone to draw for; a file or a pipe has the lines of the log."""
        return self._is_wanted and sys.stderr.isatty()

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Show `what` and the time it takes until the block ends; keep the line when it is done."""
        _log.info("%s", what)
        if not self.is_drawn:
            yield
            return
        columns = (
            SpinnerColumn(finished_text="+"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
        )
        console = Console(file=sys.stderr)  # bound now: what runs may redirect sys.stderr
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=None)  # how long it takes is not known: it pulses
            yield
            progress.update(task, total=1, completed=1)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the loading bars and notes of transformers; what matters in them we check ourselves.

    Both settings are the library's own, for the whole process; they are put back at the end.
    """
    from transformers.utils import logging as library

    verbosity = library.get_verbosity()
    had_bars = library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if had_bars:
            library.enable_progress_bar()

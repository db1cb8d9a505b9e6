"""A `graphseed serve` process for as long as a benchmark needs it.

Owns the process and its log: it is there once it answers, and gone afterwards. Does not know what
is asked of it.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

READY: Final = "the model is loaded: ready"
ADDRESS: Final = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
END_SECONDS: Final = 30.0  # that it has to end by itself
POLL_SECONDS: Final = 0.05


class ServerFailed(Exception):
    """The server did not come up, or did not end as it should."""


@contextmanager
def serving(flags: Sequence[str], log: Path, *, start_seconds: float) -> Iterator[int]:
    """Run `graphseed serve` with these flags on a free loopback port: the port, once it answers.

    What it says goes to `log`. Raises ServerFailed with the log's last lines.
    """
    command = [sys.executable, "-m", "graphseed.cli.main", "serve", "--port", "0", *flags]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield _port(process, log, time.monotonic() + start_seconds)
            process.terminate()
            code = process.wait(END_SECONDS)
        finally:
            process.kill()  # nothing to do where it has ended
    if code != 0:
        raise ServerFailed(f"the server ended with {code}: {_end_of(log)}")


def _port(process: "subprocess.Popen[bytes]", log: Path, until: float) -> int:
    while time.monotonic() < until:
        said = log.read_text(encoding="utf-8", errors="replace")
        found = ADDRESS.search(said)
        if found is not None and READY in said:
            return int(found[1])
        if process.poll() is not None:
            raise ServerFailed(f"the server did not come up: {_end_of(log)}")
        time.sleep(POLL_SECONDS)
    raise ServerFailed(f"the server was not ready in time: {_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return "\n".join([line for line in lines if line.strip()][-5:]) or "it said nothing"

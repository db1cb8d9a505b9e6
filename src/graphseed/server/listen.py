"""Sockets, uvicorn and signals: how a server begins and ends.

Owns the addresses that are listened on and the order of the end: new requests are refused, running
answers may end, then the engine is closed and the connections are. Does not know endpoints.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import uvicorn
from starlette.types import ASGIApp

from graphseed.capture.errors import GraphseedError
from graphseed.server.connection import Connection
from graphseed.server.lifecycle import Lifecycle

BACKLOG: Final = 1024
CONNECTIONS_SECONDS: Final = 2  # that connections have to close once nothing is answered any more
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger("graphseed.server")


class CannotListen(GraphseedError):
    """An address is not this machine's, or is taken."""


class EngineFailed(GraphseedError):
    """A fault of ours ended the engine; the log has its traceback."""


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """How a server listens and ends."""

    drain_seconds: float = 3.0  # that running answers have to end
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None


def bind(hosts: Sequence[str], port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Take the addresses: IP addresses or names at one port (0: any), or paths that end in .sock.

    Raises CannotListen, and then nothing is taken.
    """
    bound: list[socket.socket] = []
    num_tcp = sum(not host.endswith(".sock") for host in hosts)
    if port == 0 and num_tcp > 1:
        raise CannotListen("--port 0 goes with one address only; name the port, or one --host")
    try:
        for host in hosts:
            bound.append(_bind_one(host, port, reuse_port, num_tcp > 1))
    except OSError as error:
        for taken in bound:
            taken.close()
        raise CannotListen(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another "
            "--host or --port"
        ) from None
    return bound


def address_of(bound: socket.socket, scheme: str = "http") -> str:
    """Where a client finds it."""
    if bound.family == socket.AF_UNIX:
        return f"unix://{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def serve(
    app: ASGIApp,
    lifecycle: Lifecycle,
    sockets: list[socket.socket],
    options: ListenOptions | None = None,
) -> bool:
    """Listen, load the model, answer, and end at SIGTERM or SIGINT; at a second one at once.

    Takes the sockets over. Returns whether a load was cut off: its thread cannot be ended and runs
    on. Raises what kept the model from being loaded, and what ended the engine (see lifecycle).
    Main thread only.
    """
    options = options or ListenOptions()
    server = _Server(_config(app, options))
    paths = [Path(bound.getsockname()) for bound in sockets if bound.family == socket.AF_UNIX]
    stop = asyncio.Event()
    with _signals(stop):
        serving = asyncio.create_task(server.serve(sockets))
        stopping = asyncio.create_task(stop.wait())
        loading = asyncio.create_task(_load(lifecycle))
        idling = asyncio.create_task(_sleep_when_idle(lifecycle))
        failing = asyncio.create_task(lifecycle.until_failed())
        tasks: set[asyncio.Task[Any]] = {serving, stopping, loading, idling, failing}
        try:
            scheme = "http" if options.ssl_cert_file is None else "https"
            for bound in sockets:
                logger.info("listening on %s", address_of(bound, scheme))
            await _until_end(loading, serving, stopping, failing)
            if failing.done():
                await _give_up(lifecycle, options, failing.result())
            if stop.is_set():
                logger.info("shutting down: %d answers are running", lifecycle.ledger.num_open)
                await _drain(lifecycle, options)
            is_cut_off = lifecycle.is_loading
            if not is_cut_off:
                await lifecycle.close()
            return is_cut_off
        finally:
            server.should_exit = True
            idling.cancel()
            stopping.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for bound in sockets:
                bound.close()
            for path in paths:
                path.unlink(missing_ok=True)


async def _until_end(
    loading: asyncio.Task[None],
    serving: asyncio.Task[None],
    stopping: asyncio.Task[bool],
    failing: asyncio.Task[Exception],
) -> None:
    """Wait until it is to end, or the model cannot be loaded: raises why."""
    ends: set[asyncio.Task[Any]] = {serving, stopping, failing}
    await asyncio.wait({loading, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()


async def _give_up(lifecycle: Lifecycle, options: ListenOptions, failure: Exception) -> NoReturn:
    """Let clients read how their requests ended, and raise why nothing runs any more."""
    is_known = isinstance(failure, GraphseedError)
    told = None if is_known else failure
    logger.error("the engine has ended, and so does the server: %s", failure, exc_info=told)
    await _drain(lifecycle, options)
    raise failure if is_known else EngineFailed(f"the engine has ended: {failure!r}")


async def _drain(lifecycle: Lifecycle, options: ListenOptions) -> None:
    if not await lifecycle.drain(options.drain_seconds):
        logger.warning(
            "%d answers did not end within %g s and are cut off",
            lifecycle.ledger.num_open, options.drain_seconds,
        )  # fmt: skip


async def _load(lifecycle: Lifecycle) -> None:
    if lifecycle.state.served is None:
        await lifecycle.load()
    logger.info("the model is loaded: ready")


async def _sleep_when_idle(lifecycle: Lifecycle) -> None:
    if lifecycle.state.settings.sleep_idle_seconds > 0:
        await lifecycle.sleep_when_idle()


def _config(app: ASGIApp, options: ListenOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=Connection, log_config=None, access_log=False, lifespan="off", ws="none",
        server_header=False,
        headers=[("Server", "graphseed")], backlog=BACKLOG, proxy_headers=False,
        timeout_graceful_shutdown=CONNECTIONS_SECONDS,
        ssl_keyfile=options.ssl_key_file, ssl_certfile=options.ssl_cert_file,
    )  # fmt: skip


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: answers end before connections do."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("ended at once by a second %s", number.name)
            os._exit(128 + number)
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _bind_one(host: str, port: int, reuse_port: bool, is_one_of_many: bool) -> socket.socket:
    if host.endswith(".sock"):
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: str | tuple[Any, ...] = host
    else:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6 and is_one_of_many:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound

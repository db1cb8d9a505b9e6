"""`graphseed serve`: the server that a llama-server or OpenAI user knows, over one model.

Owns the composition: flags into settings, a model, an application, and the run until it is ended.
Endpoints are the server's, flags are flags's, loading is model's.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

import graphseed
from graphseed.capture import DeviceLost, GraphseedError, Selection, read_selectors
from graphseed.cli.run import announce
from graphseed.cli.serve import flags
from graphseed.cli.serve.flags import BadUsage, ServeArgs

SUMMARY: Final = "Serve a model over HTTP, as llama-server and OpenAI's API do."
WRONG_USAGE: Final = 2  # exit code
_NEEDED: Final = ("fastapi", "httptools", "msgspec", "uvicorn")

logger = logging.getLogger("graphseed.server")


class MissingExtra(GraphseedError):
    """Packages of the server are not installed."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command, and the way in which llama-server reads them."""
    flags.add_flags(parser)
    by_argparse = parser.parse_known_args

    # argparse takes values for flags that are words to llama-server, and has other errors.
    def parse_known_args(
        argv: list[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if flags.wants_help(argv):
            parser.print_help()
            parser.exit()
        try:
            args = flags.parse(argv, os.environ)
        except BadUsage as error:
            parser.exit(WRONG_USAGE, f"error: {error}\n")
        found, _ = by_argparse([], namespace)
        found.serve = args
        found.verbose = args.is_verbose or args.verbosity >= 4
        found.quiet = not found.verbose and args.verbosity <= 2
        return found, []

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def execute(parsed: argparse.Namespace) -> int:
    """Run the command until it is ended. Raises GraphseedError."""
    args: ServeArgs = parsed.serve
    if args.tells_version:
        print(f"graphseed {graphseed.__version__}")
        return 0
    if args.lists_devices:
        _list_devices()
        return 0
    from graphseed.cli.serve.log import configured

    with configured(args):
        return _serve(args)


def _serve(args: ServeArgs) -> int:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"graphseed serve needs {', '.join(missing)}; pip install 'graphseed[serve]'"
        )
    for note in args.notes:
        logger.warning("%s", note)
    selection = read_selectors(os.environ, args.prompt_graphs)
    announce(selection)
    # Until the event loop takes the signal over: what is imported before that takes seconds.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            is_cut_off = runner.run(_run(args, selection))
    except DeviceLost as error:
        # What is on the device cannot be given back: destroying it may fail, or hang.
        print(f"error: {error}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_cut_off:
        # A thread that loads a model cannot be ended: the interpreter would fall over it.
        logging.shutdown()
        os._exit(0)
    return 0


async def _run(args: ServeArgs, selection: Selection) -> bool:
    """Serve until it is ended; whether a load was cut off. Everything is checked before it."""
    from graphseed.cli.serve.model import ServeModel
    from graphseed.cli.serve.settings import listen_options, planned_config, server_settings
    from graphseed.server.app import create_app
    from graphseed.server.ledger import Ledger
    from graphseed.server.lifecycle import Lifecycle
    from graphseed.server.listen import bind, serve
    from graphseed.server.state import ServerState

    settings, options = server_settings(args), listen_options(args)
    planned_config(args)
    ledger = Ledger()
    model = ServeModel(args, selection, ledger)
    state = ServerState(settings, selection, _build(), model.name)
    lifecycle = Lifecycle(
        state, model.load, close=model.close, release=model.release, ledger=ledger
    )
    app = create_app(state, lifecycle, prefix=args.api_prefix)
    sockets = bind(settings.host.split(","), settings.port, reuse_port=args.reuses_port)
    if not settings.cors_origins and not settings.api_keys:
        logger.warning(
            "no API key is asked for, and pages of any origin may use the server: --api-key and "
            "--cors-origins change that"
        )
    return await serve(app, lifecycle, sockets, options)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one: a first token is a fifth of a millisecond sooner."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _build() -> str:
    return f"b{graphseed.__version__}-graphseed"  # clients of llama-server expect a b


def _list_devices() -> None:
    import torch

    from graphseed.drivers import open_driver

    print("Available devices:")
    count = torch.accelerator.device_count() if torch.version.cuda else 0
    for number in range(count):
        driver = open_driver(f"cuda:{number}")
        free_mib = driver.free_bytes() >> 20
        print(f"  CUDA{number}: {driver.description} ({free_mib} MiB free)")
    if not count:
        print("  (none)")

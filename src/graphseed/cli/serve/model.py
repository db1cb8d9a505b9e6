"""The model of `graphseed serve`: how it is made ready, ended, and given back.

Owns ServeModel, whose methods run on the lifecycle's threads. Does not know HTTP.
"""

import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from graphseed.capture import LogLines, Selection
from graphseed.cli.serve.flags import ServeArgs
from graphseed.cli.serve.settings import device_of, engine_config, model_of
from graphseed.engine import BadParameter, EngineCore
from graphseed.server.ledger import Ledger, WatchedEngine
from graphseed.server.state import Served

if TYPE_CHECKING:
    from graphseed.engine.record import PlanRecorder

logger = logging.getLogger("graphseed.server")


class ServeModel:
    """Loads the model that the flags name, as often as it is asked to. Owns nothing but the way."""

    def __init__(self, args: ServeArgs, selection: Selection, ledger: Ledger) -> None:
        """Check what can be without loading. Raises BadParameter."""
        self.name = model_of(args)
        self._args, self._selection, self._ledger = args, selection, ledger
        self._device = device_of(args)
        self._recorder: PlanRecorder | None = None
        if args.hf_token:
            os.environ["HF_TOKEN"] = args.hf_token  # read by huggingface_hub when it is imported

    def load(self) -> Served:
        """Make it ready to answer. Raises GraphseedError."""
        import torch

        from graphseed.drivers import open_driver
        from graphseed.models.load import load_model

        args = self._args
        if args.threads > 0:
            torch.set_num_threads(args.threads)
        driver = open_driver(self._device)
        model = load_model(
            self._fetched(),
            device=driver.device,
            dtype=args.dtype,
            bf16_is_fast=driver.computes_bf16_fast,
            offline=args.is_offline or None,
            takes_rerankers=True,
        )
        core = EngineCore(model, driver, engine_config(args, model, driver), self._selection)
        core.log.subscribe(LogLines())
        self._record(core)
        engine = WatchedEngine(core, self._ledger)
        logger.info(
            "%s on %s: %d slots of %d tokens", model.name, driver.description,
            core.config.num_parallel, core.config.context_len,
        )  # fmt: skip
        return Served(engine, model)

    def close(self, served: Served) -> None:
        """Say how graphs did, and end the engine."""
        core = served.engine.core
        if served.engine.ended is not None:  # by itself: nothing can be asked of it any more
            served.engine.close()
            return
        lines, no_effect = served.engine.call(core.finish)
        for line in lines:
            logger.info("%s", line)
        if no_effect is not None:
            logger.warning("%s", no_effect)
        if self._recorder is not None:
            served.engine.call(self._recorder.close)
            self._recorder = None
        served.engine.close()

    def release(self) -> None:
        """Give memory back that nothing refers to any more."""
        import torch

        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _fetched(self) -> str:
        """The name of what is to be loaded; a single file of a repository is fetched first."""
        args = self._args
        if not args.hf_file or args.model:
            return self.name
        from huggingface_hub import hf_hub_download

        repo = args.hf_repo.partition(":")[0]
        try:
            return hf_hub_download(repo, args.hf_file, local_files_only=args.is_offline)
        except Exception as error:  # the hub's, httpx's, the system's: all end up as a reason
            told = str(error).strip().splitlines() or [type(error).__name__]
            expected = f"a file of {repo} ({told[0]})"
            raise BadParameter("--hf-file", args.hf_file, expected) from error

    def _record(self, core: EngineCore) -> None:
        if not self._args.record_plans:
            return
        from graphseed.engine.record import PlanRecorder

        path = Path(self._args.record_plans)
        try:
            self._recorder = PlanRecorder(path, core)
        except OSError as error:
            expected = f"a file to write ({error})"
            raise BadParameter("--record-plans", str(path), expected) from None
        core.observer = self._recorder

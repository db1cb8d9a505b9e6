"""The Hugging Face hub as a source: a repository id in, a folder on this machine out.

Owns the questions to the hub and their time limits. Files are kept where huggingface_hub keeps
them, so a repository that another program fetched is found. Does not know what is in a model.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from graphseed.models.errors import ModelError

_ASK_TIMEOUT_S: Final = 5.0  # the first question only: an unreachable hub must fail in seconds
_SMALL_FILES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")

_log = logging.getLogger(__name__)


def fetch_from_hub(repo_id: str, offline: bool | None, show_bars: bool) -> Path:
    """Fetch what a model needs of a repository; returns the folder.

    Asks the hub first and falls back to files fetched earlier. `offline` None takes the choice of
    HF_HUB_OFFLINE. Raises ModelError with the reason when there is nothing to be had.
    """
    from huggingface_hub import constants, snapshot_download

    if offline or (offline is None and constants.is_offline_mode()):
        unreachable = "offline was asked for"
    else:
        try:
            files = _files_to_fetch(_ask_for_files(repo_id))
            _log.info("fetching %s from the Hugging Face hub", repo_id)
            with _bars(show_bars):
                return Path(snapshot_download(repo_id, allow_patterns=files))
        except ModelError:
            raise
        except Exception as error:  # httpx's, the hub's, the system's: all end up as a reason
            unreachable = _in_one_line(error)
    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
    except Exception as error:
        reason = f"{unreachable}, and no copy was fetched earlier ({type(error).__name__})"
        raise ModelError(reason) from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"{unreachable}, and the copy fetched earlier has no config.json")
    return folder


def _ask_for_files(repo_id: str) -> list[str]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo_id, timeout=_ASK_TIMEOUT_S)
    return [file.rfilename for file in info.siblings or ()]


def _files_to_fetch(files: Sequence[str]) -> list[str]:
    """Configuration, tokenizer, and the weights in one format only; nothing of subfolders."""
    top = [name for name in files if "/" not in name]
    if "config.json" not in top:
        ggufs = [name for name in files if name.endswith(".gguf")]
        hint = "; fetch one of its GGUF files and give its path" if ggufs else ""
        raise ModelError(f"the repository has no config.json{hint}")
    small = [name for name in top if name.endswith(_SMALL_FILES)]
    for ending in (".safetensors", ".bin"):
        weights = [name for name in top if name.endswith(ending)]
        # The same weights once more, in a layout that transformers does not read.
        weights = [name for name in weights if not name.startswith("consolidated")]
        if weights:
            return small + weights
    raise ModelError("the repository has neither safetensors nor PyTorch weights")


@contextmanager
def _bars(are_shown: bool) -> Iterator[None]:
    """Let the hub's own download bars show or not, and put its setting back."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""A Hugging Face folder into memory: weights and tokenizer.

Owns the calls to transformers and what their failures mean. Code that comes with a model is never
run. Does not know how the folder came to be.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from graphseed.models.errors import ModelError, ModelUnsupported
from graphseed.models.experts import PROBE_EXPERTS
from graphseed.models.heads import auto_class, kind_of_folder
from graphseed.models.phases import quiet_transformers
from graphseed.models.random_weights import is_out_of_memory, out_of_memory


def load_folder(
    folder: Path, attention: str, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Load a causal model or a reranker, and its tokenizer; returns (module, tokenizer).

    Raises ModelUnsupported for a kind of model that transformers or graphseed does not run, and
    ModelError for a folder that is broken or weights that do not fit.
    """
    with quiet_transformers():
        tokenizer = _load_tokenizer(folder)
        module = _load_weights(folder, attention, dtype)
    num_bytes = sum(weight.nbytes for weight in module.parameters())
    try:
        return module.to(device), tokenizer
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(num_bytes, device, dtype) from error


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ModelError(
            f"{folder} has no tokenizer that transformers can load ({_first_line(error)}); it "
            "needs a tokenizer.json beside config.json"
        ) from error


def _load_weights(folder: Path, attention: str, dtype: torch.dtype) -> Any:
    import transformers

    where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **where)
        module, info = auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=PROBE_EXPERTS,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, by name
            **where,
        )
    except (OSError, SafetensorError) as error:  # no weights, or a file that is cut short
        raise ModelError(f"{folder} cannot be read: {_first_line(error)}") from error
    except (ValueError, ImportError, KeyError, AttributeError) as error:
        raise ModelUnsupported(
            f"transformers {transformers.__version__} does not load it as a "
            f"{kind_of_folder(folder).value}: {_first_line(error)}"
        ) from error
    require_all_weights(info, str(folder))
    return module


def require_all_weights(info: Any, where: str) -> None:
    """Raise ModelError when the loader had to make weights up: they would be random."""
    mismatched = sorted(f"{name} {list(have)}" for name, have, _ in info["mismatched_keys"])
    lacking = sorted(info["missing_keys"]) + mismatched
    if lacking:
        shown = ", ".join(lacking[:4]) + (", ..." if len(lacking) > 4 else "")
        raise ModelError(
            f"{where} lacks {len(lacking)} weights that its config asks for, or has them in "
            f"another shape: {shown}; the files do not belong together or are incomplete"
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""A GGUF file made into a plain Hugging Face folder.

Owns the check that this can be done rightly, and the conversion: weights dequantised to bf16
safetensors, tokenizer and configs beside them. transformers reads the file; the result loads in a
fraction of a second on any release we support. Does not know where the file came from.
"""

import importlib.util
import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Final

from graphseed.models.errors import ModelUnsupported
from graphseed.models.folder import require_all_weights
from graphseed.models.phases import Phases, quiet_transformers

MIN_TRANSFORMERS: Final = (5, 23)


def check_can_read_gguf(transformers_version: str | None = None) -> None:
    """Raise ModelUnsupported when what is installed cannot read GGUF files, or would do it wrongly.

    Releases before 5.23 build some tokenizers wrongly and in silence: no beginning-of-sequence
    token, other merges, other special tokens. So they are refused, not warned about.
    """
    if transformers_version is None:
        import transformers

        transformers_version = transformers.__version__
    major, minor = (int(part) for part in transformers_version.split(".")[:2])
    if (major, minor) < MIN_TRANSFORMERS:
        raise ModelUnsupported(
            f"GGUF needs transformers >= 5.23 and {transformers_version} is installed: older ones "
            'build some tokenizers wrongly and in silence. Run `pip install "transformers>=5.23"`, '
            "or convert the file on a machine that has it and give the folder it makes"
        )
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnsupported(
            f"reading GGUF files needs {' and '.join(missing)}: run `pip install 'graphseed[gguf]'`"
        )


def convert_gguf(file: Path, folder: Path, phases: Phases) -> Mapping[str, object]:
    """Fill `folder` with the model in `file`; returns what was made of what, for the record.

    Takes the memory of the whole model in bf16. Raises ModelUnsupported for a file that
    transformers cannot read.
    """
    check_can_read_gguf()
    import transformers
    from transformers import AutoTokenizer

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with quiet_transformers():
            with phases.phase(f"reading the tokenizer of {file.name}"):
                tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
                tokenizer.save_pretrained(folder)
            with phases.phase(f"dequantising the weights of {file.name}"):
                read = _read_weights(file)
            with phases.phase("writing the converted model"):
                _plain(read).save_pretrained(folder)
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise ModelUnsupported(
            f"transformers {transformers.__version__} cannot read {file}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {"transformers": transformers.__version__, "dtype": "bfloat16"}


def _read_weights(file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # Its bar for dequantising ignores the setting that silences all others; it would tear ours.
    with redirect_stderr(io.StringIO()):
        module, info = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            local_files_only=True,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    require_all_weights(info, str(file))
    return module


def _plain(read: Any) -> Any:
    """The same model without the mark of quantisation, which would forbid to save it.

    The new module is built without memory and takes over the weights of the other.
    """
    import torch

    fields = read.config.to_dict()
    fields.pop("quantization_config", None)
    config = type(read.config).from_dict(fields)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        plain = type(read)(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    return plain

"""A name into a model that is ready for the engine.

Owns the order of the steps: find, load or draw, freeze, probe, describe. Each step lives in a file
of its own. This is the entry of the package for the layers above.
"""

import copy
from pathlib import Path
from typing import Any, Final

import torch

from graphseed.models.attention import register
from graphseed.models.byte_tokenizer import byte_tokenizer
from graphseed.models.cache import default_cache_dir
from graphseed.models.errors import ModelError, ModelUnsupported
from graphseed.models.experts import PROBE_EXPERTS, choose_experts
from graphseed.models.folder import load_folder
from graphseed.models.heads import ModelKind, is_reranker, kind_of, kind_of_folder
from graphseed.models.model import Model, eos_ids_of, sampling_defaults_of
from graphseed.models.phases import Phases, quiet_transformers
from graphseed.models.presets import preset_config
from graphseed.models.probe import probe_layers
from graphseed.models.random_weights import random_module
from graphseed.models.resolve import RandomPreset, sources_of
from graphseed.models.sources import Fetching, fetch_folder

_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def load_model(
    name: str,
    *,
    device: str,
    dtype: str = "auto",
    bf16_is_fast: bool,
    seed: int = 0,
    progress: bool = True,
    cache_dir: Path | None = None,
    offline: bool | None = None,
    takes_rerankers: bool = False,
) -> Model:
    """Find the model of a name and make it ready on `device`.

    `dtype` auto is bf16 where `bf16_is_fast`, else fp32. `seed` draws the weights of a `random:`
    name and means nothing else. `offline` keeps from the network; None leaves the hub to
    HF_HUB_OFFLINE. A reranker, which generates nothing, is refused before its weights are read
    unless the caller `takes_rerankers`. Raises ModelNotFound, ModelUnsupported, or ModelError for
    what else prevents it.
    """
    where = parse_device(device)
    kind = parse_dtype(dtype, bf16_is_fast)
    sources = sources_of(name)
    phases = Phases(progress)
    if isinstance(sources[0], RandomPreset):
        config = preset_config(sources[0].preset)
        _check_kind(name, kind_of(config.architectures), takes_rerankers)
        with phases.phase(f"drawing the weights of {name}"):
            module, tokenizer = _draw(config, where, kind, seed)
        return _finish(name, f"random, seed {seed}", module, tokenizer, where, kind)
    how = Fetching(cache_dir or default_cache_dir(), offline, phases)
    folder = fetch_folder(name, sources, how)
    _check_kind(name, kind_of_folder(folder), takes_rerankers)
    try:
        with phases.phase(f"loading {name}"):
            module, tokenizer = load_folder(folder, register(), where, kind)
        return _finish(name, str(folder), module, tokenizer, where, kind)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{name} cannot run: {error}") from error


def random_model(config: Any, *, device: str, dtype: str = "fp32", seed: int = 0) -> Model:
    """Make a model of any transformers config with random weights and the byte tokenizer.

    For configs that no preset names: `preset_config` with overrides, or one of your own with a
    vocabulary of 259 or more. `dtype` must be given by name; there is no auto here.
    """
    where, kind = parse_device(device), parse_dtype(dtype, bf16_is_fast=False)
    module, tokenizer = _draw(copy.deepcopy(config), where, kind, seed)
    return _finish(config.model_type, f"random, seed {seed}", module, tokenizer, where, kind)


def parse_dtype(dtype: str, bf16_is_fast: bool) -> torch.dtype:
    """The torch dtype of a name; `auto` by the device. Raises ModelError for another name."""
    if dtype == "auto":
        return torch.bfloat16 if bf16_is_fast else torch.float32
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; take auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def parse_device(device: str) -> torch.device:
    """The torch device of a name. Raises ModelError for a device that is not there."""
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not a device: cpu, cuda or cuda:N") from error
    if parsed.type == "cpu":
        return parsed
    found = torch.accelerator.current_accelerator(check_available=True)
    num_devices = torch.accelerator.device_count()
    if found is None or found.type != parsed.type or (parsed.index or 0) >= num_devices:
        has = f"{num_devices} of type {found.type}" if found else "none"
        raise ModelError(
            f"device {device!r} is not there; accelerators that torch {torch.__version__} finds: "
            f"{has}. Use the cpu, or a torch build for the device"
        )
    return torch.device(parsed.type, parsed.index or 0)


def _check_kind(name: str, kind: ModelKind, takes_rerankers: bool) -> None:
    if kind is ModelKind.RERANKER and not takes_rerankers:
        raise ModelError(
            f"{name} is a reranker: it scores a query with a document and generates no text. "
            "`graphseed serve` answers /rerank with it, and load_model loads it with "
            "takes_rerankers=True; this needs a causal model"
        )


def _draw(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    config._attn_implementation = register()
    config._experts_implementation = PROBE_EXPERTS
    with quiet_transformers():
        module = random_module(config, device, dtype, seed)
        return module, byte_tokenizer(config.get_text_config().vocab_size)


def _finish(
    name: str, source: str, module: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype
) -> Model:
    module.eval()
    module.requires_grad_(False)
    layers = probe_layers(module)
    experts = choose_experts(module, device, dtype)
    if experts is not None:
        module.set_experts_implementation(experts)
    config = module.config.get_text_config()
    context_len = getattr(config, "max_position_embeddings", None)
    if not context_len:
        raise ModelUnsupported("its config gives no max_position_embeddings")
    weights = list(module.parameters())
    return Model(
        name=name,
        source=source,
        module=module,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        vocab_size=config.vocab_size,
        context_len=context_len,
        hidden_size=config.hidden_size,
        eos_ids=eos_ids_of(module, tokenizer),
        sampling=sampling_defaults_of(module),
        layers=layers,
        num_parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        kind=ModelKind.RERANKER if is_reranker(module) else ModelKind.CAUSAL,
    )

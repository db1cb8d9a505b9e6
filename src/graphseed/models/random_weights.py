"""A model with random weights, made where it will run.

Owns the distribution and the seed. Weights are drawn on the device in their final dtype, so no
copy of a large model ever passes through the host, and from a generator of our own, so the
caller's random state is not touched. Equal seed, config, device type and dtype give equal weights:
no parameter is left as the memory was found.
"""

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphseed.models.errors import ModelError, ModelUnsupported
from graphseed.models.heads import auto_class, kind_of

# Layers that keep the scale of their input, small embeddings, and attention that adds a quarter of
# what the other parts add: then what such a model says follows from its context. With the usual
# 0.02 everywhere a tied head repeats the last token for ever, and with full attention the tokens of
# a deep model become one another (SmolLM2's shape then says one word).
_EMBEDDING_STD: Final = 0.02
_ATTENTION_SHARE: Final = 0.25


def random_module(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Build the model of `config` on `device` with weights of `seed`.

    It is a causal model, or a reranker where the config's `architectures` say so. Raises ModelError
    when the device has not the memory, ModelUnsupported when transformers has no such model, or one
    with an attention of its own.
    """
    import transformers
    from transformers.initialization import no_init_weights

    try:
        # Buffers (rotary frequencies, embedding scales) get their values, parameters only memory.
        with device, no_init_weights(), _Untold() as untold:
            module = auto_class(config).from_config(config, dtype=dtype)
        module.tie_weights()
        _draw(module, torch.Generator(device).manual_seed(seed), untold)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        num_bytes = _num_weights(config) * dtype.itemsize
        raise out_of_memory(num_bytes, device, dtype) from error
    except (KeyError, ValueError, ImportError) as error:
        raise ModelUnsupported(
            f"transformers {transformers.__version__} cannot build it as a "
            f"{kind_of(config.architectures).value}: {type(error).__name__}: {error}"
        ) from error
    return module


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says that a device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(num_bytes: int, device: torch.device, dtype: torch.dtype) -> ModelError:
    """The error for weights that do not fit: how much they need and what to do."""
    narrower = " or the dtype bf16, which halves it" if dtype == torch.float32 else ""
    return ModelError(
        f"out of memory on {device}: the weights alone need {num_bytes:,} bytes "
        f"({num_bytes / 2**30:.1f} GiB) in {str(dtype).removeprefix('torch.')}. Free memory on the "
        f"device (another process may hold it), or take a smaller model{narrower}"
    )


class _Untold(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which memory a construction leaves as it was found, or fills from the global state.

    Holds what it noted, so that no address comes back as another tensor's. Used around one
    construction, on one thread.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            if is_random or "empty" in func.__name__:
                self._storages[storage.data_ptr()] = storage
            elif func._schema.is_mutable:
                self._storages.pop(storage.data_ptr(), None)
        return result

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages


@torch.no_grad()
def _draw(module: Any, generator: torch.Generator, untold: _Untold) -> None:
    embedding = module.get_input_embeddings().weight
    for name, weight in module.named_parameters():  # a tied weight comes once
        if name.endswith("bias"):
            weight.zero_()
        elif weight.dim() >= 2:
            std = _EMBEDDING_STD if weight is embedding else weight.shape[-1] ** -0.5
            share = _ATTENTION_SHARE if name.endswith("o_proj.weight") else 1.0
            weight.normal_(0.0, std * share, generator=generator)
        elif weight in untold:  # others keep what their class starts them with
            owner = module.get_submodule(name.rpartition(".")[0])
            weight.fill_(_plain_scale(owner))
    for layer in module.modules():
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma: a norm after o_proj undoes it
            norm = getattr(layer, "post_attention_layernorm", None)
            if (scale := getattr(norm, "weight", None)) is not None:
                scale.sub_(1.0 - _ATTENTION_SHARE)  # from 1, or from 0 where it scales by 1 + w


def _plain_scale(owner: torch.nn.Module) -> float:
    """What makes a vector of `owner` change nothing: 1, or 0 in a norm that scales by 1 + w.

    Norms of that kind start themselves at zero, but for those that are torch's own norm with 1
    added, "LayerNorm1P". What is no scale (the sinks of an attention) may have any value.
    """
    return 0.0 if type(owner).__name__.endswith("1P") else 1.0


def _num_weights(config: Any) -> int:
    with torch.device("meta"):
        module = auto_class(config).from_config(config)
    module.tie_weights()
    return sum(weight.numel() for weight in module.parameters())

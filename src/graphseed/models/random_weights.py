"""A model with random weights, made where it will run.

Owns the distribution and the seed. Weights are drawn on the device in their final dtype, so no
copy of a large model ever passes through the host, and from a generator of our own, so the
caller's random state is not touched. Equal seed, config, device type and dtype give equal weights.
"""

from typing import Any, Final

import torch

from graphseed.models.errors import ModelError, ModelUnsupported

# Layers that keep the scale of their input, small embeddings, and attention that adds a quarter of
# what the other parts add: then what such a model says follows from its context. With the usual
# 0.02 everywhere a tied head repeats the last token for ever, and with full attention the tokens of
# a deep model become one another (SmolLM2's shape then says one word).
_EMBEDDING_STD: Final = 0.02
_ATTENTION_SHARE: Final = 0.25


def random_module(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Build the causal model of `config` on `device` with weights of `seed`.

    Raises ModelError when the device has not the memory, ModelUnsupported when transformers has
    no such causal model, or one with an attention of its own.
    """
    import transformers
    from transformers.initialization import no_init_weights

    try:
        # Buffers (rotary frequencies, embedding scales) get their values, parameters only memory.
        with device, no_init_weights():
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        module.tie_weights()
        _draw(module, torch.Generator(device).manual_seed(seed))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        num_bytes = _num_weights(config) * dtype.itemsize
        raise out_of_memory(num_bytes, device, dtype) from error
    except (KeyError, ValueError, ImportError) as error:
        raise ModelUnsupported(
            f"transformers {transformers.__version__} cannot build it as a causal model: "
            f"{type(error).__name__}: {error}"
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


@torch.no_grad()
def _draw(module: Any, generator: torch.Generator) -> None:
    embedding = module.get_input_embeddings().weight
    for name, weight in module.named_parameters():  # a tied weight comes once
        if weight.dim() >= 2:
            std = _EMBEDDING_STD if weight is embedding else weight.shape[-1] ** -0.5
            share = _ATTENTION_SHARE if name.endswith("o_proj.weight") else 1.0
            weight.normal_(0.0, std * share, generator=generator)
        elif name.endswith("bias"):
            weight.zero_()  # norm weights keep what their class starts them with
    for layer in module.modules():
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma: a norm after o_proj undoes it,
            layer.post_attention_layernorm.weight.fill_(_ATTENTION_SHARE - 1.0)  # scaled by 1 + w


def _num_weights(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    return sum(weight.numel() for weight in module.parameters())

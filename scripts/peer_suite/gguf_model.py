"""A small llama with random weights and the vocabulary of a GGUF file, for tests of wiring.

Its answers mean nothing; its tokens are real, so that prompts have the lengths that tests expect.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 4, 256, 8, 4, 704, 4096
SCALE = 0.05
BOS, EOS, UNKNOWN = 1, 2, 0
_VOCABULARY = {"tokens": "token_list", "scores": "token_scores", "token_type": "token_types"}


def write_model(vocabulary: Path, out: Path) -> None:
    """Write a GGUF file with the tokens of another."""
    fields = gguf.GGUFReader(vocabulary).fields
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name("random-llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    for key, name in _VOCABULARY.items():
        getattr(writer, f"add_{name}")(_values(fields[f"tokenizer.ggml.{key}"]))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)
    num_tokens = len(fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(num_tokens)
    _add_weights(writer, num_tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


def _values(field: Any) -> list[Any]:
    if field.types[-1] == gguf.GGUFValueType.STRING:
        return [field.parts[at].tobytes() for at in field.data]
    return [field.parts[at].item() for at in field.data]


def _add_weights(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (num_tokens, HIDDEN), "output": (num_tokens, HIDDEN)}
    norms = ["output_norm"]
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norms += [f"{block}.attn_norm", f"{block}.ffn_norm"]
        shapes |= {
            f"{block}.attn_q": (HIDDEN, HIDDEN),
            f"{block}.attn_k": (kv_size, HIDDEN),
            f"{block}.attn_v": (kv_size, HIDDEN),
            f"{block}.attn_output": (HIDDEN, HIDDEN),
            f"{block}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"{block}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"{block}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(SCALE)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

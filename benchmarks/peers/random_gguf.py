"""Writes a GGUF of a preset's architecture with random bf16 weights, for llama.cpp's llama-bench.

    python benchmarks/peers/random_gguf.py -m random:smollm2-135m OUT.gguf

Needs the gguf package. Llama architectures only. The tokens are names and no words: the file is for
speed, not for answers. Frequency factors of rope scaling are left out; they cost no time.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from graphseed.capture import GraphseedError
from graphseed.engine import BadParameter
from graphseed.models.presets import preset_config
from graphseed.models.resolve import RANDOM_PREFIX

SCALE = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        config = preset_config(args.model.removeprefix(RANDOM_PREFIX))
        if config.model_type != "llama":
            raise BadParameter("-m", args.model, "a preset of the llama architecture")
    except GraphseedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write(config, args.model, args.out)
    return 0


def write(config: Any, name: str, path: Path) -> None:
    """Write header and tensors."""
    out = gguf.GGUFWriter(str(path), "llama")
    _add_header(out, config, name)
    _add_tensors(out, config)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _head_dim(config: Any) -> int:
    given: int | None = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def _add_header(out: gguf.GGUFWriter, config: Any, name: str) -> None:
    out.add_name(name)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_dimension_count(_head_dim(config))
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("llama")
    out.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    out.add_token_scores([0.0] * config.vocab_size)
    out.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)


def _add_tensors(out: gguf.GGUFWriter, config: Any) -> None:
    rng = np.random.default_rng(0)
    q_rows = config.num_attention_heads * _head_dim(config)
    kv_rows = config.num_key_value_heads * _head_dim(config)

    def matrix(tensor: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(SCALE)
        bf16 = gguf.GGMLQuantizationType.BF16
        out.add_tensor(tensor, gguf.quantize(values, bf16), raw_dtype=bf16)

    def norm(tensor: str) -> None:
        out.add_tensor(tensor, np.ones(config.hidden_size, dtype=np.float32))

    matrix("token_embd.weight", config.vocab_size, config.hidden_size)
    norm("output_norm.weight")
    if not config.tie_word_embeddings:
        matrix("output.weight", config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm.weight")
        norm(f"{block}ffn_norm.weight")
        for part, rows, columns in (
            ("attn_q", q_rows, config.hidden_size),
            ("attn_k", kv_rows, config.hidden_size),
            ("attn_v", kv_rows, config.hidden_size),
            ("attn_output", config.hidden_size, q_rows),
            ("ffn_gate", config.intermediate_size, config.hidden_size),
            ("ffn_up", config.intermediate_size, config.hidden_size),
            ("ffn_down", config.hidden_size, config.intermediate_size),
        ):
            matrix(f"{block}{part}.weight", rows, columns)


if __name__ == "__main__":
    sys.exit(main())

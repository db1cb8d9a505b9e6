"""A tokenizer for models with random weights: one token for each byte, no file needed.

Owns the ids: 0-255 are the bytes, then beginning, end and padding, and every further id up to the
model's vocabulary is an invented word (" a", " b", ..., " aa"), so that whatever such a model
samples can be shown. Any text comes back exactly; encoding never yields an id above 255.
"""

from typing import Any, Final

NUM_BYTES: Final = 256
BOS_ID: Final = 256
EOS_ID: Final = 257
PAD_ID: Final = 258
MIN_VOCAB_SIZE: Final = 259

_SPECIALS: Final = {"<|bos|>": BOS_ID, "<|eos|>": EOS_ID, "<|pad|>": PAD_ID}
_SPACE: Final = "\u0120"  # how a space is written in a byte-level vocabulary


def byte_tokenizer(vocab_size: int) -> Any:
    """Make the tokenizer for a model of `vocab_size` tokens (at least 259).

    Text that looks like a special token stays text, and no BOS is added.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}; 256 bytes and 3 specials need 259 or more")
    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    vocab |= _SPECIALS
    vocab |= {_word(i - MIN_VOCAB_SIZE): i for i in range(MIN_VOCAB_SIZE, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte, in the convention of byte-level BPE.

    A byte that is printable in Latin-1 stands for itself, the others for U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, num_moved = [], 0
    for byte in range(NUM_BYTES):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(NUM_BYTES + num_moved))
            num_moved += 1
    return letters


def _word(number: int) -> str:
    """A space and 0 -> a, 25 -> z, 26 -> aa, ...: each number another word."""
    letters, rest = "", number + 1
    while rest:
        rest, letter = divmod(rest - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return _SPACE + letters

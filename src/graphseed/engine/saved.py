"""The K/V of a prompt's beginning as a value, and the file it is kept in.

Owns SavedPrefix and the file format. Does not know engines, nor where files lie.

A file is in the safetensors format: the token ids and, for each layer, K and V of whole blocks. Its
metadata say what computed them (the layout), and a digest over all of it.
"""

# B blocks, N tokens of a block, H KV heads, D head dim

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from graphseed.capture.errors import GraphseedError

FORMAT: Final = "graphseed prefix 1"

Layout = Mapping[str, Any]  # JSON values


class BadSave(GraphseedError, ValueError):
    """Saved K/V that is damaged, or that this engine cannot use; nothing was changed."""


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """Tokens and the K/V of their whole blocks, on the host. A value: nobody writes to it."""

    layout: Layout  # of the engine that computed it
    token_ids: tuple[int, ...]  # [B * N]
    rows: tuple[torch.Tensor, ...]  # [B, N, H, D] each: layer by layer, K then V


def write_file(saved: SavedPrefix, path: Path) -> int:
    """Write a file; returns its bytes. Raises OSError."""
    tensors = _tensors(saved)
    layout = json.dumps(saved.layout)
    metadata = {"format": FORMAT, "layout": layout, "sha256": _digest(layout, tensors)}
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # it has no other for a disk that is full
        raise OSError(str(error)) from error
    return path.stat().st_size


def read_file(path: Path) -> SavedPrefix:
    """Read a file that `write_file` wrote. Raises BadSave for any other, and OSError."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BadSave(f"the file is damaged, or no saved slot ({error})") from None
    if metadata.get("format") != FORMAT:
        told = metadata.get("format", "none")
        raise BadSave(f"the file's format is {told!r:.80}; expected {FORMAT!r}")
    layout = metadata.get("layout", "")
    if _digest(layout, tensors) != metadata.get("sha256"):
        raise BadSave("the file is damaged: its contents do not have the digest that it names")
    try:
        told = json.loads(layout)
        token_ids = tensors.pop("token_ids")
        rows = tuple(tensors[_name(number)] for number in range(len(tensors)))
    except (ValueError, KeyError):
        raise BadSave("the file lacks what a saved slot has") from None
    if not isinstance(told, dict) or token_ids.dtype is not torch.int32 or token_ids.dim() != 1:
        raise BadSave("the file has what no saved slot has")
    return SavedPrefix(told, tuple(token_ids.tolist()), rows)


def _tensors(saved: SavedPrefix) -> dict[str, torch.Tensor]:
    rows = {_name(number): cache for number, cache in enumerate(saved.rows)}
    return {"token_ids": torch.tensor(saved.token_ids, dtype=torch.int32), **rows}


def _name(number: int) -> str:
    return f"layer {number // 2} {'kv'[number % 2]}"


def _digest(layout: str, tensors: Mapping[str, torch.Tensor]) -> str:
    sha = hashlib.sha256(layout.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(bytes_of(tensor))
    return sha.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, without a copy."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)

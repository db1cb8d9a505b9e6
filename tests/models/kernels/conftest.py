"""Lets Triton's interpreter run these tests where there is no GPU."""

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loop bound read on the device be an index.

    The interpreter keeps scalars as arrays of one element, which NumPy >= 2.4 no longer turns
    into an int by itself.
    """
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)

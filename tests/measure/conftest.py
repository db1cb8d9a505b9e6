"""Tiny models for measurements."""

import pytest

from graphseed.models import Model, load_model


@pytest.fixture(scope="session")
def model() -> Model:
    return load_model(
        "random:tiny-llama", device="cpu", dtype="fp32", bf16_is_fast=False, progress=False
    )

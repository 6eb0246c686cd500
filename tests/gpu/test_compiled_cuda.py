"""Compiled modules on CUDA: replicate in its three forms, with a hook, and fully_shard."""

from __future__ import annotations

import pytest
import torch

from tests.compile_bodies import on_gpu
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("is_narrow", [False, True], ids=["mean", "bf16"])
@pytest.mark.parametrize("form", [None, "concat", "coalesced"])
def test_replicated(form: str | None, is_narrow: bool) -> None:
    shared_pool(2).run(
        on_gpu.replicated, args=(form,), kwargs={"is_narrow": is_narrow}, backend="weft", timeout=150
    )


def test_sharded() -> None:
    shared_pool(2).run(on_gpu.sharded, backend="weft", timeout=150)

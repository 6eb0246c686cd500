"""The spread collectives on a GPU, and rows told between ranks that have nccl and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.local_bodies import spreads
from weft import comm
from weft.testing import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_ranks(2, kind="process", backend="weft")
def test_on_the_local_group() -> None:
    with spreads.low_bounds():
        spreads.moves_on_cuda()


@on_ranks(2, kind="process", backend="gloo")
def test_on_gloo() -> None:
    with spreads.low_bounds():
        spreads.moves_on_cuda()


@on_ranks(1, kind="process", backend="nccl")
def test_on_nccl() -> None:
    spreads.moves_on_cuda()


@on_ranks(2, kind="process", backend="nccl")
def test_rows_beside_nccl() -> None:
    """nccl would refuse two ranks on one GPU: it isn't asked."""
    for _ in range(2):
        assert comm.exchange_rows([dist.get_rank(), 5]) == [[0, 5], [1, 5]]

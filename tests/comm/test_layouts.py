"""Which layouts weft moves between, and which of torch's it leaves to torch."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._ops._embedding_ops import _MaskPartial
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard

from weft.comm import check_layout
from weft.errors import UnsupportedError


@pytest.mark.parametrize("layout", [Replicate(), Shard(0), Shard(-1), Partial()], ids=str)
def test_known(layout: Placement) -> None:
    check_layout(layout)


# The first two say that they are sums, and are more: rows that others have are to be left out of one, and
# the other is a sum of powers.
@pytest.mark.parametrize(
    "layout",
    [
        _MaskPartial(offset_shape=torch.Size([4, 2]), offset_dim=0),
        _NormPartial(2),
        Partial("avg"),
        Partial("max"),
        _StridedShard(0, split_factor=2),
    ],
    ids=str,
)
def test_unknown(layout: Placement) -> None:
    with pytest.raises(UnsupportedError, match="Redistribute"):
        check_layout(layout)

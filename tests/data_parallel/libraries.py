"""The library that the tests of data parallel are about: weft.

With WEFT_TEST_LIBRARY=torch in the environment the same tests run on torch's own
DDP, which shows that the tests are right. What torch can't do is skipped there, with
the reason.
"""

from __future__ import annotations

import os

import pytest

ON_TORCH = os.environ.get("WEFT_TEST_LIBRARY") == "torch"

if ON_TORCH:
    from torch.distributed import GradBucket
    from torch.distributed._composable.replicate import replicate
    from torch.nn.parallel import DistributedDataParallel
else:
    from weft import DistributedDataParallel, GradBucket, replicate

__all__ = [
    "ON_TORCH",
    "DistributedDataParallel",
    "GradBucket",
    "replicate",
    "weft_only",
]


def weft_only(what_torch_does: str) -> pytest.MarkDecorator:
    """Skip the test on torch, which does something else."""
    return pytest.mark.skipif(ON_TORCH, reason=f"torch {what_torch_does}")

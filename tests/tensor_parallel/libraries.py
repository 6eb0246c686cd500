"""`tp`, which tests of tensor parallelism take: the library that is tested, on the device of their place.

A plugin that their files name in `pytest_plugins`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.tensor.parallel as torch_tp

import weft.tensor_parallel as weft_tp
from tests.ranks import Place, at_each_rank
from tests.tensor_parallel.twins import library_on

LIBRARIES: dict[str, Any] = {"weft": weft_tp, "torch": torch_tp}


@pytest.fixture
def library() -> str:
    """The library's name; `run_on(library=...)` says it where a test is right with torch's, too."""
    return "weft"


@pytest.fixture
def tp(library: str, collected_for: Place | None) -> Any:
    if collected_for is None:
        return LIBRARIES[library]
    return at_each_rank(library_on, "cuda" if "gpu" in collected_for.marks else "cpu", LIBRARIES[library])

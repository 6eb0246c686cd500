"""What holds for every test: GPU tests are skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if GPU_TESTS in item.path.parents]
    if not on_gpu:
        return
    # Imported here: tests/repo and the pure tests should not pay for torch.
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

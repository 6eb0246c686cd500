"""on_ranks: parameters, fixtures, asserts, warnings and skips are as in any test of pytest."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.errors import LaunchError
from weft.testing import on_ranks

pytestmark = pytest.mark.full

KINDS = [
    pytest.param("process", marks=pytest.mark.processes),
    pytest.param("thread", marks=pytest.mark.threads),
]


def sum_of_ranks() -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.processes
@pytest.mark.parametrize("scale", [1, 2])
@on_ranks(2, kind="process")
def test_on_ranks_passes_parameters_and_fixtures(scale: int, tmp_path: Path) -> None:
    assert tmp_path.is_dir()
    assert dist.get_world_size() == 2
    assert sum_of_ranks() * scale == scale


def rank_is_five() -> None:
    rank = dist.get_rank()
    assert rank == 5


@pytest.mark.processes
def test_on_ranks_shows_every_ranks_traceback_and_asserts_as_pytest_shows_them() -> None:
    with pytest.raises(LaunchError) as caught:
        on_ranks(2, kind="process")(rank_is_five)()
    for rank in range(2):
        assert "assert rank == 5" in caught.value.failures[rank]
        assert f"assert {rank} == 5" in caught.value.failures[rank]
        assert "weft/testing" not in caught.value.failures[rank]
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks_treats_warnings_as_the_run_does(kind: str) -> None:
    @on_ranks(2, kind=kind)
    def body():
        warnings.warn("beware", UserWarning, stacklevel=1)

    with pytest.raises(LaunchError, match="raised UserWarning: beware"):
        body()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="BEWARE", category=UserWarning)
        body()


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks_skips(kind: str) -> None:
    @on_ranks(2, kind=kind)
    def body():
        pytest.skip("not today")

    with pytest.raises(pytest.skip.Exception, match="not today"):
        body()

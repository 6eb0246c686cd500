"""Calls that can't work raise before anything moves, and the group goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.inputs import (
    all_gather_single,
    assert_same,
    assert_still_usable,
    me,
    num_ranks,
    reduce_scatter_single,
    sample,
)
from tests.ranks import run_on
from weft import comm

pytestmark = [run_on(threads=2, timeout=60), run_on(weft=2, timeout=60, full=True)]


def ones(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype)


def lists(count: int, numel: int = 4) -> list[torch.Tensor]:
    return [ones(numel) for _ in range(count)]


# Wrong on every rank alike, through torch's own functions: torch may be the one that refuses.
WRONG: dict[str, Callable[[int], Any]] = {
    "all_gather, too few outputs": lambda n: dist.all_gather(lists(n - 1), ones(4)),
    "all_gather, too many outputs": lambda n: dist.all_gather(lists(n + 1), ones(4)),
    "all_gather, another size": lambda n: dist.all_gather(lists(n, 5), ones(4)),
    "all_gather, another dtype": lambda n: dist.all_gather([*lists(n - 1), ones(4, torch.int32)], ones(4)),
    "all_gather_into_tensor, too small": lambda n: all_gather_single(ones(4 * n - 1), ones(4)),
    "all_gather_into_tensor, too large": lambda n: all_gather_single(ones(4 * n + 4), ones(4)),
    "all_gather_into_tensor, dtype": lambda n: all_gather_single(ones(4 * n, torch.float64), ones(4)),
    "reduce_scatter, too few inputs": lambda n: dist.reduce_scatter(ones(4), lists(n - 1)),
    "reduce_scatter, another size": lambda n: dist.reduce_scatter(ones(4), lists(n, 5)),
    "reduce_scatter, another dtype": lambda n: dist.reduce_scatter(ones(4, torch.int32), lists(n)),
    "reduce_scatter_tensor, size": lambda n: reduce_scatter_single(ones(4), ones(4 * n + 1)),
    "reduce_scatter_tensor, dtype": lambda n: reduce_scatter_single(ones(4), ones(4 * n, torch.int32)),
    "all_to_all, too few outputs": lambda n: dist.all_to_all(lists(n - 1), lists(n)),
    "all_to_all, too many inputs": lambda n: dist.all_to_all(lists(n), lists(n + 1)),
    "all_to_all_single, not divisible": lambda n: dist.all_to_all_single(ones(4 * n + 1), ones(4 * n + 1)),
    "all_to_all_single, dtype": lambda n: dist.all_to_all_single(ones(4 * n, torch.int32), ones(4 * n)),
    "all_to_all_single, number of splits": lambda n: dist.all_to_all_single(
        ones(4 * n), ones(4 * n), [4] * (n + 1), [4] * n
    ),
    "all_to_all_single, sum of splits": lambda n: dist.all_to_all_single(
        ones(4 * n), ones(4 * n), [5] * n, [4] * n
    ),
    "all_to_all_single, negative splits": lambda n: dist.all_to_all_single(
        ones(4 * n), ones(4 * n), [4 * n + 4, *[0] * (n - 2), -4], [4] * n
    ),
    "broadcast, root": lambda n: dist.broadcast(ones(4), n),
    "broadcast, negative root": lambda n: dist.broadcast(ones(4), -1),
    "reduce, root": lambda n: dist.reduce(ones(4), n),
    "gather, root": lambda n: dist.gather(ones(4), None, n),
    "scatter, root": lambda n: dist.scatter(ones(4), None, n),
    "send, nobody": lambda n: dist.send(ones(4), n),
    "send, to itself": lambda n: dist.send(ones(4), me()),
    "recv, nobody": lambda n: dist.recv(ones(4), n),
    "premul_sum of integers": lambda n: dist.all_reduce(
        ones(4, torch.int32), dist._make_nccl_premul_sum(0.5)
    ),
    "average of bool": lambda n: dist.all_reduce(ones(4, torch.bool), dist.ReduceOp.AVG),
    "all_reduce of a sparse matrix in CSR": lambda n: dist.all_reduce(csr()),
    "all_reduce on meta": lambda n: dist.all_reduce(torch.ones(4, device="meta")),
    "all_reduce of an expanded tensor": lambda n: dist.all_reduce(torch.ones(1).expand(4)),
}

# Only our own functions are asked: torch's check some of it themselves.
WRONG_AT_THE_DOOR: dict[str, Callable[[int], Any]] = {
    "all_gather, too few outputs": lambda n: comm.all_gather(lists(n - 1), ones(4)).wait(),
    "all_gather_into_tensor, size": lambda n: comm.all_gather_into_tensor(ones(4 * n + 1), ones(4)).wait(),
    "reduce_scatter_tensor, size": lambda n: comm.reduce_scatter_tensor(ones(4), ones(4 * n + 1)).wait(),
    "reduce_scatter, too few inputs": lambda n: comm.reduce_scatter(ones(4), lists(n - 1)).wait(),
    "broadcast, root": lambda n: comm.broadcast(ones(4), n).wait(),
    "reduce, root": lambda n: comm.reduce(ones(4), n).wait(),
    "gather, root": lambda n: comm.gather(ones(4), None, n).wait(),
    "scatter, root": lambda n: comm.scatter(ones(4), None, n).wait(),
    "send, nobody": lambda n: comm.send(ones(4), n).wait(),
    "recv, nobody": lambda n: comm.recv(ones(4), n).wait(),
    "exchange, neither send nor recv": lambda n: comm.exchange([("give", ones(4), 0)]).wait(),
    "unknown op": lambda n: comm.all_reduce(ones(4), "median").wait(),
    "average of integers in bool": lambda n: comm.all_reduce(ones(4, torch.bool), dist.ReduceOp.AVG).wait(),
}


def csr() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # that it is in beta state
        return torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2), check_invariants=True).to_sparse_csr()


@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_cannot_work(what: str) -> None:
    # torch itself raises ValueError, TypeError or RuntimeError for some of these.
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        WRONG[what](num_ranks())
    check_not_about_peers(caught.value)
    assert_still_usable()


@pytest.mark.parametrize("what", WRONG_AT_THE_DOOR)
def test_arguments_that_cannot_work_at_the_door(what: str) -> None:
    error_types = (ValueError,) if dist.get_backend() == "weft" else (ValueError, TypeError, RuntimeError)
    with pytest.raises(error_types) as caught:
        WRONG_AT_THE_DOOR[what](num_ranks())
    check_not_about_peers(caught.value)
    assert_still_usable()


def check_not_about_peers(error: BaseException) -> None:
    """An argument that can't work isn't a peer's fault, nor a bug of ours."""
    assert not isinstance(error, weft.PeerError | weft.InternalError), repr(error)


def test_a_call_that_is_wrong_on_one_rank_only() -> None:
    """The others wait; once the rank does what it should, all go on."""
    tensor = sample(me(), 9)
    if me() == 0:
        with pytest.raises((ValueError, RuntimeError)):
            all_gather_single(torch.empty(4), ones(4))
        with pytest.raises(ValueError, match=str(num_ranks())):
            dist.broadcast(tensor, num_ranks())
        assert_same(tensor, sample(0, 9), "a refused tensor")
    assert_still_usable()


def test_closed_groups_are_refused() -> None:
    group: Any = dist.new_group()
    dist.all_reduce(ones(3), group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    with pytest.raises(weft.StateError):
        group.allreduce([ones(3)], dist.AllreduceOptions()).wait()
    with pytest.raises(weft.StateError):
        group.barrier().wait()
    with pytest.raises(weft.StateError):
        group.send([ones(3)], (group.rank() + 1) % group.size(), 0).wait()
    with pytest.raises(weft.StateError):
        group.allocate(3)
    with pytest.raises((weft.StateError, ValueError)):
        comm.all_reduce(ones(3), group=group).wait()
    with pytest.raises((weft.StateError, ValueError)):
        dist.all_reduce(ones(3), group=group)
    assert_still_usable()


def test_groups_of_others_are_refused() -> None:
    """A rank outside of a group may not use it through the door."""
    group = dist.new_group([0])
    if me() == 0:
        assert comm.all_reduce(ones(3), group=group).wait().sum() == 3
    else:
        with pytest.raises((weft.ConfigError, weft.StateError)):
            comm.all_reduce(ones(3), group=group)
    assert_still_usable()


def test_wrong_allocations_are_refused() -> None:
    group: Any = dist.group.WORLD
    with pytest.raises((ValueError, RuntimeError)):
        group.allocate(-1)
    with pytest.raises((ValueError, RuntimeError)):
        group.allocate(4, device="meta")
    with pytest.raises((ValueError, RuntimeError, MemoryError)):
        group.allocate(1 << 60)
    with pytest.raises((ValueError, TypeError)):
        group.allocate(4, dtype="float32")
    tensor = group.allocate(4).fill_(1)
    dist.all_reduce(tensor)
    assert (tensor == num_ranks()).all()

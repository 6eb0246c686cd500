"""launch(kind="thread"): each thread is a rank with a world of its own, and failures end all of them."""

from __future__ import annotations

import _thread
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weft.errors import LaunchError, LaunchTimeoutError, PeerError
from weft.launcher import launch
from weft.launcher.stores import memory_store

pytestmark = pytest.mark.threads


def launch_threads(fn, ranks=2, **options):
    return launch(fn, ranks=ranks, kind="thread", **options)


def sum_of_ranks() -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


def test_results_come_by_rank_and_arguments_reach_every_rank() -> None:
    def body(base, *, scale):
        return base + scale * dist.get_rank(), dist.get_world_size()

    results = launch_threads(body, 4, args=(100,), kwargs={"scale": 10})
    assert results == [(100, 4), (110, 4), (120, 4), (130, 4)]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_sixty_four_ranks(backend: str) -> None:
    assert launch_threads(sum_of_ranks, 64, backend=backend, timeout=60) == [2016.0] * 64


def test_one_rank() -> None:
    assert launch_threads(sum_of_ranks, 1) == [0.0]


def test_groups_meshes_functional_collectives_and_dtensor() -> None:
    def body():
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = torch.tensor([float(rank)])
        dist.all_reduce(mine, group=pairs[rank // 2])

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        by_column = functional.all_reduce(torch.tensor([rank]), "sum", (mesh, 0))
        full = torch.arange(16.0).reshape(4, 4)
        sharded = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
        sharded_product: Any = sharded @ sharded
        product = sharded_product.redistribute(mesh, [Replicate(), Replicate()])
        assert torch.equal(product.to_local(), full @ full)
        return mine.item(), by_column.item(), mesh.get_coordinate(), sharded.to_local().tolist()

    full = torch.arange(16.0).reshape(4, 4)
    for rank, (pair_sum, by_column, coordinate, block) in enumerate(launch_threads(body, 4, timeout=60)):
        row, column = divmod(rank, 2)
        assert pair_sum == [1.0, 5.0][row]
        assert by_column == column + (column + 2)
        assert coordinate == (row, column)
        assert block == full[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].tolist()


def test_backward_hooks_run_in_their_ranks_world() -> None:
    def body():
        parameter = torch.ones(2, requires_grad=True)
        seen: list[int] = []
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(dist.get_rank()))
        (parameter * 2).sum().backward()
        return seen

    assert launch_threads(body, 3) == [[0], [1], [2]]


def test_launch_leaves_the_process_as_it_was() -> None:
    world, excepthook = distributed_c10d._world, sys.excepthook
    get_backend = torch.distributed.device_mesh.get_backend
    launch_threads(sum_of_ranks)
    with pytest.raises(LaunchError):
        launch_threads(lambda: 1 / 0)
    assert distributed_c10d._world is world
    assert sys.excepthook is excepthook
    assert torch.distributed.device_mesh.get_backend is get_backend
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weft-rank")]


def test_the_processes_own_world_is_apart_and_works_again_after() -> None:
    dist.init_process_group("gloo", store=memory_store(), rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        assert launch_threads(sum_of_ranks, 3) == [3.0] * 3
        assert dist.group.WORLD is own
        assert functional.all_reduce(torch.ones(1), "sum", own).item() == 1.0
    finally:
        dist.destroy_process_group()


def test_ranks_launch_ranks() -> None:
    def body():
        inner = launch_threads(sum_of_ranks, 3)
        return dist.get_rank(), inner, sum_of_ranks()

    assert launch_threads(body, 2) == [(0, [3.0] * 3, 1.0), (1, [3.0] * 3, 1.0)]


def test_launches_overlap() -> None:
    both_run = threading.Barrier(4)
    results: dict[int, list[float]] = {}

    def body():
        both_run.wait(timeout=30)
        return sum_of_ranks() + dist.get_world_size()

    def start(key):
        results[key] = launch_threads(body, 2, timeout=60)

    starters = [threading.Thread(target=start, args=(key,)) for key in range(2)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert results == {0: [3.0, 3.0], 1: [3.0, 3.0]}
    assert isinstance(distributed_c10d._world, distributed_c10d._World)


def test_an_exception_ends_the_others_and_all_tracebacks_are_shown() -> None:
    boom = ValueError("boom")

    def body():
        if dist.get_rank() == 2:
            raise boom
        dist.barrier()

    with pytest.raises(LaunchError) as caught:
        launch_threads(body, 4, timeout=60)
    error = caught.value
    assert str(error).startswith("launch: rank 2 of 4 raised ValueError: boom\n")
    assert error.__cause__ is boom
    assert sorted(error.failures) == [0, 1, 2, 3]
    assert "raise boom" in error.failures[2]
    for rank in (0, 1, 3):
        assert "dist.barrier()" in error.failures[rank]
        assert "PeerError" in error.failures[rank]
        assert "boom" in error.failures[rank]


def test_exceptions_in_subgroups_end_them_too() -> None:
    def body():
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            raise ValueError("boom")
        if dist.get_rank() == 0:
            dist.barrier(pair)

    with pytest.raises(LaunchError, match="rank 1 of 3 raised ValueError: boom") as caught:
        launch_threads(body, 3, timeout=60)
    assert "PeerError" in caught.value.failures[0]


def test_gloo_ranks_end_too() -> None:
    def body():
        if dist.get_rank() == 0:
            raise KeyboardInterrupt
        sum_of_ranks()

    with pytest.raises(LaunchError, match="rank 0 of 2 raised KeyboardInterrupt") as caught:
        launch_threads(body, backend="gloo", timeout=60)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert "gloo" in caught.value.failures[1]


def test_a_rank_that_returns_early_does_not_leave_its_peers_waiting() -> None:
    def body():
        if dist.get_rank() == 1:
            dist.barrier()

    with pytest.raises(LaunchError) as caught:
        launch_threads(body, timeout=60)
    assert isinstance(caught.value.__cause__, PeerError)
    assert list(caught.value.failures) == [1]


def wait_forever(event: threading.Event) -> None:
    event.wait()


def test_a_thread_that_does_not_end_is_named_with_its_stack() -> None:
    event = threading.Event()

    def body():
        if dist.get_rank() == 0:
            raise ValueError("boom")
        wait_forever(event)

    with pytest.raises(LaunchError, match="rank 0 of 2 raised ValueError: boom") as caught:
        launch_threads(body, grace=0.2)
    (stuck,) = [thread for thread in threading.enumerate() if thread.name == "weft-rank-1"]
    # It keeps its own world, and the process has its own back, also for C++.
    assert not dist.is_initialized()
    event.set()
    stuck.join()
    assert "had not ended 0.2 seconds after the failure, and a thread can't be killed" in str(caught.value)
    assert "in wait_forever\n    event.wait()" in caught.value.failures[1]
    assert isinstance(distributed_c10d._world, distributed_c10d._World)


def test_a_thread_given_up_on_does_not_touch_the_processes_groups_when_it_ends() -> None:
    event = threading.Event()

    def body():
        if dist.get_rank() == 0:
            raise ValueError("boom")
        wait_forever(event)
        assert dist.get_world_size() == 2

    dist.init_process_group("gloo", store=memory_store(), rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError):
            launch_threads(body, grace=0.2)
        (stuck,) = [thread for thread in threading.enumerate() if thread.name == "weft-rank-1"]
        event.set()
        stuck.join()
        assert functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == 1.0
    finally:
        dist.destroy_process_group()


def test_timeout_shows_stacks_and_ends_ranks_that_wait_for_each_other() -> None:
    def body():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)
        else:
            dist.recv(torch.ones(1), src=0)

    with pytest.raises(LaunchTimeoutError) as caught:
        launch_threads(body, timeout=0.5)
    error = caught.value
    assert str(error).startswith("launch: ranks 0-1 of 2 had not finished after timeout=0.5 seconds")
    assert "dist.recv(torch.ones(1), src=1)" in error.failures[0]
    assert "dist.recv(torch.ones(1), src=0)" in error.failures[1]
    assert "can't be killed" not in str(error)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weft-rank")]


def test_timeout_names_only_the_unfinished() -> None:
    event = threading.Event()

    def body():
        if dist.get_rank() == 1:
            wait_forever(event)

    with pytest.raises(LaunchTimeoutError) as caught:
        launch_threads(body, timeout=0.5, grace=0.1)
    event.set()
    assert list(caught.value.failures) == [1]
    assert "runs on, since a thread can't be killed" in caught.value.failures[1]


def test_exit_zero_is_a_return_and_any_other_exit_a_failure() -> None:
    assert launch_threads(lambda: sys.exit(0)) == [None, None]
    assert launch_threads(sys.exit) == [None, None]
    with pytest.raises(LaunchError, match="raised SystemExit: 3"):
        launch_threads(lambda: sys.exit(3))


def test_interrupt_of_the_launcher_ends_the_ranks() -> None:
    def body():
        if dist.get_rank() == 0:
            _thread.interrupt_main()
        dist.recv(torch.ones(1), src=1 - dist.get_rank())

    with pytest.raises(KeyboardInterrupt):
        launch_threads(body, timeout=60)
    for thread in threading.enumerate():
        if thread.name.startswith("weft-rank"):
            thread.join(timeout=30)
            assert not thread.is_alive()


def test_function_may_destroy_its_own_world() -> None:
    assert launch_threads(lambda: dist.destroy_process_group()) == [None, None]

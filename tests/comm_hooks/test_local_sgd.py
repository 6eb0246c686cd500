"""Post-local SGD: everyone's mean at first, a few ranks' after."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.comm_hooks.buckets import every_rank, exact_mean, make_bucket, run
from tests.ranks import run_on
from weft.comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook


def step(state: PostLocalSGDState) -> torch.Tensor:
    """A step of two buckets; the second one's result."""
    run(post_localSGD_hook, state, make_bucket(index=0, is_last=False, seed=1))
    return run(post_localSGD_hook, state, make_bucket(index=1, is_last=True)).double()


def own_pair() -> Any:
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]


@run_on(threads=4)
def test_all_ranks_first_then_the_subgroup() -> None:
    state = PostLocalSGDState(None, own_pair(), start_localSGD_iter=2)
    for _ in range(2):
        torch.testing.assert_close(step(state), exact_mean(), rtol=0, atol=2e-9)
    assert state.iter == 2
    pair = every_rank()[dist.get_rank() % 2 :: 2].mean(0)
    for _ in range(2):
        torch.testing.assert_close(step(state), pair, rtol=0, atol=2e-9)


@run_on(threads=2)
def test_no_mean_at_all_if_so_asked() -> None:
    state = PostLocalSGDState(None, None, start_localSGD_iter=1, post_local_gradient_allreduce=False)
    torch.testing.assert_close(step(state), exact_mean(), rtol=0, atol=2e-9)
    with weft.record() as events:
        assert torch.equal(step(state), every_rank()[dist.get_rank()])
    assert events == []


@run_on(threads=2)
def test_the_subgroup_is_the_host_unless_given() -> None:
    state = PostLocalSGDState(None, None, start_localSGD_iter=0)
    torch.testing.assert_close(step(state), exact_mean(), rtol=0, atol=2e-9)
    assert state.subgroup is not None
    assert dist.get_process_group_ranks(state.subgroup) == [0, 1]


@pytest.mark.threads
def test_torchrun_says_how_many_ranks_a_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def body() -> list[int]:
        state = PostLocalSGDState(None, None, start_localSGD_iter=0)
        step(state)
        return dist.get_process_group_ranks(state.subgroup)

    found = weft.launch(body, ranks=4, kind="thread", timeout=30, collective_timeout=10)
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]


@run_on(threads=4)
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_the_count_of_steps_is_saved(way: str) -> None:
    pair = own_pair()
    state = PostLocalSGDState(None, pair, start_localSGD_iter=2)
    step(state)
    if way == "pickle":
        resumed = pickle.loads(pickle.dumps(state))
        assert resumed.subgroup is None
        resumed.subgroup = pair
    else:
        resumed = PostLocalSGDState(None, pair, start_localSGD_iter=2)
        resumed.load_state_dict(state.state_dict())
    torch.testing.assert_close(step(resumed), exact_mean(), rtol=0, atol=2e-9)
    torch.testing.assert_close(
        step(resumed), every_rank()[dist.get_rank() % 2 :: 2].mean(0), rtol=0, atol=2e-9
    )

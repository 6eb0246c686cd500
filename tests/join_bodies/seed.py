"""What Join promises, as bodies that run on every rank, of any kind and backend. Rank r has 3 + r inputs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.join_bodies.reducers import AFTER, BEFORE, Ones, expected_total
from weft.join import Join

NUM_STEPS = 3


def run(
    num_joinables: int, num_allreduces: int = 1, *, is_uneven: bool = True, **options: bool
) -> list[Ones]:
    """Loop under Join; check the total of all all-reduces."""
    joinables = [Ones() for _ in range(num_joinables)]
    assert all(one.post_value.item() == BEFORE for one in joinables)
    num_inputs = NUM_STEPS + (dist.get_rank() if is_uneven else 0)
    total = 0.0
    with Join(joinables, num_allreduces=num_allreduces, **options):
        for _ in range(num_inputs):
            total += sum(one(num_allreduces) for one in joinables)
    expected = expected_total(NUM_STEPS, 1) if is_uneven else dist.get_world_size() * NUM_STEPS
    assert total == expected * num_joinables * num_allreduces
    return joinables


def one_main_hook() -> None:
    (one,) = run(1)
    assert one.hook is not None
    assert one.hook.num_shadowed == dist.get_world_size() - 1 - dist.get_rank()


def one_post_hook() -> None:
    (one,) = run(1, num_allreduces=0, run_post_hooks=True)
    assert one.post_value.item() == AFTER
    assert one.is_last_joiner == (dist.get_rank() == dist.get_world_size() - 1)


def main_and_post_hook() -> None:
    (one,) = run(1, run_post_hooks=True)
    assert one.post_value.item() == AFTER


def three_joinables() -> None:
    for one in run(3, run_post_hooks=True):
        assert one.post_value.item() == AFTER


def disabled() -> None:
    (one,) = run(1, is_uneven=False, enable=False)
    assert one.hook is not None
    assert one.hook.num_shadowed == 0
    assert one.is_last_joiner is None


def three_disabled() -> None:
    run(3, is_uneven=False, enable=False)


def throws(num_joinables: int = 1) -> None:
    message = (
        "Rank 0 exhausted all inputs."
        if dist.get_rank() == 0
        else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    )
    with pytest.raises(RuntimeError, match=message):
        run(num_joinables, throw_on_early_termination=True)
    dist.barrier()  # the group is still good


def three_throw() -> None:
    throws(3)


def kwargs_reach_hooks() -> None:
    run(1, num_allreduces=2)


BODIES = [
    one_main_hook,
    one_post_hook,
    main_and_post_hook,
    three_joinables,
    disabled,
    three_disabled,
    throws,
    three_throw,
    kwargs_reach_hooks,
]

"""Join where something is odd, on rank-threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

import weft
from tests.join_bodies import edges
from tests.join_bodies.reducers import Ones
from weft.join import Join

CASES = [
    *[(body, ranks) for body in edges.BODIES for ranks in (2, 4)],
    *[(body, 4) for body in edges.FOR_FOUR],
]


@pytest.mark.parametrize(("body", "ranks"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_body(body: Callable[[], None], ranks: int) -> None:
    weft.launch(body, ranks=ranks, kind="thread", timeout=60)


def test_the_classes_of_groups_are_left_as_they_were() -> None:
    classes = (dist.ProcessGroup, weft.LocalGroup)
    before = [dict(vars(cls)) for cls in classes]
    during: list[bool] = []

    def body() -> None:
        with Join([Ones()]):
            during.append(weft.LocalGroup.allreduce is not before[1]["allreduce"])

    weft.launch(body, ranks=2, kind="thread")
    assert during == [True, True]
    assert [dict(vars(cls)) for cls in classes] == before


def test_a_world_of_one_communicates_nothing() -> None:
    def body() -> None:
        one = Ones()
        with weft.record() as events, Join([one], num_allreduces=0, run_post_hooks=True):
            handle = Join.notify_join_context(one)
            assert handle is not None
            assert handle.wait().tolist() == [1]
        assert events == []
        assert one.is_last_joiner

    weft.launch(body, ranks=1, kind="thread")

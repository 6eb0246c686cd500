"""Collectives of the user's own inside a loop under Join: the right result, or an error on every rank.

Rank r has 1 + r inputs, so in step s (from 0) the ranks from s on are active.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.join.joinables import Ones
from tests.ranks import run_on
from weft import StateError, comm, desync_check, record
from weft.join import Join, Joinable, JoinHook, shadowed

pytestmark = [run_on(threads=(2, 4)), run_on(weft=4, gloo=4, full=True)]


def active_ranks(step: int) -> list[int]:
    assert step >= 0
    return list(range(step, dist.get_world_size()))


def loop(extra: Callable[[int], None], *, is_before: bool = False, base: int = 1) -> None:
    """Run `extra(step)` in every step, before or after the Joinable's part."""
    one = Ones()
    with Join([one]):
        for step in range(base + dist.get_rank()):
            if is_before:
                extra(step)
            assert one() == len(active_ranks(step - base + 1))
            if not is_before:
                extra(step)
    dist.barrier()  # nothing is left over on the wire


def check_sum(step: int) -> None:
    value = torch.full((3, 2), float(dist.get_rank()))
    dist.all_reduce(value)
    assert value.unique().tolist() == [sum(active_ranks(step))]


def test_sum_after_the_step() -> None:
    loop(check_sum)


def test_sum_before_the_step() -> None:
    loop(check_sum, is_before=True)


def test_sum_through_the_door() -> None:
    def extra(step: int) -> None:
        handle = comm.all_reduce(torch.full((1,), float(dist.get_rank())))
        assert handle.wait().item() == sum(active_ranks(step))

    loop(extra)
    loop(extra, is_before=True)


def test_two_sums_of_other_kinds() -> None:
    def extra(step: int) -> None:
        ranks = active_ranks(step)
        counts = torch.tensor([1, 2])
        work = dist.all_reduce(counts, async_op=True)
        largest = torch.tensor(-float(dist.get_rank() + 1))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        smallest = torch.tensor([dist.get_rank() + 1], dtype=torch.uint8)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        product = torch.tensor([2.0], dtype=torch.float64)
        dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
        work.wait()
        assert counts.tolist() == [len(ranks), 2 * len(ranks)]
        assert largest.item() == -(ranks[0] + 1)
        assert smallest.item() == ranks[0] + 1
        assert product.item() == 2.0 ** len(ranks)

    loop(extra)


def test_roots_that_are_active() -> None:
    last = dist.get_world_size() - 1

    def extra(step: int) -> None:
        sent = torch.tensor([float(step), 7.0]) if dist.get_rank() == last else torch.zeros(2)
        dist.broadcast(sent, src=last)
        assert sent.tolist() == [step, 7.0]
        reduced = torch.ones(2)
        dist.reduce(reduced, dst=last)
        if dist.get_rank() == last:
            assert reduced.tolist() == [len(active_ranks(step))] * 2
        part = torch.zeros(1)
        parts = [torch.tensor([float(rank)]) for rank in range(last + 1)] if dist.get_rank() == last else None
        dist.scatter(part, parts, src=last)
        assert part.item() == dist.get_rank()
        dist.barrier()

    loop(extra)


def test_reduce_scatters() -> None:
    size = dist.get_world_size()

    def extra(step: int) -> None:
        out = torch.zeros(2)
        comm.reduce_scatter_tensor(out, torch.ones(2 * size)).wait()
        assert out.tolist() == [len(active_ranks(step))] * 2

    loop(extra)


def test_gathers_with_zeros() -> None:
    def extra(step: int) -> None:
        outs = [torch.full((2,), -1.0) for _ in range(dist.get_world_size())]
        with shadowed():
            dist.all_gather(outs, torch.full((2,), dist.get_rank() + 1.0))
        gathered = [out[0].item() for out in outs]
        assert gathered == [rank + 1.0 if rank >= step else 0.0 for rank in range(len(outs))]

    loop(extra)


def test_a_rank_without_inputs() -> None:
    loop(lambda step: check_sum(step + 1), base=0)
    loop(lambda step: check_sum(step + 1), base=0, is_before=True)


def test_even_inputs_refuse_nothing() -> None:
    one = Ones()
    with Join([one]):
        for _ in range(3):
            one()
            outs: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(outs, dist.get_rank())
            assert outs == list(range(dist.get_world_size()))
            mean = torch.full((1,), float(dist.get_rank()))
            gathered = [torch.zeros(1) for _ in outs]
            dist.all_gather(gathered, mean)
            assert [tensor.item() for tensor in gathered] == outs


def test_counts_of_the_door_stay_equal() -> None:
    """The desync check compares calls by their numbers, during a Join and after it."""
    with desync_check(timeout=10):
        loop(check_sum)
    test_sum_through_the_door()
    with desync_check(timeout=10):
        comm.all_reduce(torch.ones(1)).wait()


def check_refused(extra: Callable[[int], None], *words: str) -> None:
    """The extra call has to raise on every rank: joined ones too, and once the others have told them."""
    for is_before in (False, True):
        with pytest.raises(StateError) as caught:
            loop(extra, is_before=is_before)
        message = str(caught.value)
        for part in ("ranks [0] have no inputs left", *words):
            assert part in message, message
        if dist.get_rank() > 0:
            assert "test_user_collectives.py" in message  # where this rank's call is
        dist.barrier()


def test_gather_is_refused() -> None:
    def extra(step: int) -> None:
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], torch.ones(1))

    check_refused(extra, "all_gather(1 of float32)", "weft.join.shadowed()")


def test_objects_are_refused() -> None:
    def extra(step: int) -> None:
        dist.all_gather_object([None] * dist.get_world_size(), "metrics")

    check_refused(extra, "no object to give", "Move it out of the loop")


def test_a_joined_root_is_refused() -> None:
    check_refused(
        lambda step: dist.broadcast(torch.zeros(5), src=0), "broadcast(5 of float32, root 0)", "Its root"
    )


def test_all_to_all_is_refused() -> None:
    size = dist.get_world_size()

    def extra(step: int) -> None:
        comm.all_to_all_single(torch.zeros(size), torch.ones(size)).wait()

    check_refused(extra, "all_to_all_single")


class Counts:
    """Not a Joinable: what one inherits from a class that knows nothing of Join."""

    def count(self) -> float:
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    def twice(self) -> Generator[float]:
        for _ in range(2):
            one = torch.ones(1)
            dist.all_reduce(one)
            yield one.item()

    @property
    def number(self) -> float:
        return self.count()


class FourCountsHook(JoinHook):
    def main_hook(self) -> None:
        for _ in range(4):
            dist.all_reduce(torch.zeros(1))


class FourCounts(Counts, Joinable):
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return FourCountsHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class DoubledCounts(Counts):
    def count(self) -> float:
        return 2 * super().count()


class Mixed(FourCounts, DoubledCounts):
    """Its `count` is DoubledCounts', as Python's order of classes says."""


@pytest.mark.parametrize(("made", "factor"), [(FourCounts, 1), (Mixed, 2)])
def test_inherited_methods_generators_and_properties_are_the_joinables(
    made: type[FourCounts], factor: int
) -> None:
    joinable = made()
    with record() as events, Join([joinable]):
        for step in range(1 + dist.get_rank()):
            Join.notify_join_context(joinable)
            num_active = len(active_ranks(step))
            assert joinable.count() == factor * num_active
            seen = []
            for number in joinable.twice():
                seen.append(number)
                if step == 0:  # of the loop, not of the generator: joined ranks hear of it
                    check_sum(step)
            assert seen == [num_active] * 2
            assert joinable.number == factor * num_active
    assert len(events.by_feature("join")) > 0
    assert joinable.count() == factor * dist.get_world_size()

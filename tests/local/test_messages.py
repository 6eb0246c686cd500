"""Messages between two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.local.inputs import assert_same, me, num_ranks, sample, sizes
from tests.ranks import run_on

pytestmark = [
    run_on(threads=(2, 3), timeout=60),
    run_on(weft=(2, 4), timeout=60, full=True),
    run_on(gloo=4, timeout=20, full=True),
]

MANY = 100


def test_send_and_recv_in_a_ring() -> None:
    """Even ranks send first, so that nothing depends on a send that returns before it is received."""
    after, before = (me() + 1) % num_ranks(), (me() - 1) % num_ranks()
    for numel in sizes():
        tensor = torch.full((numel,), -1.0)
        if me() == 0:
            dist.send(sample(me(), numel), after)
            assert dist.recv(tensor, before) == before
        else:
            assert dist.recv(tensor, before) == before
            dist.send(sample(me(), numel), after)
        assert_same(tensor, sample(before, numel), f"recv of {numel}")


def test_a_batched_ring() -> None:
    after, before = (me() + 1) % num_ranks(), (me() - 1) % num_ranks()
    for numel in sizes():
        tensor = torch.full((numel,), -1.0)
        ops = [dist.P2POp(dist.isend, sample(me(), numel), after), dist.P2POp(dist.irecv, tensor, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert_same(tensor, sample(before, numel), f"batched recv of {numel}")


def test_many_messages_both_ways() -> None:
    """All are under way at once, between every pair; they arrive in order."""
    others = [rank for rank in range(num_ranks()) if rank != me()]
    for numel in (5, 10_000):
        given = {(to, i): sample(me(), numel, salt=i) + to for to in others for i in range(MANY)}
        got = {(source, i): torch.full((numel,), -1.0) for source in others for i in range(MANY)}
        works = [dist.isend(tensor, to) for (to, _), tensor in given.items()]
        works += [dist.irecv(tensor, source) for (source, _), tensor in got.items()]
        for work in works:
            work.wait()
        for (source, i), tensor in got.items():
            assert_same(tensor, sample(source, numel, salt=i) + me(), f"message {i} from {source}")


def test_tags_out_of_order() -> None:
    if me() == 0:
        for numel in (4, 50_000):
            works = [dist.isend(sample(0, numel, salt=tag), 1, tag=tag) for tag in (1, 2, 3)]
            for work in works:
                work.wait()
    elif me() == 1:
        for numel in (4, 50_000):
            tensors = {tag: torch.full((numel,), -1.0) for tag in (3, 1, 2)}
            for tag, tensor in tensors.items():
                dist.recv(tensor, 0, tag=tag)
            for tag, tensor in tensors.items():
                assert_same(tensor, sample(0, numel, salt=tag), f"message with tag {tag}")


def test_receives_posted_before_the_sends() -> None:
    tensors: list[torch.Tensor] = []
    works: list[Any] = []
    if me() == 1:
        tensors = [torch.full((numel,), -1.0) for numel in (4, 50_000)]
        works = [dist.irecv(tensor, 0, tag=tag) for tag, tensor in enumerate(tensors)]
    dist.barrier()
    if me() == 0:
        dist.send(sample(0, 50_000), 1, tag=1)
        dist.send(sample(0, 4), 1, tag=0)
    elif me() == 1:
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert_same(tensor, sample(0, tensor.numel()), "a receive posted first")


def test_recv_from_anyone() -> None:
    for numel in (3, 50_000):
        if me() == 0:
            seen: set[int] = set()
            for _ in range(num_ranks() - 1):
                tensor = torch.full((numel,), -1.0)
                source = dist.recv(tensor)
                assert_same(tensor, sample(source, numel), f"recv from anyone, who was {source}")
                seen.add(source)
            assert seen == set(range(1, num_ranks()))
        else:
            dist.send(sample(me(), numel), 0)
        dist.barrier()


def test_a_message_does_not_stand_in_a_collectives_way() -> None:
    """Though nobody has received it yet."""
    work = dist.isend(sample(0, 50_000), 1, tag=7) if me() == 0 else None
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert (tensor == num_ranks()).all()
    if me() == 1:
        tensor = torch.empty(50_000)
        dist.recv(tensor, 0, tag=7)
        assert_same(tensor, sample(0, 50_000), "recv after a collective")
    if work is not None:
        work.wait()


def test_a_large_message() -> None:
    numel = 8_000_001
    if me() == 0:
        dist.send(sample(0, numel), 1)
    elif me() == 1:
        tensor = torch.empty(numel)
        dist.recv(tensor, 0)
        assert_same(tensor, sample(0, numel), "a large message")


def test_a_sent_tensor_may_change_after_the_wait() -> None:
    """A send that is waited for has taken the values, whether they have been received or not."""
    for numel in (3, 5_000):
        if me() == 0:
            tensor = torch.ones(numel)
            dist.send(tensor, 1)
            tensor.fill_(2)
            dist.send(tensor, 1)
            tensor.fill_(3)
        elif me() == 1:
            for want in (1.0, 2.0):
                tensor = torch.empty(numel)
                dist.recv(tensor, 0)
                assert_same(tensor, torch.full((numel,), want), "a message whose sender went on")


def test_a_sender_may_leave_after_its_send() -> None:
    """A send that has returned is delivered, also when its sender destroys the group at once."""
    for numel in (9, 100_000):
        for i in range(30):
            group = dist.new_group([0, 1])
            if me() == 0:
                dist.send(sample(0, numel, salt=i), 1, group=group)
            elif me() == 1:
                tensor = torch.full((numel,), -1.0)
                dist.recv(tensor, 0, group=group)
                assert_same(tensor, sample(0, numel, salt=i), f"message {i} of a rank that left")
            if me() < 2:
                dist.destroy_process_group(group)

"""A block of shared memory that its borrower hands back, instead of a copy of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.dlpack

from weft.rpc.arena import Place
from weft.rpc.tensors import SHARED_BYTES, Route, TensorPost
from weft.rpc.wire import WireError

THERE = Route(1, "worker1", True, {})
BACK = Route(0, "worker0", True, {})
Posts = tuple[TensorPost, TensorPost]


@pytest.fixture
def posts() -> Posts:
    return TensorPost(0), TensorPost(1)


def lend(posts: Posts, sent: torch.Tensor) -> torch.Tensor:
    (got,) = posts[1].unpack(*posts[0].pack([sent], THERE), BACK)
    return got


def make(numel: int = SHARED_BYTES) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32)


def hand_back(posts: Posts, got: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What arrives, and whether it was handed back."""
    descriptors, buffers = posts[1].pack([got], BACK, is_given_up=True)
    (arrived,) = posts[0].unpack(descriptors, buffers, THERE)
    return arrived, not posts[1].num_blocks_in_use


def test_a_block_comes_back_with_what_was_made_of_it(posts: Posts) -> None:
    got = lend(posts, make())
    got += 1
    arrived, is_handed_back = hand_back(posts, got)
    assert is_handed_back
    del got
    gc.collect()
    assert posts[0].num_blocks_in_use == 1, "the lender has it now"
    assert torch.equal(arrived, make() + 1)
    del arrived
    assert posts[0].num_blocks_in_use == 0
    again = lend(posts, make())  # in the same block
    assert torch.equal(again, make())
    assert posts[0].num_blocks_in_use == 1


def test_a_block_can_go_to_and_fro(posts: Posts) -> None:
    arrived: torch.Tensor | None = None
    for number in range(20):
        arrived, is_handed_back = hand_back(posts, lend(posts, make() + number))
        assert is_handed_back
        assert torch.equal(arrived, make() + number)
    del arrived
    assert posts[0].num_blocks_in_use == 0


def test_strides_and_dtype_stay(posts: Posts) -> None:
    got = lend(posts, make().view(256, -1))
    got.t_()
    arrived, is_handed_back = hand_back(posts, got)
    assert is_handed_back
    assert arrived.stride() == (1, SHARED_BYTES // 256)
    assert torch.equal(arrived, make().view(256, -1).t())


HOLDERS: list[Callable[[torch.Tensor], Any]] = [
    lambda got: got.view(-1),
    lambda got: got[3:5],
    lambda got: got.detach(),
    lambda got: got.untyped_storage(),
    lambda got: got.storage(),
    lambda got: torch.utils.dlpack.to_dlpack(got),
    lambda got: (got * torch.ones(1, requires_grad=True)).grad_fn,
]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_others_hold_is_copied(posts: Posts, holder: Callable[[torch.Tensor], Any]) -> None:
    got = lend(posts, make())
    held = holder(got)
    arrived, is_handed_back = hand_back(posts, got)
    assert not is_handed_back
    arrived.zero_()
    assert torch.equal(got, make())
    del held


def test_a_part_of_a_block_and_what_needs_gradients_are_copied(posts: Posts) -> None:
    part = lend(posts, make(2 * SHARED_BYTES))[SHARED_BYTES:]
    assert not hand_back(posts, part)[1]
    needy = lend((TensorPost(0), posts[1]), make().requires_grad_())
    assert not hand_back((TensorPost(0), posts[1]), needy)[1]


def test_a_block_of_another_peer_is_copied(posts: Posts) -> None:
    third = TensorPost(2)
    (got,) = third.unpack(*posts[1].pack([make()], Route(2, "worker2", True, {})), THERE)
    descriptors, _ = third.pack([got], BACK, is_given_up=True)
    assert third.num_blocks_in_use == 1
    third.withdraw(descriptors)


def test_without_leave_it_is_copied(posts: Posts) -> None:
    got = lend(posts, make())
    posts[1].pack([got], BACK)
    assert posts[1].num_blocks_in_use == 1


def test_a_message_that_is_not_sent_frees_the_block(posts: Posts) -> None:
    descriptors, _ = posts[1].pack([lend(posts, make())], BACK, is_given_up=True)
    assert posts[0].num_blocks_in_use == 1
    posts[1].withdraw(descriptors)
    assert posts[0].num_blocks_in_use == 0


def test_it_outlives_the_peer_that_handed_it_back(posts: Posts) -> None:
    arrived, _ = hand_back(posts, lend(posts, make()))
    posts[1].release_peer(0)
    posts[0].release_peer(1)
    posts[1].close()
    posts[0].close()
    assert torch.equal(arrived, make())


def test_what_the_peer_does_not_have_is_refused(posts: Posts) -> None:
    got = lend(posts, make())
    ((*rest, place),), _ = posts[1].pack([got], BACK, is_given_up=True)  # type: ignore[misc]
    right = Place(*place[2:])
    for wrong in (
        right._replace(flag=right.flag + 1),
        right._replace(start=right.start + 64),
        right._replace(num_bytes=right.num_bytes << 8),
        right._replace(segment_id=right.segment_id + 1),
    ):
        with pytest.raises(WireError, match="does not have"):
            posts[0].unpack([(*rest, (*place[:2], *wrong))], [], THERE)
    with pytest.raises(WireError, match="does not have"):
        posts[0].unpack([(*rest, place)], [], Route(2, "worker2", True, {}))
    posts[0].unpack([(*rest, place)], [], THERE)
    with pytest.raises(WireError, match="does not have"):  # a second time
        posts[0].unpack([(*rest, place)], [], THERE)

"""Large tensors go between processes in blocks of shared memory, which come back and outlive their owners."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
import torch

from tests.rpc import tensor_peers
from tests.rpc.tensor_peers import TO_PEER, TO_TEST, Peer, num_files, num_mapped, pack
from weft.errors import PeerError
from weft.rpc.tensors import SHARED_BYTES, Route, TensorPost

pytestmark = pytest.mark.processes

FROM_PEER = Route(tensor_peers.PEER_ID, "peer", True, {})
NUMEL = 1 << 18  # 1 MiB


@pytest.fixture(scope="module")
def peers() -> Generator[list[Peer]]:
    """One that lives, and two to be killed."""
    started = [Peer() for _ in range(3)]
    yield started
    for peer in started:
        peer.stop()


@pytest.fixture
def peer(peers: list[Peer]) -> Generator[Peer]:
    yield peers[0]
    peers[0].ask(tensor_peers.drop)


@pytest.fixture
def post() -> Generator[TensorPost]:
    post = TensorPost(0)
    yield post
    post.close()


def test_a_large_tensor_is_used_in_place(peer: Peer, post: TensorPost) -> None:
    sent = torch.full((NUMEL,), 2.0)
    parcel = pack(post, [sent], TO_PEER)
    assert parcel.buffers == []
    assert peer.ask(tensor_peers.receive, parcel) == [2.0]
    assert "memfd:weft" in peer.ask(tensor_peers.where_are_they)[0]
    sent.zero_()
    peer.ask(tensor_peers.add, 1.0)
    assert peer.ask(tensor_peers.sums) == [3.0 * NUMEL]
    assert sent.sum().item() == 0


def test_small_tensors_are_the_receivers_own(peer: Peer, post: TensorPost) -> None:
    parcel = pack(post, [torch.full((10,), 2.0), torch.ones(SHARED_BYTES // 4 - 1)], TO_PEER)
    assert len(parcel.buffers) == 2
    peer.ask(tensor_peers.receive, parcel)
    peer.ask(tensor_peers.add, 1.0)
    assert not any("memfd:weft" in name for name in peer.ask(tensor_peers.where_are_they))
    assert peer.ask(tensor_peers.sums) == [30.0, 2.0 * (SHARED_BYTES // 4 - 1)]
    assert post.arena_bytes == 0


def test_blocks_come_back_and_are_used_again(peer: Peer, post: TensorPost) -> None:
    sent = torch.ones(NUMEL)
    peer.ask(tensor_peers.receive, pack(post, [sent], TO_PEER))
    assert post.num_blocks_in_use == 1
    peer.ask(tensor_peers.keep_a_part)
    assert post.num_blocks_in_use == 1, "a view keeps the block"
    peer.ask(tensor_peers.drop)
    assert post.num_blocks_in_use == 0
    num_bytes, files = post.arena_bytes, num_files()
    for turn in range(50):
        assert (
            peer.ask(tensor_peers.receive_and_drop, pack(post, [sent.fill_(turn)], TO_PEER)) == turn * NUMEL
        )
    assert (post.arena_bytes, num_files()) == (num_bytes, files)


def test_it_works_both_ways(peer: Peer, post: TensorPost) -> None:
    parcel = peer.ask(tensor_peers.send_ones, NUMEL)
    (got,) = post.unpack(parcel.descriptors, parcel.buffers, FROM_PEER)
    assert got.add_(1).sum().item() == 2 * NUMEL
    assert peer.ask(tensor_peers.blocks_in_use) == 1
    del got
    assert peer.ask(tensor_peers.blocks_in_use) == 0


def test_memory_stays_flat(peer: Peer, post: TensorPost) -> None:
    sent = torch.ones(4 * NUMEL)

    def exchange() -> None:
        assert peer.ask(tensor_peers.receive_and_drop, pack(post, [sent], TO_PEER)) == sent.numel()
        parcel = peer.ask(tensor_peers.send_ones, sent.numel())
        post.unpack(parcel.descriptors, parcel.buffers, FROM_PEER)

    for _ in range(5):
        exchange()
    before = tensor_peers.rss_bytes(), peer.ask(tensor_peers.own_rss_bytes), num_mapped(), num_files()
    for _ in range(100):
        exchange()
    after = tensor_peers.rss_bytes(), peer.ask(tensor_peers.own_rss_bytes), num_mapped(), num_files()
    # 800 MiB went over; malloc keeps a few tensors' worth for itself.
    assert after[0] - before[0] < 32 << 20
    assert after[1] - before[1] < 32 << 20
    assert after[2:] == before[2:]
    assert post.num_blocks_in_use == peer.ask(tensor_peers.blocks_in_use) == 0


def test_a_forked_child_gives_nothing_back(peer: Peer, post: TensorPost) -> None:
    peer.ask(tensor_peers.receive, pack(post, [torch.ones(NUMEL)], TO_PEER))
    assert peer.ask(tensor_peers.end_a_forked_child) == 0
    assert post.num_blocks_in_use == 1
    pack(post, [torch.zeros(NUMEL)], TO_PEER)
    assert peer.ask(tensor_peers.sums) == [NUMEL]


def test_a_receiver_that_left_but_lives_keeps_its_tensors(peer: Peer, post: TensorPost) -> None:
    peer.ask(tensor_peers.receive, pack(post, [torch.ones(NUMEL)], TO_PEER))
    post.release_peer(TO_PEER.peer_id)
    assert post.num_blocks_in_use == 0
    for _ in range(3):
        pack(post, [torch.zeros(NUMEL)], TO_PEER)
    assert peer.ask(tensor_peers.sums) == [NUMEL]


def test_a_sender_that_closed_leaves_its_tensors(peer: Peer, post: TensorPost) -> None:
    peer.ask(tensor_peers.receive, pack(post, [torch.ones(NUMEL)], TO_PEER))
    files = num_files()
    post.close()
    assert num_files() == files - 2, "the segment's own, and the one that mmap keeps"
    assert (post.num_blocks_in_use, post.arena_bytes) == (0, 0)
    peer.ask(tensor_peers.release_test)
    peer.ask(tensor_peers.add, 1.0)
    assert peer.ask(tensor_peers.sums) == [2 * NUMEL]


def test_the_death_of_a_receiver_frees_its_blocks(peers: list[Peer], post: TensorPost) -> None:
    dying = peers[1]
    dying.ask(tensor_peers.receive, pack(post, [torch.ones(NUMEL)] * 3, TO_PEER))
    peers[0].ask(tensor_peers.receive, pack(post, [torch.full((NUMEL,), 5.0)], Route(8, "other", True, {})))
    dying.kill()
    assert post.num_blocks_in_use == 4
    post.release_peer(TO_PEER.peer_id)
    assert post.num_blocks_in_use == 1, "the other's block is in the same slab, and is still lent"
    assert peers[0].ask(tensor_peers.sums) == [5.0 * NUMEL]
    peers[0].ask(tensor_peers.drop)
    post.trim()
    assert (post.num_blocks_in_use, post.arena_bytes) == (0, 0)
    assert peers[0].ask(tensor_peers.receive, pack(post, [torch.ones(NUMEL)], TO_PEER)) == [1.0]
    peers[0].ask(tensor_peers.drop)


def test_the_death_of_a_sender_leaves_what_has_arrived(peers: list[Peer], post: TensorPost) -> None:
    dying = peers[2]
    gc.collect()  # what earlier tests have left may be unmapped at any time
    mapped = num_mapped()
    arrived = dying.ask(tensor_peers.send_ones, NUMEL)
    (got,) = post.unpack(arrived.descriptors, arrived.buffers, FROM_PEER)
    under_way = dying.ask(tensor_peers.send_ones, 4 * NUMEL)  # in memory that was never opened here
    dying.kill()
    with pytest.raises(PeerError, match="is gone") as caught:
        post.unpack(under_way.descriptors, under_way.buffers, FROM_PEER)
    assert caught.value.ranks == (tensor_peers.PEER_ID,)
    post.release_peer(tensor_peers.PEER_ID)
    assert got.add_(1).sum().item() == 2 * NUMEL
    assert num_mapped() == mapped + 1
    del got
    gc.collect()
    assert num_mapped() == mapped


def test_nothing_has_a_name_in_the_file_system(peer: Peer, post: TensorPost) -> None:
    before = os.listdir("/dev/shm")
    peer.ask(tensor_peers.receive, pack(post, [torch.ones(NUMEL)], TO_PEER))
    assert os.listdir("/dev/shm") == before


def test_what_is_sent_to_oneself_is_a_copy(post: TensorPost) -> None:
    sent = torch.ones(NUMEL)
    parcel = pack(post, [sent], TO_TEST)
    (got,) = post.unpack(parcel.descriptors, parcel.buffers, TO_TEST)
    got.zero_()
    assert sent.sum().item() == NUMEL
    assert post.num_blocks_in_use == 1
    del got
    assert post.num_blocks_in_use == 0

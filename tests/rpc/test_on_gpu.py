"""CUDA tensors go between processes by the device map: through CUDA IPC, or through the host."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from tests.rpc import tensor_peers
from tests.rpc.tensor_peers import PEER_ID, Peer, pack
from weft.rpc import device_arena
from weft.rpc.tensors import SHARED_BYTES, Route, TensorPost

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NEAR = Route(PEER_ID, "peer", True, {GPU: GPU})
FAR = Route(PEER_ID, "peer", False, {GPU: GPU})
BACK = Route(0, "test", True, {GPU: GPU})
FROM_PEER = Route(PEER_ID, "peer", True, {})
NUMEL = 1 << 20
SIZES = [0, 3, SHARED_BYTES // 4, NUMEL]


@pytest.fixture(scope="module")
def the_peer() -> Generator[Peer]:
    peer = Peer()
    yield peer
    peer.stop()


@pytest.fixture
def peer(the_peer: Peer) -> Generator[Peer]:
    yield the_peer
    the_peer.ask(tensor_peers.drop)


@pytest.fixture
def post() -> Generator[TensorPost]:
    post = TensorPost(0)
    yield post
    post.close()


@pytest.mark.parametrize("route", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("numel", SIZES[1:])
def test_a_tensor_goes_there_and_back(peer: Peer, post: TensorPost, numel: int, route: Route) -> None:
    sent = torch.arange(numel, dtype=torch.float32, device=GPU)
    peer.ask(tensor_peers.receive, pack(post, [sent], route))
    assert peer.ask(tensor_peers.devices) == ["cuda:0"]
    sent.zero_()
    peer.ask(tensor_peers.add, 1.0)
    answer = peer.ask(tensor_peers.send_back, BACK)
    (got,) = post.unpack(answer.descriptors, answer.buffers, FROM_PEER)
    assert got.device == GPU
    assert torch.equal(got.cpu(), torch.arange(numel, dtype=torch.float32) + 1)
    assert post.num_blocks_in_use == 0
    assert peer.ask(tensor_peers.blocks_in_use) == 0


@pytest.mark.parametrize("numel", SIZES)
def test_within_a_process(post: TensorPost, numel: int) -> None:
    sent = torch.rand(numel, device=GPU, requires_grad=True)
    descriptors, buffers = post.pack([sent, sent.detach().expand(2, numel).t()], BACK)
    got, transposed = post.unpack(descriptors, buffers, BACK)
    assert got.requires_grad
    assert got.is_leaf
    assert torch.equal(got, sent)
    assert torch.equal(transposed, sent.detach().expand(2, numel).t())
    assert got.device == transposed.device == GPU
    assert post.num_blocks_in_use == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11's
def test_strides_and_sparse_tensors(peer: Peer, post: TensorPost) -> None:
    base = torch.rand(512, 768, device=GPU)
    sent = [base.t(), base[:, ::2], torch.eye(512, device=GPU).to_sparse(), base.to(torch.bfloat16)]
    parcel = pack(post, sent, BACK)
    for tensor, got in zip(sent, post.unpack(parcel.descriptors, parcel.buffers, BACK), strict=True):
        assert got.device == GPU
        assert got.dtype is tensor.dtype
        if tensor.layout is torch.strided:
            assert got.stride() == tensor.stride()
            assert torch.equal(got, tensor)
        else:
            assert torch.equal(got.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("numel", SIZES[1:])
def test_maps_between_the_gpu_and_the_host(peer: Peer, post: TensorPost, numel: int) -> None:
    to_host, to_gpu = Route(PEER_ID, "peer", True, {GPU: CPU}), Route(PEER_ID, "peer", True, {CPU: GPU})
    peer.ask(tensor_peers.receive, pack(post, [torch.ones(numel, device=GPU)], to_host))
    peer.ask(tensor_peers.receive, pack(post, [torch.ones(numel)], to_gpu))
    assert peer.ask(tensor_peers.devices) == ["cpu", "cuda:0"]
    assert peer.ask(tensor_peers.sums) == [numel, numel]


def test_a_gpu_without_a_map_is_refused(post: TensorPost) -> None:
    with pytest.raises(RuntimeError, match="only supports CPU tensors by default"):
        post.pack([torch.ones(NUMEL), torch.ones(2, device=GPU)], FROM_PEER)
    assert post.num_blocks_in_use == 0


@pytest.mark.parametrize("kept_bytes", [256 << 20, 0], ids=["kept", "passing"])
def test_blocks_are_used_again(
    peer: Peer, post: TensorPost, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arena, "KEPT_BYTES", kept_bytes)
    sent = torch.ones(NUMEL, device=GPU)
    num_bytes: int | None = None
    for turn in range(30):
        parcel = pack(post, [sent.fill_(turn)], NEAR)
        assert peer.ask(tensor_peers.receive_and_drop, parcel) == turn * NUMEL
        if turn == 0:
            num_bytes = post.arena_bytes
    assert post.arena_bytes == num_bytes
    assert post.num_blocks_in_use == 0


def test_what_a_stream_still_writes_is_waited_for(peer: Peer, post: TensorPost) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sent = torch.ones(NUMEL, device=GPU)
        for _ in range(200):
            sent = sent * 1.0
        sent = sent + 1
        parcel = pack(post, [sent], NEAR)
    assert peer.ask(tensor_peers.receive_and_drop, parcel) == 2 * NUMEL


def test_what_arrived_outlives_its_sender(post: TensorPost) -> None:
    dying = Peer()
    dying.ask(tensor_peers.receive, pack(post, [torch.ones(NUMEL, device=GPU)], NEAR))
    parcel = dying.ask(tensor_peers.send_back, BACK)
    (got,) = post.unpack(parcel.descriptors, parcel.buffers, FROM_PEER)
    dying.kill()
    post.release_peer(PEER_ID)
    assert got.add_(1).sum().item() == 2 * NUMEL

"""Tensors of every kind arrive as they were, in bytes or in blocks; what can't travel is refused."""

from __future__ import annotations

import gc
import math
import mmap
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ConfigError, UnfitError, UnsupportedError
from weft.rpc import arena, tensors
from weft.rpc.arena import Arena, Borrower, Place, plan_block_bytes
from weft.rpc.tensor_memory import span_of
from weft.rpc.tensors import SHARED_BYTES, Route, TensorPost
from weft.rpc.wire import INLINE_BYTES, WireError

NEAR = Route(1, "worker1", True, {})
FAR = Route(1, "worker1", False, {})
BACK = Route(0, "worker0", True, {})
DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.complex32"))
    },
    key=str,
)
SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module")
def posts() -> tuple[TensorPost, TensorPost]:
    return TensorPost(0), TensorPost(1)


def send(
    posts: tuple[TensorPost, TensorPost], *sent: torch.Tensor, route: Route = NEAR
) -> list[torch.Tensor]:
    descriptors, buffers = posts[0].pack(sent, route)
    return posts[1].unpack(descriptors, buffers, BACK)


def bits_of(tensor: torch.Tensor) -> list[Any]:
    """The elements' bits, whatever they mean."""
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.detach().view(SAME_SIZE[tensor.itemsize]).tolist()


class Sample:
    """A tensor that can be shown whatever its dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"{self.tensor.dtype} {tuple(self.tensor.shape)} {self.tensor.stride()}"


@st.composite
def strided(draw: st.DrawFn) -> Sample:
    """A tensor of any dtype, any shape, and strides that fit it."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    if draw(st.booleans()):
        shape.append(draw(st.sampled_from([1, 100, 3000])))
    numel = math.prod(shape)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize + 64,), dtype=torch.uint8
    )
    offset = draw(st.integers(0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some dtypes experimental, once a process
        empty = torch.empty(0, dtype=dtype)
    flat = empty.set_(raw.untyped_storage(), offset, (numel,), (1,))
    tensor = flat.view(shape)
    for _ in range(draw(st.integers(0, 3))):
        if tensor.dim() == 0:
            break
        dim = draw(st.integers(0, tensor.dim() - 1))
        change = draw(st.sampled_from(["permute", "narrow", "step", "expand", "select"]))
        if change == "permute":
            tensor = tensor.permute(*draw(st.permutations(range(tensor.dim()))))
        elif change == "narrow" and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 1, tensor.size(dim) - 1)
        elif change == "step":
            tensor = tensor[(*[slice(None)] * dim, slice(None, None, 2))]
        elif change == "expand":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:])
        elif change == "select" and tensor.size(dim) > 0:
            tensor = tensor.select(dim, tensor.size(dim) - 1)
    return Sample(tensor)


@settings(max_examples=400, deadline=None)
@given(st.lists(strided(), min_size=1, max_size=3), st.booleans())
def test_any_tensor_arrives_as_it_was(
    posts: tuple[TensorPost, TensorPost], samples: list[Sample], is_near: bool
) -> None:
    sent = [sample.tensor for sample in samples]
    for tensor, got in zip(sent, send(posts, *sent, route=NEAR if is_near else FAR), strict=True):
        assert got.dtype is tensor.dtype
        assert got.shape == tensor.shape
        assert bits_of(got) == bits_of(tensor)
        assert not got._is_view()
        assert got.data_ptr() != tensor.data_ptr() or got.numel() == 0
        span = span_of(tensor) if tensor.numel() else 0
        if tensor.is_contiguous():
            assert got.is_contiguous()
        elif span <= 2 * tensor.numel() or span * tensor.itemsize <= 8192:
            assert got.stride() == tensor.stride()
        else:
            assert got.is_contiguous()


@pytest.mark.parametrize("numel", [1, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1, SHARED_BYTES * 3])
@pytest.mark.parametrize("route", [NEAR, FAR], ids=["near", "far"])
def test_what_arrives_is_the_receivers_own(
    posts: tuple[TensorPost, TensorPost], numel: int, route: Route
) -> None:
    sent = torch.arange(numel, dtype=torch.float32)
    (got,) = send(posts, sent, route=route)
    got.add_(1)
    assert torch.equal(sent, torch.arange(numel, dtype=torch.float32))
    sent.zero_()
    assert torch.equal(got, torch.arange(numel, dtype=torch.float32) + 1)


@pytest.mark.parametrize("numel", [2, SHARED_BYTES])
def test_requires_grad_stays_and_the_graph_does_not(posts: tuple[TensorPost, TensorPost], numel: int) -> None:
    leaf = torch.ones(numel, requires_grad=True)
    for sent in (leaf, leaf * 2, leaf.detach()):
        (got,) = send(posts, sent)
        assert got.requires_grad == sent.requires_grad
        assert got.is_leaf
        assert torch.equal(got, sent)
    (got,) = send(posts, leaf)
    (got * 3).sum().backward()
    assert got.grad is not None
    got.data.zero_()
    got.detach_()


@pytest.mark.parametrize("numel", [2, SHARED_BYTES])
def test_modes_of_the_thread_do_not_matter(numel: int) -> None:
    posts = TensorPost(0), TensorPost(1)
    with torch.inference_mode():
        (got,) = send(posts, torch.ones(numel))
        assert not got.is_inference()
    got.add_(1)
    (got,) = send(posts, torch.ones(numel, requires_grad=True))  # into the block that was made in that mode
    assert got.sum().item() == numel
    with torch.inference_mode():
        made_there = torch.ones(numel)
    assert send(posts, made_there)[0].sum().item() == numel
    with torch.device("meta"):
        sent = torch.ones(numel, device="cpu")
        (got,) = send(posts, sent)
        assert got.device.type == "cpu"
    with torch.no_grad():
        assert send(posts, torch.ones(numel, requires_grad=True))[0].requires_grad


def test_conjugated_and_negated_views_arrive_with_their_values(posts: tuple[TensorPost, TensorPost]) -> None:
    sent = torch.randn(3, dtype=torch.complex64, requires_grad=True).conj()
    (got,) = send(posts, sent)
    assert torch.equal(got.detach(), sent.detach())
    assert not got.is_conj()
    assert got.requires_grad
    negated = sent.detach().imag
    assert negated.is_neg()
    assert torch.equal(send(posts, negated)[0], negated)


def make_large_sparse() -> torch.Tensor:
    diagonal = torch.arange(SHARED_BYTES)
    return torch.sparse_coo_tensor(diagonal.expand(1, -1), torch.rand(SHARED_BYTES), (SHARED_BYTES,))


def make_sparse() -> list[torch.Tensor]:
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 3, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are said to be in beta state
        return [
            dense.to_sparse(),
            dense.to_sparse().requires_grad_(),
            torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3)),  # uncoalesced, hybrid
            torch.sparse_coo_tensor(size=(3, 2)),  # type: ignore[call-arg]
            dense.to_sparse_csr(),
            dense.to_sparse_csc(),
            dense.to_sparse_bsr((1, 2)),
            dense.to_sparse_bsc((2, 2)),
            make_large_sparse(),
        ]


@pytest.mark.parametrize("sent", make_sparse(), ids=lambda tensor: str(tensor.layout))
def test_sparse_tensors_arrive(posts: tuple[TensorPost, TensorPost], sent: torch.Tensor) -> None:
    (got,) = send(posts, sent)
    assert got.layout is sent.layout
    assert got.requires_grad == sent.requires_grad
    assert got.shape == sent.shape
    assert torch.equal(got.detach().to_dense(), sent.detach().to_dense())
    if sent.layout is torch.sparse_coo:
        assert got.is_coalesced() == sent.is_coalesced()
        assert got._nnz() == sent._nnz()


def test_meta_tensors_arrive_without_bytes(posts: tuple[TensorPost, TensorPost]) -> None:
    sent = torch.empty(1000, 1000, 1000, device="meta", requires_grad=True).transpose(0, 2)
    descriptors, buffers = posts[0].pack([sent, torch.empty(2, device="meta")], NEAR)
    assert buffers == []
    got, small = posts[1].unpack(descriptors, buffers, BACK)
    assert (got.device.type, got.shape, got.stride()) == ("meta", sent.shape, sent.stride())
    assert got.requires_grad
    assert small.shape == (2,)


def make_quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def make_nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (make_quantized, "int_repr"),
        (make_nested, "unbind"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
    ],
    ids=["quantized", "nested", "mkldnn"],
)
def test_what_does_not_travel_says_what_does(
    posts: tuple[TensorPost, TensorPost], make: Callable[[], torch.Tensor], advice: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are said to be in prototype state
        sent = make()
    with pytest.raises(UnsupportedError, match=advice):
        posts[0].pack([sent], NEAR)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("numel", [2, SHARED_BYTES])
def test_a_tensor_without_memory_is_refused(
    posts: tuple[TensorPost, TensorPost], numel: int, start: int
) -> None:
    freed = torch.ones(start + numel)[start:]
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnfitError, match="has no memory"):
        posts[0].pack([freed], NEAR)
    assert freed.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("numel", [20, SHARED_BYTES])
def test_a_tensor_with_too_little_memory_is_refused(posts: tuple[TensorPost, TensorPost], numel: int) -> None:
    shrunk = torch.ones(numel)
    shrunk.untyped_storage().resize_(64)
    for lacking in (shrunk, torch._efficientzerotensor(numel)):  # type: ignore[attr-defined]
        with pytest.raises(UnfitError, match="has no memory"):
            posts[0].pack([lacking], NEAR)


def test_a_device_without_a_map_is_refused_with_torchs_words() -> None:
    with pytest.raises(RuntimeError, match=r"only supports CPU tensors by default.*set_device_map") as caught:
        tensors._map_device(torch.device("cuda", 1), NEAR)
    assert "Request device mapping is not available for destination worker1" in str(caught.value)
    answer = Route(1, "worker1", True, {}, is_answer=True)
    with pytest.raises(
        RuntimeError, match=r"Response device mapping.*worker1, but found tensor on device: cuda:1"
    ):
        tensors._map_device(torch.device("cuda", 1), answer)
    with pytest.raises(UnsupportedError, match="mps"):
        tensors._map_device(torch.device("mps"), NEAR)


def test_a_map_may_move_what_is_on_the_cpu(posts: tuple[TensorPost, TensorPost]) -> None:
    route = Route(1, "worker1", True, {torch.device("cpu"): torch.device("cuda", 1)})
    ((*_, device, place),), _ = posts[0].pack([torch.ones(2)], route)  # type: ignore[misc]
    assert (device, place) == ("cuda:1", None)


@pytest.mark.parametrize("route", [NEAR, FAR, Route(1, "worker1", True, {}, takes_memory=False)])
@pytest.mark.parametrize("width", [8, 40_000])
def test_what_lies_between_elements_is_not_sent(route: Route, width: int) -> None:
    """A worker with `allow` gives away what its functions return, and not what lies beside it."""
    table = torch.arange(float(4 * width)).view(4, width)
    views = [
        table[:, 1:],
        table[:, ::2],
        table[::3],
        table[:, :-1].expand(2, 4, width - 1),
        table.t(),
        table[:1],
    ]
    posts = TensorPost(0, hides_gaps=True), TensorPost(1)
    for view in views:
        (received,) = send(posts, view, route=route)
        assert received.equal(view)
        others = set(table.flatten().tolist()) - set(view.flatten().tolist())
        seen = torch.tensor([], dtype=torch.float32).set_(received.untyped_storage()).tolist()
        assert not others & set(seen) - {0.0}, view.stride()  # blocks are filled with zeros
    descriptors: Any
    descriptors, _ = posts[0].pack([table.t(), table[0].expand(3, width)], route)
    assert [descriptor[2] for descriptor in descriptors] == [(1, width), (0, 1)]  # strides stay without gaps
    for post in posts:
        post.close()


def test_descriptors_are_plain(posts: tuple[TensorPost, TensorPost]) -> None:
    sent = [torch.ones(2, 3), torch.ones(2, 3).t(), torch.ones(SHARED_BYTES), torch.eye(2).to_sparse()]
    descriptors, _ = posts[0].pack(sent, NEAR)
    plain = (int, str, bool, type(None))

    def check(value: Any) -> None:
        assert type(value) in (tuple, *plain), type(value)
        if type(value) is tuple:
            for item in value:
                check(item)

    check(descriptors)
    posts[0].withdraw(descriptors)


def test_bytes_for_another_host_are_not_copied(posts: tuple[TensorPost, TensorPost]) -> None:
    sent = torch.zeros(INLINE_BYTES)
    descriptors, buffers = posts[0].pack([sent], FAR)
    sent[0] = 7
    assert torch.frombuffer(bytearray(buffers[0]), dtype=torch.float32)[0] == 7
    assert buffers[0].readonly
    received = bytearray(buffers[0])
    (taken,) = posts[1].unpack(descriptors, [memoryview(received)], BACK)
    taken[0] = 9
    assert torch.frombuffer(received, dtype=torch.float32)[0] == 9, "writable memory is taken over"
    misplaced = memoryview(bytearray(b"x") + received)[1:]
    (copied,) = posts[1].unpack(descriptors, [misplaced], BACK)
    assert copied.data_ptr() % 4 == 0
    assert copied[0] == 9


def test_blocks_are_lent_and_come_back() -> None:
    posts = TensorPost(0), TensorPost(1)
    sent = torch.rand(SHARED_BYTES)
    first, second = send(posts, sent, sent)
    assert posts[0].num_blocks_in_use == 2
    part = first[5:7]
    del first
    assert posts[0].num_blocks_in_use == 2, "a view keeps its block"
    assert torch.equal(part, sent[5:7])
    del part
    assert posts[0].num_blocks_in_use == 1
    num_bytes = posts[0].arena_bytes
    for _ in range(20):
        (got,) = send(posts, sent)
        del got
    assert posts[0].arena_bytes == num_bytes
    assert torch.equal(second, sent)


def test_a_message_that_is_not_sent_is_taken_back() -> None:
    post = TensorPost(0)
    descriptors, _ = post.pack([torch.rand(SHARED_BYTES), make_large_sparse()], NEAR)
    assert post.num_blocks_in_use == 3
    post.withdraw(descriptors)
    assert post.num_blocks_in_use == 0
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnfitError):
        post.pack([torch.rand(SHARED_BYTES), freed], NEAR)
    assert post.num_blocks_in_use == 0


def test_a_peer_that_left_keeps_what_it_has() -> None:
    lender, borrower = TensorPost(0), TensorPost(1)
    (got,) = send((lender, borrower), torch.ones(SHARED_BYTES))
    lender.release_peer(2)
    assert lender.num_blocks_in_use == 1
    lender.release_peer(1)
    assert lender.num_blocks_in_use == 0
    (other,) = send((lender, borrower), torch.zeros(SHARED_BYTES))
    assert got.sum().item() == SHARED_BYTES
    assert other.sum().item() == 0
    lender.close()
    borrower.close()
    assert got.sum().item() == SHARED_BYTES
    got.add_(1)
    assert (lender.num_blocks_in_use, lender.arena_bytes) == (0, 0)


def test_others_get_their_messages_when_a_peer_leaves() -> None:
    lender, borrower = TensorPost(0), TensorPost(1)
    lender.pack([torch.zeros(SHARED_BYTES)], Route(2, "worker2", True, {}))
    descriptors, buffers = lender.pack([torch.ones(SHARED_BYTES)], NEAR)  # the same slab, not yet opened
    lender.release_peer(2)
    lender.trim()
    assert lender.num_blocks_in_use == 1
    assert borrower.unpack(descriptors, buffers, BACK)[0].sum().item() == SHARED_BYTES


def test_many_threads_may_send_at_once() -> None:
    posts = TensorPost(0), TensorPost(1)
    wrong: list[object] = []

    def work(number: int) -> None:
        held: list[torch.Tensor] = []
        for turn in range(60):
            value = number * 1000 + turn
            numel = SHARED_BYTES // 4 * (1 + turn % 3)
            held += send(posts, torch.full((numel,), float(value)))
            if not bool((held[-1] == value).all()):
                wrong.append(value)
            if turn % 4 == 3:
                if [int(tensor[-1]) - number * 1000 for tensor in held] != list(range(turn - 3, turn + 1)):
                    wrong.append(held)
                held.clear()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    assert posts[0].num_blocks_in_use == 0


def test_without_shared_memory_bytes_travel_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int, *, is_reclaimed: bool) -> None:
        raise ConfigError("no memory")

    monkeypatch.setattr(arena, "own_segment", refuse)
    posts = TensorPost(0), TensorPost(1)
    sent = torch.rand(SHARED_BYTES)
    _, buffers = posts[0].pack([sent], NEAR)
    assert len(buffers) == 1
    assert torch.equal(send(posts, sent)[0], sent)


def test_slabs_are_not_made_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_MAX_SLABS", 2)
    post = TensorPost(0)
    sent = torch.zeros(6 << 20, dtype=torch.uint8)  # two of them fill a slab
    assert [len(post.pack([sent], NEAR)[1]) for _ in range(5)] == [0, 0, 0, 0, 1]


def test_idle_memory_is_given_back() -> None:
    lender, borrower = Arena(kept_bytes=8 << 20), Borrower()
    sizes = [4 << 20, 5 << 20, 6 << 20]
    lent = [lender.put(torch.ones(size, dtype=torch.uint8), 1) for size in sizes]
    places = [place for place in lent if place is not None]
    held = [borrower.borrow(place, 0) for place in places]
    memories = [borrower.page_of(place, 0).memory for place in places]
    lender.trim()
    assert lender.num_bytes == sum(sizes), "what is lent stays"
    assert all(block.sum() == len(block) for block in held)
    del held[:2]
    lender.trim()
    assert lender.num_bytes <= 8 << 20
    assert memories[0][places[0].start] == 0, "the pages went back, though they are still mapped here"
    assert held[0].sum() == len(held[0])
    again = lender.put(torch.ones(4 << 20, dtype=torch.uint8), 1)
    assert again is not None
    assert borrower.borrow(again, 0).sum() == 4 << 20


@given(st.integers(1, 1 << 40))
def test_blocks_fit_and_waste_little(num_bytes: int) -> None:
    block_bytes = plan_block_bytes(num_bytes)
    assert block_bytes >= num_bytes
    assert block_bytes <= max(64 << 10, num_bytes * 1.25)
    assert block_bytes % 64 == 0
    assert plan_block_bytes(block_bytes) == block_bytes


def test_descriptors_that_lie_are_refused(posts: tuple[TensorPost, TensorPost]) -> None:
    lender, borrower = posts
    descriptors: Any
    descriptors, _ = lender.pack([torch.ones(SHARED_BYTES)], NEAR)
    ((dtype, shape, strides, grad, device, place),) = descriptors
    places = [
        Place(*place)._replace(start=8),
        Place(*place)._replace(num_bytes=1 << 40),
        Place(*place)._replace(flag=-1),
    ]
    for lie in places:
        with pytest.raises(WireError):
            borrower.unpack([(dtype, shape, strides, grad, device, tuple(lie))], [], BACK)
    with pytest.raises(WireError, match="bytes for a tensor"):
        borrower.unpack([(dtype, (3,), strides, grad, device, place)], [], BACK)
    inline = ("float32", (2,), None, False, None, None)
    for lies, buffers in [
        ([inline], []),
        ([inline], [bytes(8), bytes(8)]),
        ([inline], [bytes(12)]),
        ([("float32", (2,), (9,), False, None, None)], [bytes(8)]),
        ([("float32", (-2,), (1,), False, None, None)], [bytes(8)]),
        ([("no_such_dtype", (2,), None, False, None, None)], [bytes(8)]),
        ([("sparse_coo", (2,), True, False, [])], []),
    ]:
        with pytest.raises((WireError, RuntimeError, ValueError, KeyError)):
            borrower.unpack(lies, buffers, BACK)


def test_flags_fit_their_page() -> None:
    assert arena._MAX_BLOCKS <= mmap.PAGESIZE

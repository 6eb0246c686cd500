"""What messages hold beside pickles has one form, and nothing else passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.errors import RefusedError
from weft.rpc.message_forms import (
    check_bools,
    check_buffers,
    check_descriptors,
    check_direct,
    check_forks,
    check_index,
    check_notice,
    check_stub,
)
from weft.rpc.notices import read_notice, write_notice
from weft.rpc.owned import GlobalId
from weft.rpc.tensors import Route, TensorPost

FAR = Route(1, "worker1", False, {})
DENSE = ("float32", (2, 3), None, False, None, None)


def change(descriptor: tuple[Any, ...], place: int, value: object) -> tuple[Any, ...]:
    return (*descriptor[:place], value, *descriptor[place + 1 :])


TENSORS = [
    torch.ones(2, 3),
    torch.ones(3, 2).t(),
    torch.ones(10, 10)[::2, ::3],
    torch.ones(0, 5),
    torch.tensor(1.0),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(5, 5).expand(3, 5, 5),
    torch.empty(3, 3, device="meta"),
    torch.eye(3).to_sparse(),
    torch.ones(100_000),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.layout} {tuple(tensor.shape)}")
def test_what_workers_send_passes(tensor: torch.Tensor) -> None:
    post = TensorPost(0)
    descriptors, buffers = post.pack([tensor], FAR)
    assert check_descriptors(descriptors) == 1
    check_buffers(descriptors, list(map(len, buffers)))
    (again,) = post.unpack(descriptors, buffers, FAR)
    check_bools([again])
    with pytest.raises(RefusedError, match="the bytes of its tensors"):
        check_buffers(descriptors, [*map(len, buffers), 8])
    post.close()


COO = ("sparse_coo", (3,), False, False, (("int64", (1, 1), None, False, None, None), DENSE))


@pytest.mark.parametrize(
    "descriptor",
    [
        *[change(DENSE, 0, dtype) for dtype in ("float99", "qint8", 1, None, ["float32"], "__class__")],
        *[change(DENSE, 1, shape) for shape in ([2, 3], (-1,), (True,), (1.0,), ("2",), (1 << 63,), None)],
        *[change(DENSE, 1, shape) for shape in ((1 << 40, 1 << 40), (0, 1 << 40, 1 << 40), (1,) * 65)],
        *[
            change(DENSE, 2, strides)
            for strides in ((1,), (-1, 1), (1 << 62, 1), (True, 1), [3, 1], (1.0, 1))
        ],
        *[change(DENSE, 3, flag) for flag in (1, None, "True")],
        *[
            change(DENSE, 4, device)
            for device in ("cpu", "cuda:99", "cuda", "cuda:-1", "mps", 0, "meta:0", "")
        ],
        *[change(DENSE, 5, place) for place in ((), ("device", 1), ("back", 1), (1,) * 8, "/etc/passwd", 0)],
        *[change(COO, 0, layout) for layout in ("strided", "sparse_xyz", 1, ["sparse_coo"], None)],
        *[change(COO, 1, shape) for shape in ((-1,), (1 << 62, 4), "3")],
        *[change(COO, 2, flag) for flag in (1, None)],
        *[change(COO, 4, parts) for parts in ((), (DENSE,), (DENSE,) * 3, (COO, COO), [DENSE, DENSE])],
        (),
        None,
        DENSE[:4],
        [*DENSE],
    ],
    ids=repr,
)
def test_descriptions_of_other_forms_are_refused(descriptor: Any) -> None:
    with pytest.raises(RefusedError, match=r"has not the form|memory outside"):
        check_descriptors((descriptor,))


def test_bools_are_bools() -> None:
    check_bools([torch.tensor([True, False]), torch.ones(3)])
    lying = torch.tensor([1, 2], dtype=torch.uint8).view(torch.bool)
    for tensor in (
        lying,
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), lying, (2,), check_invariants=False),
    ):
        with pytest.raises(RefusedError, match="bools"):
            check_bools([tensor])


CALL: tuple[Any, ...] = (("module", "name"), (1, None), (1,), {"by": 2}, (DENSE,), None)
FORK = (1, (1, 2), (3, 4), 5, False)


def test_indexes_pass() -> None:
    assert check_direct(CALL)[:6] == CALL
    assert check_direct((*CALL, ((0, FORK),)))[6:] == (((0, FORK),), True)
    assert check_direct((0, (None,), (0,), {}, (DENSE,), (7, (0,))))
    assert check_index(((DENSE,), [FORK], (1, (0,)))) == ((DENSE,), [FORK], (1, (0,)))
    check_forks([FORK], 5)
    check_stub(None, 0)


@pytest.mark.parametrize(
    "index",
    [
        None, [], (), CALL[:5], [*CALL], (*CALL, (), ()), (*CALL, [(0, FORK)]), (*CALL, ((9, FORK),)),
        (*CALL, ((0, FORK), (0, FORK))), (*CALL, ((0, FORK, 1),)),
        change(CALL, 0, "name"), change(CALL, 0, ("a",)), change(CALL, 0, (1, 2)), change(CALL, 0, 7),
        change(CALL, 0, True), change(CALL, 0, 0), change(CALL, 1, [1, None]), change(CALL, 1, None),
        change(CALL, 2, (-1,)), change(CALL, 2, (5,)), change(CALL, 2, (True,)), change(CALL, 2, [1]),
        change(CALL, 2, (1, 1)), change(CALL, 2, ()), change(CALL, 3, {1: 2}), change(CALL, 3, []),
        change(CALL, 4, None), change(CALL, 4, (DENSE, DENSE)), change(CALL, 4, [DENSE]),
        change(CALL, 5, (1, ())), change(CALL, 5, (1, (1,))), change(CALL, 5, (-1, (0,))),
        change(CALL, 5, (1, [0])), change(CALL, 5, "x"),
    ],
    ids=repr,
)  # fmt: skip
def test_indexes_of_other_forms_are_refused(index: Any) -> None:
    with pytest.raises(RefusedError, match="has not the form"):
        check_direct(index)
    with pytest.raises(RefusedError, match="has not the form"):
        check_index(index)


@pytest.mark.parametrize(
    "fork",
    [(), None, FORK[:4], change(FORK, 0, -1), change(FORK, 1, (1,)), change(FORK, 2, [3, 4]),
     change(FORK, 3, 6),
     change(FORK, 4, 0), change(FORK, 0, "1"), change(FORK, 1, (1, 1 << 64))],
    ids=repr,
)  # fmt: skip
def test_forged_rrefs_are_refused(fork: Any) -> None:
    with pytest.raises(RefusedError, match="an RRef"):
        check_forks([fork], 5)


NOTICES: list[tuple[Any, ...]] = [
    ("hello", b"{}", None),
    ("hello", b"{}", (1, 2, 3, 4, 5)),
    ("ring",),
    ("to ring",),
    ("fetch", (1, 2), 0),
    ("bye", None),
    ("bye", "it failed"),
    ("lost",),
    ("drop", [((1, 2), (3, 4))]),
    ("fork", (1, 2), (3, 4), 5),
    ("forked", (1, 2), True),
    ("accept", (1, 2)),
    ("context ended", 7),
    ("context reached", 7),
    ("backward failed", 1, 2, 3, ["a", "b", b"c"]),
]


@pytest.mark.parametrize("notice", NOTICES, ids=repr)
@pytest.mark.parametrize("is_fenced", [False, True])
def test_notices_pass(notice: tuple[Any, ...], is_fenced: bool) -> None:
    assert read_notice(write_notice(notice), is_fenced=is_fenced) == notice
    said = tuple([GlobalId(*part) if part == (1, 2) else part for part in notice])
    assert read_notice(write_notice(said), is_fenced=is_fenced) == notice


@pytest.mark.parametrize("notice", NOTICES, ids=repr)
def test_notices_of_other_forms_are_refused(notice: tuple[Any, ...]) -> None:
    others = [
        (*notice, 1),
        notice[:-1],
        *[
            change(notice, place, value)
            for place in range(1, len(notice))
            for value in (-1, (), [1], {}, "\0" * 3)
        ],
    ]
    for other in others:
        if other in (("bye", "\0" * 3),):
            continue
        with pytest.raises(RefusedError):
            check_notice(other)

"""What calls carry: tensors of every kind, arrays, modules; what is a copy, and for how long it stays one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.rpc_bodies import places
from tests.rpc_bodies.places import give, keep, kept, tensor_facts
from tests.rpc_bodies.running import Worker

MEGABYTE = 1 << 20


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, of dtypes that know no equality too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.itemsize == 1 and a.dtype is not torch.bool:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return torch.equal(a, b)


def dtypes() -> list[torch.Tensor]:
    """One tensor of each dtype."""
    numbers = torch.arange(-3, 9).reshape(3, 4)
    plain = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    return [numbers.to(dtype) for dtype in plain] + [numbers.abs().to(torch.uint8)]


def shapes() -> list[torch.Tensor]:
    base = torch.arange(24.0)
    return [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        base.reshape(1, 1, 24),
        base.reshape(2, 3, 4).transpose(0, 2),
        base.reshape(4, 6)[:, 1:3],
        base[::3],
        base[5:],
        torch.tensor(2.0).expand(3, 4),
        base.reshape(2, 3, 4, 1).to(memory_format=torch.channels_last),
        base.as_strided((3, 3), (1, 1)),
    ]


def dtypes_and_shapes(w: Worker) -> None:
    for tensor in [*dtypes(), *shapes()]:
        got, facts = w.rpc.rpc_sync(w.next, tensor_and_facts, (tensor,))
        assert same_tensor(got, tensor), tensor
        assert facts == tensor_facts(tensor) | {"stride": facts["stride"]}


def tensor_and_facts(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return tensor, tensor_facts(tensor)


def strides_stay(w: Worker) -> None:
    for tensor in [torch.arange(24.0).reshape(4, 6).t(), torch.ones(2, 3, 4).permute(2, 0, 1)]:
        assert w.rpc.rpc_sync(w.next, tensor_facts, (tensor,))["stride"] == tensor.stride()
        assert w.rpc.rpc_sync(w.next, give, (tensor,)).stride() == tensor.stride()


def sizes(w: Worker) -> None:
    """Around the sizes where a library changes its way, up to 20 MB, there and back."""
    for num_bytes in [1, 1000, 16_384, 16_385, 65_535, 65_536, 65_540, MEGABYTE + 4, 20_000_000]:
        tensor = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
        got, total = w.rpc.rpc_sync(w.next, tensor_and_sum, (tensor,))
        assert total == tensor.sum()
        assert torch.equal(got, tensor)


def tensor_and_sum(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor, tensor.sum()


def many_in_one_message(w: Worker) -> None:
    tensors = [torch.full((1 + 37 * i,), float(i)) for i in range(300)]
    deep = {"er": [tensors[7], {"x": tensors[8]}]}
    nested = {"list": tensors[:100], "tuple": tuple(tensors[100:]), "deep": deep}
    got = w.rpc.rpc_sync(w.next, give, (nested,))
    for a, b in zip([*got["list"], *got["tuple"]], tensors, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(got["deep"]["er"][1]["x"], tensors[8])


def one_tensor_twice_is_one(w: Worker) -> None:
    tensor = torch.ones(3)
    assert w.rpc.rpc_sync(w.next, are_one, ([tensor, tensor],))


def are_one(pair: list[torch.Tensor]) -> bool:
    return pair[0] is pair[1]


def callees_may_write(w: Worker) -> None:
    """The callee's tensors are its own, and it may write to them; the caller's stay what they were."""
    for numel in [4, 30_000, MEGABYTE]:
        mine = torch.ones(numel)
        answer = w.rpc.rpc_sync(w.next, multiply_in_place, (mine, 5))
        assert answer.unique().tolist() == [5.0]
        assert mine.unique().tolist() == [1.0]
        answer += 1  # and so are the caller's


def multiply_in_place(thing: Any, by: int) -> Any:
    thing *= by
    return thing


def results_are_copies(w: Worker) -> None:
    """Neither side sees what the other does to its own, later."""
    for numel in [4, 30_000, MEGABYTE]:
        key = f"state for {w.name}, {numel}"
        w.rpc.rpc_sync(w.next, keep, (w.lib, key, torch.ones(numel)))
        first = w.rpc.rpc_sync(w.next, kept, (w.lib, key))
        first.fill_(9.0)
        second = w.rpc.rpc_sync(w.next, kept, (w.lib, key))
        assert second.unique().tolist() == [1.0]
        w.rpc.rpc_sync(w.next, multiply_kept, (w.lib, key, 3))
        assert second.unique().tolist() == [1.0]
        assert w.rpc.rpc_sync(w.next, kept, (w.lib, key)).unique().tolist() == [3.0]


def multiply_kept(lib: str, key: str, by: int) -> None:
    kept(lib, key).mul_(by)


def what_is_kept_stays(w: Worker) -> None:
    """Tensors that were received and kept don't change as more arrive, from either side."""
    num_sent, numel = 12, 50_000
    results = []
    for i in range(num_sent):
        tensor = torch.full((numel,), float(i))
        w.rpc.rpc_sync(w.next, keep, (w.lib, f"sent {i} by {w.name}", tensor))
        results.append(w.rpc.rpc_sync(w.next, give, (tensor + 0.5,)))
        tensor.fill_(-1)
    for i in range(num_sent):
        there = w.rpc.rpc_sync(w.next, kept, (w.lib, f"sent {i} by {w.name}"))
        assert there.unique().tolist() == [float(i)]
        assert results[i].unique().tolist() == [i + 0.5]


def arrays(w: Worker) -> None:
    for array in [
        np.arange(6).reshape(2, 3),
        np.arange(12.0).reshape(3, 4).T,
        np.ones(300_000, dtype=np.float32),
        np.array([]),
        np.array(["a", None, 3], dtype=object),
        np.zeros(3, dtype=[("x", "i4"), ("y", "f8")]),
    ]:
        got = w.rpc.rpc_sync(w.next, give, (array,))
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
    for numel in [5, 300_000]:
        mine = np.ones(numel)
        answer = w.rpc.rpc_sync(w.next, multiply_in_place, (mine, 4))
        assert np.unique(answer).tolist() == [4.0]
        assert np.unique(mine).tolist() == [1.0]
        answer += 1


def raw_bytes(w: Worker) -> None:
    for num_bytes in [0, 10, 100_000, 3 * MEGABYTE]:
        data = bytes(bytearray(range(256))) * (num_bytes // 256 + 1)
        assert w.rpc.rpc_sync(w.next, give, (data,)) == data
        got = w.rpc.rpc_sync(w.next, give, (bytearray(data),))
        assert got == bytearray(data)
        got.append(1)


def sparse_tensors(w: Worker) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    got = w.rpc.rpc_sync(w.next, give, (dense.to_sparse(),))
    assert got.layout is torch.sparse_coo
    assert torch.equal(got.to_dense(), dense)
    added = w.rpc.rpc_sync(w.next, torch.add, (dense.to_sparse(), dense.to_sparse()))
    assert torch.equal(added.to_dense(), dense * 2)
    hybrid = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (2, 3), check_invariants=True)
    got = w.rpc.rpc_sync(w.next, give, (hybrid,))
    assert not got.is_coalesced()
    assert torch.equal(got.to_dense(), hybrid.to_dense())


def modules(w: Worker) -> None:
    mine = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    got = w.rpc.rpc_sync(w.next, give, (mine,))
    assert [name for name, _ in got.named_parameters()] == [name for name, _ in mine.named_parameters()]
    for key, value in mine.state_dict().items():
        assert torch.equal(got.state_dict()[key], value)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in got.parameters())
    parameter = w.rpc.rpc_sync(w.next, tensor_facts, (nn.Parameter(torch.ones(2)),))
    assert parameter["type"] == "Parameter"
    assert parameter["requires_grad"]


def requires_grad(w: Worker) -> None:
    """A tensor that arrives is a leaf there; whether it asks for gradients is as it was."""
    leaf = torch.ones(3, requires_grad=True)
    for tensor in [leaf, torch.ones(3)]:
        facts = w.rpc.rpc_sync(w.next, tensor_facts, (tensor,))
        assert facts["is_leaf"]
        assert facts["requires_grad"] == tensor.requires_grad
    back = w.rpc.rpc_sync(w.next, give, (leaf,))
    assert back.grad_fn is None


def later_writes_are_not_sent(w: Worker) -> None:
    """The caller may write to its tensors as soon as the call has returned its future."""
    for numel in [4, 10_000, 100_000, MEGABYTE]:
        mine = torch.ones(numel)
        array = np.ones(numel)
        key = f"writes {numel} {w.name}"
        waiting = w.rpc.rpc_async(w.next, sum_behind_gate, (w.lib, key, mine, array))
        mine.fill_(2.0)
        array.fill(2.0)
        w.rpc.rpc_sync(w.next, places.open_gate, (w.lib, key))
        assert waiting.wait() == (numel, numel)
        for _ in range(5):
            mine.fill_(1.0)
            futures = [w.rpc.rpc_async(w.next, torch.sum, (mine,)) for _ in range(3)]
            mine.fill_(2.0)
            assert [future.wait().item() for future in futures] == [numel] * 3


def sum_behind_gate(lib: str, key: str, tensor: torch.Tensor, array: np.ndarray) -> tuple[float, float]:
    places.pass_gate(lib, key)
    return tensor.sum().item(), float(array.sum())


def odd_tensors(w: Worker) -> None:
    """Of these torch loses something on the way, or refuses."""
    complex_numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(w.rpc.rpc_sync(w.next, give, (complex_numbers.conj(),)), complex_numbers.conj())
    imaginary = complex_numbers.conj().imag  # has the negative bit
    assert torch.equal(w.rpc.rpc_sync(w.next, give, (imaginary,)), imaginary)
    csr = torch.tensor([[0.0, 2.0], [1.0, 0.0]]).to_sparse_csr()
    got = w.rpc.rpc_sync(w.next, give, (csr,))
    assert got.layout is torch.sparse_csr
    assert torch.equal(got.to_dense(), csr.to_dense())
    for dtype in [torch.uint16, torch.uint32, torch.uint64]:
        unsigned = torch.tensor([1, 2, 3]).to(dtype)
        assert torch.equal(w.rpc.rpc_sync(w.next, give, (unsigned,)), unsigned)
    with torch.inference_mode():
        inferred = torch.ones(3)
    assert w.rpc.rpc_sync(w.next, give, (inferred,)).sum() == 3
    part = torch.arange(MEGABYTE)[10:14]  # of large memory, of which only this goes
    assert w.rpc.rpc_sync(w.next, multiply_in_place, (part, 2)).tolist() == [20, 22, 24, 26]
    assert part.tolist() == [10, 11, 12, 13]
    # Elements that share memory get memory of their own where they arrive.
    assert w.rpc.rpc_sync(w.next, torch.mul, (torch.ones(1).expand(4), torch.arange(4))).tolist() == [
        0,
        1,
        2,
        3,
    ]


BODIES = [
    dtypes_and_shapes,
    strides_stay,
    sizes,
    many_in_one_message,
    one_tensor_twice_is_one,
    callees_may_write,
    results_are_copies,
    what_is_kept_stays,
    arrays,
    raw_bytes,
    sparse_tensors,
    modules,
    requires_grad,
]
WEFT_ONLY = [later_writes_are_not_sent, odd_tensors]

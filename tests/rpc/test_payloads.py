"""What calls carry: tensors of every kind, arrays, modules; what is a copy, and for how long it stays one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import run_on
from tests.rpc.remote_functions import give, keep, kept, open_gate, pass_gate, tensor_facts
from tests.rpc.workers import Worker, weft_only

pytestmark = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)

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


def test_dtypes_and_shapes_arrive(worker: Worker) -> None:
    for tensor in [*dtypes(), *shapes()]:
        got, facts = worker.rpc.rpc_sync(worker.next, tensor_and_facts, (tensor,))
        assert same_tensor(got, tensor), tensor
        assert facts == tensor_facts(tensor) | {"stride": facts["stride"]}


def tensor_and_facts(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return tensor, tensor_facts(tensor)


def test_strides_stay(worker: Worker) -> None:
    for tensor in [torch.arange(24.0).reshape(4, 6).t(), torch.ones(2, 3, 4).permute(2, 0, 1)]:
        assert worker.rpc.rpc_sync(worker.next, tensor_facts, (tensor,))["stride"] == tensor.stride()
        assert worker.rpc.rpc_sync(worker.next, give, (tensor,)).stride() == tensor.stride()


def test_all_sizes_arrive(worker: Worker) -> None:
    """Around the sizes where a library changes its way, up to 20 MB, there and back."""
    for num_bytes in [1, 1000, 16_384, 16_385, 65_535, 65_536, 65_540, MEGABYTE + 4, 20_000_000]:
        tensor = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
        got, total = worker.rpc.rpc_sync(worker.next, tensor_and_sum, (tensor,))
        assert total == tensor.sum()
        assert torch.equal(got, tensor)


def tensor_and_sum(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor, tensor.sum()


def test_many_go_in_one_message(worker: Worker) -> None:
    tensors = [torch.full((1 + 37 * i,), float(i)) for i in range(300)]
    deep = {"er": [tensors[7], {"x": tensors[8]}]}
    nested = {"list": tensors[:100], "tuple": tuple(tensors[100:]), "deep": deep}
    got = worker.rpc.rpc_sync(worker.next, give, (nested,))
    for a, b in zip([*got["list"], *got["tuple"]], tensors, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(got["deep"]["er"][1]["x"], tensors[8])


def test_one_tensor_twice_is_one(worker: Worker) -> None:
    tensor = torch.ones(3)
    assert worker.rpc.rpc_sync(worker.next, are_one, ([tensor, tensor],))


def are_one(pair: list[torch.Tensor]) -> bool:
    return pair[0] is pair[1]


def test_callees_may_write(worker: Worker) -> None:
    """The callee's tensors are its own, and it may write to them; the caller's stay what they were."""
    for numel in [4, 30_000, MEGABYTE]:
        mine = torch.ones(numel)
        answer = worker.rpc.rpc_sync(worker.next, multiply_in_place, (mine, 5))
        assert answer.unique().tolist() == [5.0]
        assert mine.unique().tolist() == [1.0]
        answer += 1  # and so are the caller's


def multiply_in_place(thing: Any, by: int) -> Any:
    thing *= by
    return thing


def test_results_are_copies(worker: Worker) -> None:
    """Neither side sees what the other does to its own, later."""
    for numel in [4, 30_000, MEGABYTE]:
        key = f"state for {worker.name}, {numel}"
        worker.rpc.rpc_sync(worker.next, keep, (worker.lib, key, torch.ones(numel)))
        first = worker.rpc.rpc_sync(worker.next, kept, (worker.lib, key))
        first.fill_(9.0)
        second = worker.rpc.rpc_sync(worker.next, kept, (worker.lib, key))
        assert second.unique().tolist() == [1.0]
        worker.rpc.rpc_sync(worker.next, multiply_kept, (worker.lib, key, 3))
        assert second.unique().tolist() == [1.0]
        assert worker.rpc.rpc_sync(worker.next, kept, (worker.lib, key)).unique().tolist() == [3.0]


def multiply_kept(lib: str, key: str, by: int) -> None:
    kept(lib, key).mul_(by)


def test_what_is_kept_stays_as_more_arrives(worker: Worker) -> None:
    """Tensors that were received and kept don't change as more arrive, from either side."""
    num_sent, numel = 12, 50_000
    results = []
    for i in range(num_sent):
        tensor = torch.full((numel,), float(i))
        worker.rpc.rpc_sync(worker.next, keep, (worker.lib, f"sent {i} by {worker.name}", tensor))
        results.append(worker.rpc.rpc_sync(worker.next, give, (tensor + 0.5,)))
        tensor.fill_(-1)
    for i in range(num_sent):
        there = worker.rpc.rpc_sync(worker.next, kept, (worker.lib, f"sent {i} by {worker.name}"))
        assert there.unique().tolist() == [float(i)]
        assert results[i].unique().tolist() == [i + 0.5]


def test_arrays_are_copies(worker: Worker) -> None:
    for array in [
        np.arange(6).reshape(2, 3),
        np.arange(12.0).reshape(3, 4).T,
        np.ones(300_000, dtype=np.float32),
        np.array([]),
        np.array(["a", None, 3], dtype=object),
        np.zeros(3, dtype=[("x", "i4"), ("y", "f8")]),
    ]:
        got = worker.rpc.rpc_sync(worker.next, give, (array,))
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
    for numel in [5, 300_000]:
        mine = np.ones(numel)
        answer = worker.rpc.rpc_sync(worker.next, multiply_in_place, (mine, 4))
        assert np.unique(answer).tolist() == [4.0]
        assert np.unique(mine).tolist() == [1.0]
        answer += 1


def test_raw_bytes_arrive(worker: Worker) -> None:
    for num_bytes in [0, 10, 100_000, 3 * MEGABYTE]:
        data = bytes(bytearray(range(256))) * (num_bytes // 256 + 1)
        assert worker.rpc.rpc_sync(worker.next, give, (data,)) == data
        got = worker.rpc.rpc_sync(worker.next, give, (bytearray(data),))
        assert got == bytearray(data)
        got.append(1)


def test_sparse_tensors_arrive(worker: Worker) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    got = worker.rpc.rpc_sync(worker.next, give, (dense.to_sparse(),))
    assert got.layout is torch.sparse_coo
    assert torch.equal(got.to_dense(), dense)
    added = worker.rpc.rpc_sync(worker.next, torch.add, (dense.to_sparse(), dense.to_sparse()))
    assert torch.equal(added.to_dense(), dense * 2)
    hybrid = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (2, 3), check_invariants=True)
    got = worker.rpc.rpc_sync(worker.next, give, (hybrid,))
    assert not got.is_coalesced()
    assert torch.equal(got.to_dense(), hybrid.to_dense())


def test_modules_arrive(worker: Worker) -> None:
    mine = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    got = worker.rpc.rpc_sync(worker.next, give, (mine,))
    assert [name for name, _ in got.named_parameters()] == [name for name, _ in mine.named_parameters()]
    for key, value in mine.state_dict().items():
        assert torch.equal(got.state_dict()[key], value)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in got.parameters())
    parameter = worker.rpc.rpc_sync(worker.next, tensor_facts, (nn.Parameter(torch.ones(2)),))
    assert parameter["type"] == "Parameter"
    assert parameter["requires_grad"]


def test_what_arrives_is_a_leaf(worker: Worker) -> None:
    """A tensor that arrives is a leaf there; whether it asks for gradients is as it was."""
    leaf = torch.ones(3, requires_grad=True)
    for tensor in [leaf, torch.ones(3)]:
        facts = worker.rpc.rpc_sync(worker.next, tensor_facts, (tensor,))
        assert facts["is_leaf"]
        assert facts["requires_grad"] == tensor.requires_grad
    back = worker.rpc.rpc_sync(worker.next, give, (leaf,))
    assert back.grad_fn is None


@weft_only
def test_later_writes_are_not_sent(worker: Worker) -> None:
    """The caller may write to its tensors as soon as the call has returned its future."""
    for numel in [4, 10_000, 100_000, MEGABYTE]:
        mine = torch.ones(numel)
        array = np.ones(numel)
        key = f"writes {numel} {worker.name}"
        waiting = worker.rpc.rpc_async(worker.next, sum_behind_gate, (worker.lib, key, mine, array))
        mine.fill_(2.0)
        array.fill(2.0)
        worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, key))
        assert waiting.wait() == (numel, numel)
        for _ in range(5):
            mine.fill_(1.0)
            futures = [worker.rpc.rpc_async(worker.next, torch.sum, (mine,)) for _ in range(3)]
            mine.fill_(2.0)
            assert [future.wait().item() for future in futures] == [numel] * 3


def sum_behind_gate(lib: str, key: str, tensor: torch.Tensor, array: np.ndarray) -> tuple[float, float]:
    pass_gate(lib, key)
    return tensor.sum().item(), float(array.sum())


@weft_only
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_odd_tensors_arrive(worker: Worker) -> None:
    """Of these torch loses something on the way, or refuses."""
    complex_numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(
        worker.rpc.rpc_sync(worker.next, give, (complex_numbers.conj(),)), complex_numbers.conj()
    )
    imaginary = complex_numbers.conj().imag  # has the negative bit
    assert torch.equal(worker.rpc.rpc_sync(worker.next, give, (imaginary,)), imaginary)
    csr = torch.tensor([[0.0, 2.0], [1.0, 0.0]]).to_sparse_csr()
    got = worker.rpc.rpc_sync(worker.next, give, (csr,))
    assert got.layout is torch.sparse_csr
    assert torch.equal(got.to_dense(), csr.to_dense())
    for dtype in [torch.uint16, torch.uint32, torch.uint64]:
        unsigned = torch.tensor([1, 2, 3]).to(dtype)
        assert torch.equal(worker.rpc.rpc_sync(worker.next, give, (unsigned,)), unsigned)
    with torch.inference_mode():
        inferred = torch.ones(3)
    assert worker.rpc.rpc_sync(worker.next, give, (inferred,)).sum() == 3
    part = torch.arange(MEGABYTE)[10:14]  # of large memory, of which only this goes
    assert worker.rpc.rpc_sync(worker.next, multiply_in_place, (part, 2)).tolist() == [20, 22, 24, 26]
    assert part.tolist() == [10, 11, 12, 13]
    # Elements that share memory get memory of their own where they arrive.
    assert worker.rpc.rpc_sync(
        worker.next, torch.mul, (torch.ones(1).expand(4), torch.arange(4))
    ).tolist() == [
        0,
        1,
        2,
        3,
    ]


# -- what a function keeps of a tensor that it was given and returns is its own ------------------------

NUMEL = 1 << 16  # goes through shared memory

_kept: dict[tuple[int, str], Any] = {}


def return_it(x: torch.Tensor) -> torch.Tensor:
    return x


def change_it(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def keep_it(key: tuple[int, str], x: torch.Tensor) -> torch.Tensor:
    _kept[key] = KEEPERS[key[1]](x)
    return x


def sum_kept(key: tuple[int, str]) -> float:
    return float(_read(_kept.pop(key)))


def _read(kept: Any) -> Any:
    if callable(kept):
        got: Any = kept()
        return got.sum()
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept).sum()
    return kept.sum()


KEEPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x.view(2, -1),
    "an array": lambda x: x.numpy(),
    "its storage": lambda x: x.untyped_storage(),
    "a closure": lambda x: lambda: x,
}


@weft_only
def test_what_is_kept_in_any_way_stays(worker: Worker) -> None:
    for name in KEEPERS:
        key = (worker.rank, name)
        sent = torch.ones(NUMEL)
        got = worker.rpc.rpc_sync(worker.next, keep_it, (key, sent))
        assert torch.equal(got, torch.ones(NUMEL))
        got.zero_()
        assert worker.rpc.rpc_sync(worker.next, sum_kept, (key,)) == NUMEL, name
        assert torch.equal(sent, torch.ones(NUMEL))


@weft_only
def test_what_comes_back_is_the_callers(worker: Worker) -> None:
    """Many at once: no memory is used twice."""
    sent = [torch.full((NUMEL,), float(number)) for number in range(8)]
    for function, factor in ((return_it, 1), (change_it, 2)):
        futures = [worker.rpc.rpc_async(worker.next, function, (one,)) for one in sent]
        got = [future.wait() for future in futures]
        again = [worker.rpc.rpc_sync(worker.after_next, return_it, (one,)) for one in got]
        for number, (one, other) in enumerate(zip(got, again, strict=True)):
            other += 1
            assert torch.equal(one, torch.full((NUMEL,), float(factor * number)))
            assert torch.equal(other, one + 1)
        assert [one[0] for one in sent] == list(range(8))

"""What a function keeps of a tensor that it was given and returns is its own, whatever the caller does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.rpc_bodies.running import Worker

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
        return kept().sum()
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


def what_is_kept_stays(w: Worker) -> None:
    for name in KEEPERS:
        key = (w.rank, name)
        sent = torch.ones(NUMEL)
        got = w.rpc.rpc_sync(w.next, keep_it, (key, sent))
        assert torch.equal(got, torch.ones(NUMEL))
        got.zero_()
        assert w.rpc.rpc_sync(w.next, sum_kept, (key,)) == NUMEL, name
        assert torch.equal(sent, torch.ones(NUMEL))


def what_comes_back_is_the_callers(w: Worker) -> None:
    """Many at once: no memory is used twice."""
    sent = [torch.full((NUMEL,), float(number)) for number in range(8)]
    for function, factor in ((return_it, 1), (change_it, 2)):
        futures = [w.rpc.rpc_async(w.next, function, (one,)) for one in sent]
        got = [future.wait() for future in futures]
        again = [w.rpc.rpc_sync(w.after_next, return_it, (one,)) for one in got]
        for number, (one, other) in enumerate(zip(got, again, strict=True)):
            other += 1
            assert torch.equal(one, torch.full((NUMEL,), float(factor * number)))
            assert torch.equal(other, one + 1)
        assert [one[0] for one in sent] == list(range(8))


BODIES = [what_is_kept_stays, what_comes_back_is_the_callers]

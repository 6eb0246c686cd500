"""Gradient hooks under compile: the numbers that they give without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compiler.pairs import LIMITS, MAY_WARN, WIDTH, WRAPS, Pair, filled, fresh, inner, make_rows
from tests.ranks import run_on
from weft import GradBucket, comm
from weft.comm_hooks.debugging_hooks import noop_hook
from weft.comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from weft.comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook

pytestmark = MAY_WARN

ROWS = 24


def wide() -> nn.Module:
    """Matrices large enough that PowerSGD makes factors of them."""
    layers = [nn.Linear(WIDTH, ROWS), nn.Tanh(), nn.Linear(ROWS, ROWS), nn.Tanh(), nn.Linear(ROWS, 2)]
    return filled(nn.Sequential(*layers), dtype=torch.float32)


def loss_of(model: Any, salt: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return model(make_rows(rank, salt).float()).square().mean()


def own_hook(state: list[int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A user's: takes the largest instead of the mean, and counts its calls."""
    state.append(bucket.index())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(comm.all_reduce(bucket.buffer(), dist.ReduceOp.MAX).wait())
    return done


def torch_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A user's that calls torch.distributed itself: twice the mean."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    size = dist.get_world_size()
    return work.get_future().then(lambda future: future.value()[0].mul_(2 / size))


def power_sgd_state() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


# Each with a function that makes its state.
HOOKS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "allreduce": (allreduce_hook, lambda: None),
    "fp16": (fp16_compress_hook, lambda: None),
    "bf16": (bf16_compress_hook, lambda: None),
    "quantization_pertensor": (quantization_pertensor_hook, lambda: None),
    "quantization_perchannel": (quantization_perchannel_hook, lambda: None),
    "noop": (noop_hook, lambda: None),
    "powerSGD": (powerSGD_hook, power_sgd_state),
    "own": (own_hook, list),
    "torch_distributed": (torch_hook, lambda: None),
}


EVERYDAY = ["fp16", "own"]
OTHERS = [name for name in HOOKS if name not in EVERYDAY]


@run_on(weft=2, name=EVERYDAY, kind=["plain"], wrap=["replicate"], **LIMITS)
@run_on(weft=2, name=OTHERS, kind=["plain"], wrap=["replicate"], full=True, **LIMITS)
@run_on(weft=2, name=list(HOOKS), kind=["plain"], wrap=["ddp"], full=True, **LIMITS)
@run_on(gloo=2, name=list(HOOKS), kind=["plain"], wrap=WRAPS, full=True, **LIMITS)
@run_on(gloo=2, name=["allreduce"], kind=["weft"], wrap=["replicate"], **LIMITS)
@run_on(gloo=2, name=list(HOOKS)[1:], kind=["weft"], wrap=["replicate"], full=True, **LIMITS)
def test_same_as_eager(name: str, kind: str, wrap: str) -> None:
    """Several buckets, several steps, the same bits."""
    fresh()
    hook, make_state = HOOKS[name]
    pair = Pair(wide, wrap, bucket_cap_mb=0.002)
    states = [make_state(), make_state()]
    for model, state in zip((pair.plain, pair.under), states, strict=True):
        model.register_comm_hook(state, hook)
    is_mean = name == "allreduce"
    for salt in range(5):
        pair.step(salt, loss_of, kind=kind, with_bare=is_mean)
    if name == "own":
        assert sorted(states[1]) == sorted(states[0]), "the hook was called for other buckets"
        assert len(set(states[1])) > 1, "one bucket shows less than several"
    assert_did_something(pair, name)


def assert_did_something(pair: Pair, name: str) -> None:
    """Ranks end with one gradient, except where nothing is sent."""
    for param in inner(pair.under, pair.wrap).parameters():
        assert param.grad is not None
        others = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(others, param.grad.contiguous())
        is_same = all(torch.equal(other, others[0]) for other in others)
        assert is_same == (name != "noop"), name

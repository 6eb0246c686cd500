"""An owner's optimizer beside torch's own: equal parameters, equal gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from weft.dist_autograd.optimizer import LocalOptimizer

Give = Callable[[dict[Tensor, Tensor]], None]  # the fixture `give`: it sets what the context holds

TOLERANCES = {torch.float32: (1e-6, 1e-7), torch.float64: (1e-13, 1e-14)}  # relative, absolute


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rows_of(param: Tensor, rows: list[int], seed: int) -> Tensor:
    """A sparse gradient with these rows, as they are: one may be there twice."""
    values = random(len(rows), *param.shape[1:], seed=seed, dtype=param.dtype)
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.long), values, param.shape)


def check_close(found: Any, wanted: Any, dtype: torch.dtype = torch.float32) -> None:
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def step_local(give: Give, local: LocalOptimizer, params: list[Tensor], grads: list[Tensor | None]) -> None:
    pairs = zip(params, grads, strict=True)
    give({param: grad.clone() for param, grad in pairs if grad is not None})
    local.step(0)


def step_plain(plain: optim.Optimizer, params: list[Tensor], grads: list[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    plain.step()


class Both:
    """An owner's optimizer and torch's own, for equal parameters, which get equal gradients."""

    def __init__(
        self, give: Give, kind: Callable[..., optim.Optimizer], values: Sequence[Tensor], **options: Any
    ) -> None:
        self._give = give
        self.params: list[Tensor] = [nn.Parameter(value.clone()) for value in values]
        self.wanted: list[Tensor] = [nn.Parameter(value.clone()) for value in values]
        self.local = LocalOptimizer(kind, self.params, (), options)
        self.plain = kind(self.wanted, **options)

    def step(self, *grads: Tensor | None) -> None:
        step_local(self._give, self.local, self.params, list(grads))
        step_plain(self.plain, self.wanted, list(grads))

    def step_rows(self, *rows: list[int] | None, seed: int) -> None:
        """Step with gradients that have these rows; None: no gradient."""
        pairs = zip(self.params, rows, strict=True)
        self.step(*(None if some is None else rows_of(param, some, seed) for param, some in pairs))

    def check(self) -> None:
        """Parameters and state are those of torch's optimizer."""
        dtype = self.params[0].dtype
        check_close(self.params, self.wanted, dtype)
        check_close(self.local.state_dict()["state"], self.plain.state_dict()["state"], dtype)

"""Mixed precision leaves the module as it found it."""

from __future__ import annotations

import collections
import contextlib
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft import DistributedDataParallel
from weft.data_parallel import MixedPrecision
from weft.testing import on_ranks

LOW = MixedPrecision(param_dtype=torch.bfloat16)


class Interrupted(nn.Linear):
    """The user presses Ctrl-C while it runs, if `is_now`."""

    is_now = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.is_now:
            raise KeyboardInterrupt
        return super().forward(rows)


@on_ranks(2)
def test_a_module_wrapped_again_keeps_its_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    before = list(module.parameters())
    for _ in range(2):
        model = DistributedDataParallel(module, mixed_precision=LOW)
        model(torch.ones(2, 3)).sum().backward()
        assert [id(param) for param in module.parameters()] == [id(param) for param in before]
        del model
        gc.collect()


@on_ranks(2)
def test_a_module_that_was_interrupted_keeps_its_parameters() -> None:
    module = nn.Sequential(Interrupted(3, 3))
    model = DistributedDataParallel(module, mixed_precision=LOW)
    before = list(module.parameters())
    module[0].is_now = True
    with contextlib.suppress(KeyboardInterrupt):
        model(torch.ones(2, 3))
    module[0].is_now = False
    model(torch.ones(2, 3))
    assert [id(param) for param in module.parameters()] == [id(param) for param in before]


@on_ranks(2)
def test_inputs_may_come_in_any_mapping() -> None:
    class Reads(nn.Linear):
        def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(given["rows"])

    model = DistributedDataParallel(Reads(3, 3), mixed_precision=LOW)
    given = collections.defaultdict(list, rows=torch.ones(2, 3))
    assert model(given).dtype == torch.bfloat16


@on_ranks(2)
def test_a_model_in_mixed_precision_can_be_pickled() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)), mixed_precision=LOW)
    again = pickle.loads(pickle.dumps(model))
    assert again(torch.ones(2, 3)).dtype == torch.bfloat16


@on_ranks(2)
def test_reductions_follow_the_model_to_another_group() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False), mixed_precision=LOW)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    rows = torch.full((2, 3), dist.get_rank() + 1.0)
    model(rows).sum().backward()
    model._update_process_group(alone)
    model.zero_grad()
    model(rows).sum().backward()
    assert torch.equal(model.module.weight.grad, rows.sum(0, keepdim=True))


@pytest.mark.parametrize("num_heads", [1, 2])
@on_ranks(2)
def test_a_module_may_use_its_childs_weight_itself(num_heads: int) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, num_heads)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.attention(rows, rows, rows)[0]

    model = DistributedDataParallel(Attends(), mixed_precision=LOW)
    model(torch.ones(2, 3, 4)).sum().backward()

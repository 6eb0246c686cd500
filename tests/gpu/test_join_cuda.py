"""Join on CUDA: torch's own SyncBatchNorm inside DDP with uneven inputs, several ranks on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from tests.join_bodies.norms import WIDTH, batch, make_model
from weft import DistributedDataParallel
from weft.join import Join, Joinable, JoinHook

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_float(norm: Any) -> nn.Sequential:
    return nn.Sequential(*make_model(norm)).float()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def check_sync_batch_norm() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_float(nn.SyncBatchNorm).cuda(), bucket_cap_mb=0.0001)
    alone = make_float(nn.BatchNorm1d)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, alone)]
    with Join([model]):
        for step in range(1 + rank):
            active = [other for other in range(size) if step <= other]
            for optimizer in optimizers:
                optimizer.zero_grad()
            # DDP divides by the size of the group, so the single process does as well.
            (model(batch(rank, step).float().cuda()) ** 2).sum().backward()
            rows = torch.cat([batch(other, step).float() for other in active])
            ((alone(rows) ** 2).sum() / size).backward()
            for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
                assert param.grad is not None
                assert expected.grad is not None
                assert_close(param.grad, expected.grad)
            for optimizer in optimizers:
                optimizer.step()
            assert_close(model.module[1].running_mean, alone[1].running_mean)
            assert_close(model.module[1].running_var, alone[1].running_var)
            metric = torch.ones(1, device="cuda")
            dist.all_reduce(metric)
            assert metric.item() == len(active)
    dist.barrier()


def check_handles() -> None:
    """A step's handle holds the number of active ranks, for every stream that asks."""
    model = DistributedDataParallel(nn.Linear(WIDTH, 1).cuda())
    size = dist.get_world_size()
    with Join([model]):
        for _ in range(3):
            rows = torch.ones(2, WIDTH, device="cuda")
            model(rows).sum().backward()
    one = Counting()
    with Join([one]):
        for step in range(2 + dist.get_rank()):
            handle = Join.notify_join_context(one)
            assert handle is not None
            expected = size - max(0, step - 1)
            with torch.cuda.stream(torch.cuda.Stream()):
                assert (handle.wait() * 2).tolist() == [2 * expected]
            assert handle.wait().tolist() == [expected]


class Counting(Joinable):
    """Communicates nothing of its own."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", [check_sync_batch_norm, check_handles])
def test_on_one_gpu(body: Any, ranks: int, kind: Any) -> None:
    weft.launch(body, ranks=ranks, kind=kind, backend="weft", timeout=120)

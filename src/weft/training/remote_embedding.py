"""Strategy "rpc": the embedding lives on rank 0, and every rank calls it; the rest is data parallel.

Each rank's backward goes through its own dist_autograd context, so rank 0 has one gradient of the table for
each rank. It steps once all of them are in, with their mean: the update that one process would make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.optim import Optimizer

from weft import dist_autograd, rpc

OWNER = 0  # the rank that has the table


class EmbeddingServer:
    """The table and its optimizer, on the rank that owns them."""

    def __init__(
        self, table: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], num_ranks: int
    ) -> None:
        self.table = table
        self.optimizer = optimizer(table.parameters())
        self._num_ranks = num_ranks
        self._contexts: list[int] = []
        self._stepped: Future[None] = Future()
        self._mutex = threading.Lock()  # calls run on several threads

    def step(self, context_id: int) -> Future[None]:
        """Say that a rank's gradients are in this context; answered when all ranks' are, and are applied."""
        with self._mutex:
            self._contexts.append(context_id)
            stepped = self._stepped
            if len(self._contexts) == self._num_ranks:
                try:
                    self._apply()
                    stepped.set_result(None)
                except Exception as error:  # all ranks hear of it, not only the one that came last
                    stepped.set_exception(cast(Any, error))
                finally:
                    self._contexts, self._stepped = [], Future()
        return stepped

    def _apply(self) -> None:
        # In the order of contexts and not of arrival: sums come out the same in every run.
        found = [dist_autograd.get_gradients(context_id) for context_id in sorted(self._contexts)]
        for param in self.table.parameters():
            parts = [gradients[param] for gradients in found if param in gradients]
            param.grad = torch.stack(parts).sum(dim=0) / self._num_ranks if parts else None
        self.optimizer.step()


# The owner's server. A call names a function, not an object of the callee's, so the function finds it here.
_serving: list[EmbeddingServer] = []


class RemoteEmbedding(nn.Module):
    """Stands for the table in the model of each rank. It has no parameters."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens, from the rank that has them."""
        return rpc.rpc_sync(OWNER, _look_up, (tokens,))

    def step(self, context_id: int) -> None:
        """Let the owner step with the gradients of this context and those of all others; waits for it."""
        rpc.rpc_sync(OWNER, _step, (context_id,))


def share_embedding(
    table: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device
) -> EmbeddingServer | None:
    """Start RPC and put the table on its owner; gives the server there, None on the other ranks.

    All ranks of the world call this, each with its own device. `end_sharing` ends it.
    """
    rank = dist.get_rank()
    server = EmbeddingServer(table, optimizer, dist.get_world_size()) if rank == OWNER else None
    if server is not None:
        _serving[:] = [server]
    options = rpc.TensorPipeRpcBackendOptions()
    if device.type == "cuda":
        options.set_device_map(f"rank{OWNER}", {device: torch.device("cuda", 0)})
    rpc.init_rpc(f"rank{rank}", rpc_backend_options=options)  # nobody can call before all are here
    return server


def end_sharing(*, waits: bool = True) -> None:
    """Wait until no rank calls any more, and stop RPC; or stop at once."""
    rpc.shutdown(graceful=waits)
    _serving.clear()


def _look_up(tokens: torch.Tensor) -> torch.Tensor:
    return _serving[0].table(tokens)


@rpc.functions.async_execution
def _step(context_id: int) -> Future[None]:
    return _serving[0].step(context_id)

"""A parameter server: one worker owns the weight, the others send gradients and get new values back.

python examples/parameter_server.py
"""

import threading

import torch
from torch.futures import Future, wait_all

import weft
from weft import rpc


class ParameterServer:
    """Steps when all trainers' gradients are in. `push` is answered then, and keeps no thread waiting."""

    def __init__(self, num_trainers: int) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(4, 1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.num_trainers, self.grads, self.updated = num_trainers, list[torch.Tensor](), Future()
        self.lock = threading.Lock()  # calls run on several threads

    @rpc.functions.async_execution
    def push(self, grad: torch.Tensor) -> Future:
        with self.lock:
            self.grads.append(grad)
            updated = self.updated
            if len(self.grads) == self.num_trainers:
                self.weight.grad = torch.stack(self.grads).mean(dim=0)
                self.optimizer.step()
                self.grads, self.updated = [], Future()
                updated.set_result(self.weight.detach().clone())
        return updated


def train(server: rpc.RRef, num_steps: int) -> list[float]:
    """Learn to add four numbers, on a trainer, and give the losses."""
    generator = torch.Generator().manual_seed(rpc.get_worker_info().id)
    weight, x, losses = torch.zeros(4, 1), torch.randn(32, 4, generator=generator), list[float]()
    for _ in range(num_steps):
        loss = (x @ weight.requires_grad_() - x.sum(dim=1, keepdim=True)).square().mean()
        updated = server.rpc_async().push(torch.autograd.grad(loss, weight)[0])
        x = torch.randn(32, 4, generator=generator)  # the next batch, while the gradient travels
        losses.append(loss.item())
        weight = updated.wait()
    return losses


def job(num_steps: int) -> list[list[float]]:
    """Be rank 0, the server, which gives out the work, or a trainer, which waits for it in shutdown."""
    world, losses = weft.init(), []
    rpc.init_rpc(f"trainer{world.rank}" if world.rank else "server")
    if world.rank == 0:
        server = rpc.RRef(ParameterServer(world.size - 1))
        losses = wait_all([rpc.rpc_async(to, train, (server, num_steps)) for to in range(1, world.size)])
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    for step, losses in enumerate(zip(*weft.launch(job, ranks=3, args=(20,))[0], strict=True)):
        print(f"step {step:2}  loss {sum(losses) / len(losses):.5f}")

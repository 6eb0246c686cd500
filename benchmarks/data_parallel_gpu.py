"""How long is a training step on a GPU under weft's data parallel, and how fast are the quantizing kernels?

One rank on nccl, since nccl refuses a second one on the same GPU: what is measured is what data parallel
costs beside the communication. A step clears the gradients and runs forward and backward; a call is timed
by the host's clock up to the end of the GPU's work. Every candidate's gradients are checked against the
bare module's before it is timed.

`bare` is the module itself; `torch` is torch's DDP, `torch view` with gradient_as_bucket_view=True; `weft`
is weft's DDP, which has nothing to do for a single rank. With `hook` both have a hook that all-reduces each
bucket over nccl, so that buckets are filled, sent and handed out. In the cases of kernels `copy`
is a copy on the GPU that reads and writes, together, as many bytes as the kernel does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Candidate, CaseResult, Counted, Result, Schedule, announce, measure
from question import ask
from report import Goal
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft
from weft.comm_hooks.quantize import Own
from weft.comm_hooks.quantize_plan import QuantizePlan, plan_blocks, plan_gradients

MB = 2**20
KERNEL_LIMIT = 1.25  # at least 0.8 of the copy's bytes a second
KERNEL_NUMEL = 64 * MB
LAUNCHES = 10  # of a kernel in a call, so that the host's part is hidden


class Block(nn.Module):
    """Attention and two layers, each behind a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A decoder of 839 million parameters at its default size."""

    def __init__(self, vocab: int = 30_000, width: int = 1536, depth: int = 28) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(Block(width, width // 128) for _ in range(depth)))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def make_gpt(is_quick: bool) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("cuda"):
        model = GPT(500, 256, 2) if is_quick else GPT()
        return model.bfloat16(), torch.randint(500, (2 if is_quick else 8, 1024))


def make_tiny(is_quick: bool) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("cuda"):
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(290))), torch.randn(4, 16)


@dataclass(frozen=True)
class Model:
    """A case: a model, and what is asked of weft."""

    name: str
    make: Callable[[bool], tuple[nn.Module, torch.Tensor]]
    against: str
    limit: float
    num_calls: int
    tolerance: float  # of gradients, over the largest of their tensor
    hook_limit: float | None  # of weft with a hook, over torch with one


MODELS = [
    Model("GPT 839 M, bf16", make_gpt, "bare", 1.02, 3, 0.05, None),
    Model("580 small tensors", make_tiny, "torch", 1.0, 10, 1e-4, 1.0),
]
PEAKS = f"{MODELS[0].name}, memory"
KERNELS = {
    "blocks of 512": lambda numel: plan_blocks(numel, 2, 512),
    "gradients of 1 M": lambda numel: plan_gradients(numel, 2, tuple(range(0, numel, MB))),
}


def plan_goals() -> list[Goal]:
    """What is asked of all cases."""
    goals: list[Goal] = []
    for model in MODELS:
        goals.append(Goal(model.name, "weft", model.against, model.limit))
        goals += [Goal(model.name, name, "bare", None) for name in ("torch", "torch view", "weft hook")]
        goals.append(Goal(model.name, "weft hook", "torch hook", model.hook_limit))
    for kind in KERNELS:
        goals += [Goal(f"{op}, {kind}", "kernel", "copy", KERNEL_LIMIT) for op in ("quantize", "restore")]
        goals.append(Goal(f"fold, {kind}", "kernel", "copy", None))
    goals.append(Goal(PEAKS, "weft hook", "torch view", 1.0))
    return goals


def case_names() -> list[str]:
    return list(dict.fromkeys(goal.case for goal in plan_goals()))


# -- on the rank -------------------------------------------------------------------


def measure_cases(only: str, num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure all cases with `only` in their name, one after the other."""
    torch.cuda.set_device(0)
    results: list[CaseResult] = []
    for model in MODELS:
        if only in model.name:
            announce(model.name)
            schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, model.num_calls)
            summaries = measure(make_steps(model, is_quick), schedule)
            results.append(CaseResult("a step", model.name, summaries))
    schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, 5)
    for kind, plan_for in KERNELS.items():
        calls = make_kernels(plan_for(MB if is_quick else KERNEL_NUMEL), MB if is_quick else KERNEL_NUMEL)
        for op, candidates in calls.items():
            if only in f"{op}, {kind}":
                announce(f"{op}, {kind}")
                results.append(CaseResult("kernels", f"{op}, {kind}", measure(candidates, schedule)))
    return results


def reduce_over_nccl(state: None, bucket: weft.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return weft.comm.all_reduce(bucket.buffer()).future()


def torch_reduce_over_nccl(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# torch reads a hook's annotations, which are strings here.
torch_reduce_over_nccl.__annotations__ = {}


def with_hook(ddp: Any, hook: Any) -> nn.Module:
    ddp.register_comm_hook(None, hook)
    return ddp


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "torch": TorchDDP,
    "torch view": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "torch hook": lambda module: with_hook(
        TorchDDP(module, gradient_as_bucket_view=True), torch_reduce_over_nccl
    ),
    "weft": weft.DistributedDataParallel,
    "weft hook": lambda module: with_hook(weft.DistributedDataParallel(module), reduce_over_nccl),
}


def make_steps(model: Model, is_quick: bool) -> dict[str, Candidate]:
    torch.manual_seed(0)
    bare, batch = model.make(is_quick)
    modules = {name: wrap(copy.deepcopy(bare)) for name, wrap in WRAPPERS.items()}
    steps = {name: make_step(module, batch) for name, module in modules.items()}
    for name, module in modules.items():
        steps[name]()
        steps[name]()  # buckets are planned anew after the first
        check_gradients(name, module, modules["bare"], model.tolerance)
    return steps


def make_step(module: nn.Module, batch: torch.Tensor) -> Candidate:
    params = list(module.parameters())

    def step() -> None:
        for param in params:
            param.grad = None
        module(batch).float().square().mean().backward()
        torch.cuda.synchronize()

    return step


def check_gradients(name: str, module: nn.Module, bare: nn.Module, tolerance: float) -> None:
    for seen, right in zip(module.parameters(), bare.parameters(), strict=True):
        assert seen.grad is not None
        assert right.grad is not None
        apart = (seen.grad - right.grad).abs().max().item()
        if not apart <= tolerance * right.grad.abs().max().item():
            raise RuntimeError(f"candidate '{name}': a gradient is {apart:.3g} from the bare module's.")


def measure_peak(name: str, is_quick: bool) -> float:
    """The most memory that a step of the large model takes, parameters included, in MB."""
    module, batch = make_gpt(is_quick)
    step = make_step(WRAPPERS[name](module), batch)
    for _ in range(5):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / MB


# -- kernels -----------------------------------------------------------------------


def make_kernels(plan: QuantizePlan, numel: int) -> dict[str, dict[str, Candidate]]:
    """The checked kernels for int8, each with a copy of as many bytes."""
    from weft.comm_hooks.quantize_triton import TritonCodec

    codec = TritonCodec(plan, torch.int8)
    values, out = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")
    messages = torch.zeros(2 * plan.message_bytes, dtype=torch.uint8, device="cuda")
    codec.quantize(values, messages, [0, 1], keeps_error=False)
    codec.restore(messages, out, [0, 1])
    apart, largest = (out - values).abs().max().item(), values.abs().max().item()
    if not apart <= largest / 254 * 1.001:
        raise RuntimeError(f"the kernels' numbers are {apart:.3g} away; {largest / 254:.3g} are allowed.")
    mine = messages[: plan.message_bytes]
    half_numel = plan.chunks[0].numel
    own = Own(0, torch.zeros_like(mine), out)
    message_bytes = 2 * plan.message_bytes
    return {
        "quantize": {
            "kernel": repeat(lambda: codec.quantize(values, messages, [0, 1], keeps_error=False)),
            "copy": copy_of(4 * numel + message_bytes),
        },
        "restore": {
            "kernel": repeat(lambda: codec.restore(messages, out, [0, 1])),
            "copy": copy_of(4 * numel + message_bytes),
        },
        "fold": {
            "kernel": repeat(lambda: codec.fold(values, mine, own, keeps_error=False)),
            "copy": copy_of(8 * half_numel + message_bytes),
        },
    }


def copy_of(num_bytes: int) -> Candidate:
    """A copy that moves so many bytes: half of them read, half of them written."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    return repeat(lambda: target.copy_(source))


def repeat(launch: Callable[[], object]) -> Candidate:
    def run() -> None:
        for _ in range(LAUNCHES):
            launch()
        torch.cuda.synchronize()

    return run


# -- the command -------------------------------------------------------------------


def on_one_rank(fn: Callable[..., Any], *args: object) -> Any:
    return weft.launch(fn, ranks=1, backend="cpu:gloo,cuda:nccl", args=args)[0]


def main() -> None:
    question = ask("data_parallel_gpu", __doc__, needs_gpu=True)
    question.check_names(case_names())
    results: list[Result] = on_one_rank(
        measure_cases, question.options.only, question.rounds, question.is_quick
    )
    if question.wants(PEAKS):
        # Each in a process of its own: nothing is left over.
        peaks = {name: on_one_rank(measure_peak, name, question.is_quick) for name in WRAPPERS}
        results.append(Counted("peak of a step, MB", PEAKS, peaks))
    question.answer(results, plan_goals(), [f"a call of a kernel case is {LAUNCHES} launches."])


if __name__ == "__main__":
    sys.exit(main())

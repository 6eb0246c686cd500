"""How long is a step of an MLP under weft's parallelize_module, against torch's and against one by hand?

The MLP is H -> 4H -> H with ReLU, the first layer column-wise, the second row-wise. A batch of 64, float32,
one thread a rank, two ranks. A step runs forward and backward, to the input too, and lets the gradients go;
`SGD` has a step of SGD as well. In `sequence` a rank has half of the batch before and after: all-gathers and
reduce-scatters in place of all-reduces. Every candidate's output and gradients are checked against those of
the whole MLP before it is timed.

`torch` is torch's parallelize_module on gloo; `weft gloo` and `weft local` are weft's on gloo and on the
local group; `hand gloo` and `hand local` are what one would write by hand: plain parameters, and two autograd
functions around dist.all_reduce. `no comm` is a rank's half of the work, without communication.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from harness import Candidate, CaseResult, Schedule, announce, measure
from question import ask
from ranks import run_ranks
from report import Goal
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft import tensor_parallel as weft_parallel

NUM_RANKS = 2
BATCH = 64
LIBRARIES: dict[str, Any] = {"torch": torch_parallel, "weft": weft_parallel}
GROUPS = {
    "torch": "gloo",
    "weft gloo": "gloo",
    "weft local": "local",
    "hand gloo": "gloo",
    "hand local": "local",
}


@dataclass(frozen=True)
class Limits:
    """What is asked of weft: on either group over torch on gloo, and over what is written by hand."""

    gloo: float
    local: float
    hand: float


@dataclass(frozen=True)
class Case:
    """An MLP of a width, how it is split and stepped, and in which blocks its candidates take turns."""

    name: str
    width: int
    num_calls: int
    rounds_factor: int  # a short step is timed in more rounds
    limits: Limits | None = None
    is_sequence: bool = False
    has_sgd: bool = False


CASES = [
    Case("MLP 256", 256, 10, 10, Limits(gloo=0.75, local=0.4, hand=1.05)),
    Case("MLP 2048", 2048, 3, 2, Limits(gloo=0.95, local=0.9, hand=1.02)),
    Case("MLP 256 sequence", 256, 10, 4, is_sequence=True),
    Case("MLP 2048 sequence", 2048, 2, 1, is_sequence=True),
    Case("MLP 256 SGD", 256, 10, 4, has_sgd=True),
    Case("MLP 2048 SGD", 2048, 2, 1, has_sgd=True),
]


def plan_goals(case: Case) -> list[Goal]:
    """What is asked of a case; without limits, what is reported of it."""
    gloo, local, hand = (None,) * 3
    if case.limits is not None:
        gloo, local, hand = case.limits.gloo, case.limits.local, case.limits.hand
    return [
        Goal(case.name, "weft gloo", "torch", gloo),
        Goal(case.name, "weft local", "torch", local),
        Goal(case.name, "weft gloo", "hand gloo", hand),
        Goal(case.name, "weft local", "hand local", hand),
        Goal(case.name, "weft local", "no comm", None),
        Goal(case.name, "torch", "no comm", None),
    ]


# -- the MLP, whole and by hand ----------------------------------------------------


class MLP(nn.Module):
    """Two layers, whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class CopyToRanks(torch.autograd.Function):
    """Every rank uses the input: nothing in forward, a sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dist.all_reduce(grads[0], group=ctx.group)
        return grads[0], None


class SumOverRanks(torch.autograd.Function):
    """Every rank has a term of the output: a sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class HalfLinear(nn.Module):
    """This rank's part of a linear layer's parameters."""

    weight: nn.Parameter
    bias: nn.Parameter


class Halves(nn.Module):
    """This rank's half of an MLP, in plain parameters, without communication."""

    def __init__(self, whole: MLP) -> None:
        super().__init__()
        self.up = HalfLinear()
        self.down = HalfLinear()
        self.up.weight = nn.Parameter(piece_of(whole.up.weight, 0))
        self.up.bias = nn.Parameter(piece_of(whole.up.bias, 0))
        self.down.weight = nn.Parameter(piece_of(whole.down.weight, 1))
        self.down.bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(F.linear(x, self.up.weight, self.up.bias))
        return F.linear(hidden, self.down.weight) + self.down.bias


class ByHand(Halves):
    """The same, with the two sums that make it right."""

    def __init__(self, whole: MLP, group: Any) -> None:
        super().__init__(whole)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied: Any = CopyToRanks.apply(x, self.group)
        hidden = F.relu(F.linear(copied, self.up.weight, self.up.bias))
        terms = F.linear(hidden, self.down.weight)
        summed: Any = SumOverRanks.apply(terms, self.group)
        return summed + self.down.bias


def piece_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have."""
    return tensor.detach().chunk(NUM_RANKS, dim)[dist.get_rank()].clone(memory_format=torch.contiguous_format)


# -- on the ranks ------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A rank's input and the gradient that backward starts from, and what must come out."""

    x: torch.Tensor
    out_grad: torch.Tensor
    out: torch.Tensor
    x_grad: torch.Tensor
    param_grads: dict[str, torch.Tensor]


def measure_cases(cases: Sequence[Case], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the cases, one after the other. Every rank calls it."""
    groups: dict[str, Any] = {"gloo": dist.new_group(backend="gloo"), "local": dist.group.WORLD}
    results: list[CaseResult] = []
    for case in cases:
        announce(case.name)
        schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds * case.rounds_factor, case.num_calls)
        summaries = measure(make_candidates(case, groups), schedule)
        results.append(CaseResult("tensor parallel", case.name, summaries))
    return results


def make_candidates(case: Case, groups: Mapping[str, Any]) -> dict[str, Candidate]:
    torch.manual_seed(0)
    whole = MLP(case.width)
    wanted = make_wanted(whole, case)
    modules = make_modules(whole, case, groups)
    candidates: dict[str, Candidate] = {}
    for name, module in modules.items():
        check_step(name, module, wanted, is_summed=name != "no comm")
        candidates[name] = make_step(module, wanted, has_sgd=case.has_sgd)
    return candidates


def make_wanted(whole: MLP, case: Case) -> Wanted:
    """What the whole MLP gives, on every rank; in `sequence` a rank has its rows of inputs and outputs."""
    x = torch.randn(BATCH, case.width, requires_grad=True)
    out_grad = torch.randn(BATCH, case.width)
    out = whole(x)
    out.backward(out_grad)
    assert x.grad is not None
    grads = {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}
    x, out_grad, out, x_grad = (
        piece_of(t, 0) if case.is_sequence else t.detach() for t in (x, out_grad, out, x.grad)
    )
    return Wanted(x.requires_grad_(), out_grad, out, x_grad, grads)


def make_modules(whole: MLP, case: Case, groups: Mapping[str, Any]) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    for name, group_name in GROUPS.items():
        group = groups[group_name]
        library = name.split()[0]
        if library in LIBRARIES:
            mesh = DeviceMesh.from_group(group, "cpu")
            modules[name] = parallelize(copy.deepcopy(whole), mesh, LIBRARIES[library], case.is_sequence)
        elif not case.is_sequence:
            modules[name] = ByHand(whole, group)
    if not case.is_sequence:
        modules["no comm"] = Halves(whole)
    return modules


def parallelize(module: nn.Module, mesh: DeviceMesh, library: Any, is_sequence: bool) -> nn.Module:
    rows = Shard(0) if is_sequence else None
    plan = {
        "up": library.ColwiseParallel(input_layouts=rows),
        "down": library.RowwiseParallel(output_layouts=rows),
    }
    return library.parallelize_module(module, mesh, plan)


def make_step(module: nn.Module, wanted: Wanted, *, has_sgd: bool) -> Candidate:
    params = list(module.parameters())
    # So slow that the values stay what they are: a step must cost the same in every round.
    optimizer = torch.optim.SGD(params, lr=1e-9) if has_sgd else None

    def step() -> None:
        out = module(wanted.x)
        wait_for(out)
        out.backward(wanted.out_grad)
        wait_for(wanted.x.grad)
        if optimizer is not None:
            optimizer.step()
        wanted.x.grad = None
        for param in params:
            param.grad = None

    return step


def wait_for(tensor: torch.Tensor | None) -> None:
    """Do what a model's next layer would do. torch's output and gradient may still be on their way."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.wait()


def check_step(name: str, module: nn.Module, wanted: Wanted, *, is_summed: bool) -> None:
    """Raise unless a step gives what the whole MLP gives: without sums, in the parameters' gradients only."""
    out = module(wanted.x)
    out.backward(wanted.out_grad)
    seen = {fqn: param.grad for fqn, param in module.named_parameters()}
    asked = dict(wanted.param_grads)
    if is_summed:
        seen |= {"the output": out, "the input's gradient": wanted.x.grad}
        asked |= {"the output": wanted.out, "the input's gradient": wanted.x_grad}
    for what, value in asked.items():
        got = seen[what]
        assert got is not None
        whole = got.full_tensor() if isinstance(got, DTensor) else got.detach()
        if whole.shape != value.shape:
            value = piece_of(value, 0 if what.startswith("up") else 1)
        off = float((whole - value).abs().max())
        if off > 1e-5 * float(value.abs().max()):
            raise RuntimeError(f"candidate '{name}': {what} is off by {off:.3g}.")
    wanted.x.grad = None
    module.zero_grad()


# -- the command -------------------------------------------------------------------


def main() -> None:
    question = ask("tensor_parallel", __doc__)
    cases = question.choose(CASES)
    results = run_ranks(measure_cases, NUM_RANKS, cases, question.rounds, question.is_quick, mpiexec=None)
    question.answer(results, [goal for case in cases for goal in plan_goals(case)])


if __name__ == "__main__":
    sys.exit(main())

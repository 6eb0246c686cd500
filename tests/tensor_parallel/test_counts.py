"""How often ranks talk, and what they say: torch's counts, seen by weft.record or by torch's own counter.

torch's CommDebugMode puts hooks on every module of the process, so with it ranks must be processes. With it
torch's library is counted too: weft talks as often.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import weft
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Language, gathering_plan, language_plan, mlp_plan, sequence_plan
from tests.tensor_parallel.twins import (
    LAYOUTS,
    dtensor_input,
    filled,
    local_input,
    make_mesh,
    numbers,
    tokens,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"], counter=["weft"]),
    run_on(gloo=2, library=["weft", "torch"], counter=["torch"], full=True),
]

KINDS = {
    "all_reduce": "AR",
    "all_gather_into_tensor": "AG",
    "reduce_scatter_tensor": "RS",
    "all_to_all_single": "A2A",
}
# Where a library has several ways to do the same thing.
SAME_KIND = {
    "all_gather": "AG",
    "all_gather_spread": "AG",
    "reduce_scatter": "RS",
    "reduce_scatter_spread": "RS",
    "all_to_all": "A2A",
    "alltoall_base": "A2A",
}


@dataclass(frozen=True)
class Count:
    """What forward and backward of one style cost."""

    style: str
    given: str
    output: str
    forward: str
    backward: str
    has_dtensor_input: bool = False


LINEAR = [
    Count("ColwiseParallel", "R", "S-1", "", "AR"),
    Count("ColwiseParallel", "S0", "S-1", "AG", "RS"),
    Count("ColwiseParallel", "S1", "S-1", "AG", "RS"),
    Count("ColwiseParallel", "R", "R", "AG", "AR"),
    Count("RowwiseParallel", "S-1", "R", "AR", ""),
    Count("RowwiseParallel", "S-1", "S0", "RS", "AG"),
    Count("RowwiseParallel", "S-1", "S1", "RS", "AG"),
    Count("RowwiseParallel", "R", "R", "AR", "AG"),
    Count("RowwiseParallel", "S-1", "P", "", ""),
]
EMBEDDING = [
    Count("ColwiseParallel", "R", "S-1", "", ""),
    Count("RowwiseParallel", "R", "R", "AR", ""),
    Count("RowwiseParallel", "R", "S1", "RS", "AG"),
]


def kinds(counter: CommDebugMode) -> Counter[str]:
    found: Counter[str] = Counter()
    for op, number in counter.get_comm_counts().items():
        name = str(op).split(".")[-1].rstrip("_")
        if number:
            found[KINDS.get(name) or SAME_KIND.get(name, name)] += number
    return found


def recorded(events: Any) -> Counter[str]:
    """Without the sizes of local parts, which ranks tell each other where they may be uneven."""
    found: Counter[str] = Counter()
    for event in events:
        assert event.feature == "tp", event
        if event.op != "exchange_rows":
            found[KINDS.get(event.op) or SAME_KIND.get(event.op, event.op)] += 1
    return found


def counted(counter: str, action: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """What an action gives, and its collectives as the counter sees them."""
    if counter == "weft":
        with weft.record() as events:
            result = arrived(action())
        return result, recorded(events)
    with warnings.catch_warnings(), CommDebugMode() as mode:
        # Said by the counter's hooks of modules whose inputs need no gradient.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        result = arrived(action())
    return result, kinds(mode)


def arrived(result: Any) -> Any:
    """An output that is there: what is not waited for leaves no event."""
    if isinstance(result, torch.Tensor):
        local = result.to_local() if isinstance(result, DTensor) else result
        local.detach().sum().item()
    return result


def one(tp: Any, counter: str, module: nn.Module, full: torch.Tensor, count: Count) -> None:
    mesh = make_mesh()
    given, output = LAYOUTS[count.given], LAYOUTS[count.output]
    style = getattr(tp, count.style)(input_layouts=given, output_layouts=output)
    model = tp.parallelize_module(module, mesh, style)
    mine = (dtensor_input if count.has_dtensor_input else local_input)(full, given, mesh)
    seen, forward = counted(counter, lambda: model(mine))
    assert forward == Counter(count.forward.split()), (count, forward)
    loss = seen.sum()
    _, backward = counted(counter, loss.backward)
    assert backward == Counter(count.backward.split()), (count, backward)


def test_linear(tp: Any, counter: str) -> None:
    for count in LINEAR:
        one(tp, counter, filled(nn.Linear(8, 8)), numbers(4, 4, 8), count)


def test_embedding(tp: Any, counter: str) -> None:
    for count in EMBEDDING:
        one(tp, counter, filled(nn.Embedding(16, 8)), tokens(4, 4, vocabulary=16), count)


def test_frozen_input(tp: Any, counter: str) -> None:
    """An input that needs no gradient costs no reduction of it."""
    for given, forward in ((Replicate(), ""), (Shard(0), "AG")):
        model = filled(nn.Linear(8, 8))
        tp.parallelize_module(model, make_mesh(), tp.ColwiseParallel(input_layouts=given))
        seen, counts = counted(counter, lambda model=model: model(numbers(4, 8)))
        assert counts == Counter(forward.split())
        loss = seen.sum()
        _, counts = counted(counter, loss.backward)
        assert counts == Counter()
        assert model.weight.grad is not None


def test_sequence_parallel(tp: Any, counter: str) -> None:
    """Nothing for what lies right; one change each way for what doesn't."""
    mesh = make_mesh()
    full = numbers(4, 4, 8)
    for given, number in ((Shard(1), 0), (Shard(0), 2)):
        model = tp.parallelize_module(filled(nn.LayerNorm(8)), mesh, tp.SequenceParallel())
        mine = dtensor_input(full, given, mesh)
        seen, forward = counted(counter, lambda model=model, mine=mine: model(mine))
        _, backward = counted(counter, lambda seen=seen: seen.backward(torch.ones_like(seen)))
        assert sum((forward + backward).values()) == number, (given, forward, backward)


def test_changes(tp: Any, counter: str) -> None:
    """PrepareModuleInput: each change of layout is one collective at most."""
    mesh = make_mesh()
    expected = {
        ("S0", "R"): ("AG", ""),
        ("P", "R"): ("AR", ""),
        ("P", "S0"): ("RS", "AG"),
        ("R", "S0"): ("", "AG"),
        ("S0", "S1"): ("A2A", "A2A"),
        ("R", "R"): ("", ""),
        ("S0", "S0"): ("", ""),
    }
    for (one_name, other), (forward, backward) in expected.items():
        given, wanted = LAYOUTS[one_name], LAYOUTS[other]
        style = tp.PrepareModuleInput(
            input_layouts=given, desired_input_layouts=wanted, use_local_output=True
        )
        model = tp.parallelize_module(nn.Identity(), mesh, style)
        mine = local_input(numbers(4, 8), given, mesh)
        seen, counts = counted(counter, lambda model=model, mine=mine: model(mine))
        assert same_cost(counts, forward), (one_name, other, counts)
        loss = seen.sum()
        _, counts = counted(counter, loss.backward)
        assert same_cost(counts, backward), (one_name, other, counts)


def same_cost(counts: Counter[str], expected: str) -> bool:
    """torch gathers on a CPU where it exchanges on a GPU: one collective either way."""
    return sum(counts.values()) == 1 if expected == "A2A" else counts == Counter(expected.split())


def test_mlps(tp: Any, counter: str) -> None:
    """The pair: one sum each way, or a gather and a deal each way."""
    mesh = make_mesh()
    layouts: list[tuple[Any, Placement, str, str]] = [
        (mlp_plan, Replicate(), "AR", "AR"),
        (gathering_plan, Shard(0), "AG RS", "AG RS"),
    ]
    for plan, given, forward, backward in layouts:
        model = tp.parallelize_module(filled(MLP()), mesh, plan(tp))
        mine = local_input(numbers(4, 8), given, mesh)
        seen, counts = counted(counter, lambda model=model, mine=mine: model(mine))
        assert counts == Counter(forward.split())
        loss = seen.sum()
        _, counts = counted(counter, loss.backward)
        assert counts == Counter(backward.split())


def test_language_models(tp: Any, counter: str) -> None:
    """Each layer by its own counts: nothing is put together, and nothing comes on top."""
    mesh = make_mesh()
    seen: list[tuple[Counter[str], Counter[str]]] = []
    for plan in (language_plan, sequence_plan):
        model = tp.parallelize_module(Language(), mesh, plan(tp))
        words = tokens(2, 8, vocabulary=12)
        output, forward = counted(counter, lambda model=model, words=words: model(words))
        loss = output.sum()
        _, backward = counted(counter, loss.backward)
        seen.append((forward, backward))
    (forward, backward), (cut_forward, cut_backward) = seen
    assert forward == Counter({"AR": 3, "AG": 1})
    assert backward == Counter({"AR": 5})  # query, key, value, the MLP, the head
    assert cut_forward == Counter({"RS": 3, "AG": 4})
    assert cut_backward == Counter({"AR": 4, "RS": 1, "AG": 3})


def test_placing(tp: Any, counter: str) -> None:
    """Values are sent once as the plan is applied, and not at all without a source."""
    for source in (0, None):
        model = filled(MLP())
        plan = mlp_plan(tp)
        mesh = make_mesh()
        apply = partial(tp.parallelize_module, model, mesh, plan, src_data_rank=source)
        _, counts = counted(counter, apply)
        assert bool(counts) == (source is not None), counts


@run_on(threads=1)
def test_a_world_of_one_says_nothing(tp: Any) -> None:
    """Neither as the plan is applied nor in a step."""
    with weft.record() as events:
        for make, plan in ((MLP, mlp_plan), (Language, sequence_plan), (Language, language_plan)):
            model = tp.parallelize_module(filled(make()), make_mesh(), plan(tp))
            given = numbers(4, 8).requires_grad_() if make is MLP else tokens(2, 8, vocabulary=12)
            model(given).sum().backward()
    assert events == []

"""What compiled steps do to Dynamo's caches, to its counters and to the group."""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import weft
from tests.compiler.pairs import (
    LONG,
    MAY_WARN,
    WRAPS,
    Pair,
    backward_context,
    compile_backward,
    fresh,
    inner,
    make_rows,
    mlp,
    square_loss,
    wrapped,
)
from tests.ranks import run_on
from weft import compiler

pytestmark = [run_on(gloo=2, wrap=WRAPS, full=True, **LONG), MAY_WARN]

DIM = 2000


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@run_on(gloo=2, wrap=["replicate"], **LONG)
@run_on(gloo=2, wrap=["ddp"], full=True, **LONG)
def test_steady(wrap: str) -> None:
    """The third step and those after it compile nothing."""
    variants: Any = ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001})
    for options in variants:
        fresh()
        pair = Pair(wrap=wrap, **options)
        pair.train(steps=2)
        before = num_graphs()
        with torch.compiler.set_stance("fail_on_recompile"):
            pair.train(steps=4)
        assert num_graphs() == before


@pytest.mark.parametrize("has_graph", [True, False])
def test_steady_traced(wrap: str, has_graph: bool) -> None:
    """So does the trace of backward, also of a forward that is not compiled."""
    fresh()
    pair = Pair(wrap=wrap)
    if not has_graph:
        pair.compiled = pair.under
    compiles: list[int] = []

    def compile_and_count(graph: Any) -> Any:
        compiles.append(1)
        return compile_backward(graph)

    before = 0
    for salt in range(6):
        if salt == 2:
            compiles.clear()
            before = num_graphs()
        pair.zero_grad()
        with compiled_autograd._enable(compile_and_count):
            square_loss(pair.compiled, salt).backward()
        square_loss(pair.plain, salt).backward()
        pair.check(with_bare=False)
    assert compiles == [], f"backward was traced {len(compiles)} more times"
    assert num_graphs() == before, f"{num_graphs() - before} more graphs"


def test_steady_in_turns(wrap: str) -> None:
    """With and without sync in turns: each once, then never again."""
    fresh()
    pair = Pair(wrap=wrap)

    def round_of(salt: int) -> None:
        pair.zero_grad()
        if wrap == "ddp":
            with pair.under.no_sync():
                square_loss(pair.compiled, salt).backward()
        else:
            pair.under.set_requires_gradient_sync(False)
            square_loss(pair.compiled, salt).backward()
            pair.under.set_requires_gradient_sync(True)
        square_loss(pair.compiled, salt + 1).backward()

    for salt in range(2):
        round_of(salt)
    with torch.compiler.set_stance("fail_on_recompile"):
        for salt in range(3):
            round_of(salt)


@run_on(gloo=2, wrap=["ddp"], **LONG)
@run_on(gloo=2, wrap=["replicate"], full=True, **LONG)
def test_one_graph_a_forward(wrap: str) -> None:
    """Nothing of weft breaks the graph, and nothing of it is one."""
    fresh()
    pair = Pair(wrap=wrap, backend="aot_eager", fullgraph=False)
    for salt in range(2):
        square_loss(pair.compiled, salt).backward()
    assert sum(counters["graph_break"].values()) == 0, dict(counters["graph_break"])


def big() -> nn.Module:
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))


@run_on(gloo=2, full=True, **LONG)
@pytest.mark.parametrize(("form", "wanted"), [(None, 4), ("concat", 3), ("coalesced", 3)])
def test_bucket_counter(form: str | None, wanted: int) -> None:
    """How many buckets four Linear(2000, 2000) get.

    In the reducer's own buffers a gradient of more than half the cap goes alone.
    """
    fresh()
    compiler.settings.form = form
    try:
        torch.manual_seed(0)
        replica = weft.replicate(big())
        compiled = torch.compile(replica, backend="inductor")
        for step in range(2):
            backward_of(replica, compiled(rows_of(step)).sum(), nullcontext())
    finally:
        compiler.settings.form = None
    assert counters["inductor"]["ddp_buckets"] == wanted


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(1, DIM, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def backward_of(replica: Any, loss: torch.Tensor, context: AbstractContextManager[Any]) -> None:
    """Backward in the context; ranks must agree about every gradient."""
    replica.zero_grad()
    with context:
        loss.backward()
    for name, param in replica.named_parameters():
        assert param.grad is not None
        first = param.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, param.grad), f"ranks differ in {name}"


def compile_by_inductor(graph: Any) -> Any:
    def inner_compiler(inner: Any, inputs: Any) -> Any:
        return torch._inductor.compile(inner, inputs)

    return torch.compile(graph, fullgraph=True, backend=inner_compiler)


@run_on(gloo=2, full=True, **LONG)
@pytest.mark.parametrize("fusing_pass", ["fuse_ddp_with_coalesced_op", "fuse_ddp_with_concat_op"])
def test_buckets_by_torchs_switches(fusing_pass: str) -> None:
    """In the graph of a traced backward, asked for by torch's own switches, compiled by Inductor."""
    fresh()
    torch.manual_seed(0)
    options: Any = {
        "_fuse_ddp_communication_passes": [fusing_pass, "schedule_comm_wait"],
        "reorder_for_locality": False,
    }
    numbers: list[int] = []
    with torch._inductor.config.patch(options), torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        replica = weft.replicate(big())
        compiled = torch.compile(replica, fullgraph=False)
        for step in range(2):
            loss = compiled(rows_of(step)).sum()
            backward_of(replica, loss, compiled_autograd._enable(compile_by_inductor))
            numbers.append(counters["inductor"]["ddp_buckets"])
    assert numbers == [3, 3]


@run_on(gloo=2, weft=2, wrap=WRAPS, full=True, **LONG)
def test_forms(wrap: str) -> None:
    """Every form of bucket, and caps that make one, some or many, give the eager gradients."""
    settings = compiler.settings
    try:
        for form in ("buffers", "concat", "coalesced"):
            for cap in (None, 0.0003):
                fresh()
                settings.form, settings.bucket_cap_mb = form, cap
                # Passes over graphs run in Inductor; aot_eager would not show them.
                Pair(wrap=wrap, backend="inductor", is_exact=False).train()
    finally:
        settings.form = settings.bucket_cap_mb = None


@run_on(gloo=2, timeout=60, collective_timeout=60)
def test_wrong_settings() -> None:
    settings = compiler.settings
    assert settings.form is None
    assert settings.bucket_cap_mb is None
    for name, value in (("form", "lists"), ("bucket_cap_mb", -1), ("bucket_cap_mb", True)):
        fresh()
        setattr(settings, name, value)
        compiled = torch.compile(weft.replicate(mlp()), backend="aot_eager")
        try:
            # Dynamo may put its own error around ours.
            with pytest.raises(Exception, match=name):
                square_loss(compiled, 0).backward()
        finally:
            setattr(settings, name, None)


@run_on(weft=2, wrap=["ddp"], **LONG)
@run_on(weft=2, wrap=["replicate"], full=True, **LONG)
@run_on(gloo=2, wrap=WRAPS, full=True, **LONG)
def test_recorded(wrap: str) -> None:
    """record() sees as many bytes reduced as there are gradients, in compiled steps too."""
    fresh()
    compiler.settings.form = "buffers"
    try:
        pair = Pair(wrap=wrap, backend="inductor", is_exact=False, bucket_cap_mb=0.0003)
        pair.train(steps=2)
        seen: list[Any] = []
        for model in (pair.plain, pair.compiled):
            pair.zero_grad()
            with weft.record() as events:
                square_loss(model, 9).backward()
            seen.append([(event.op, event.bytes_in) for event in events])
        num_bytes = sum(param.numel() * 8 for param in pair.bare.parameters())
        for calls in seen:
            assert sum(size for op, size in calls if op == "all_reduce") >= num_bytes, calls
            assert len([op for op, _ in calls if op == "all_reduce"]) > 1, calls
        assert sorted(seen[0]) == sorted(seen[1]), seen
    finally:
        compiler.settings.form = None


@run_on(gloo=2, wrap=["ddp"], **LONG)
@run_on(gloo=2, wrap=["replicate"], full=True, **LONG)
def test_dropped(wrap: str) -> None:
    """A compiled replica goes when its last reference does."""
    fresh()
    replica = wrapped(mlp(), wrap)
    compiled = torch.compile(replica, backend="aot_eager")
    for salt in range(2):
        square_loss(compiled, salt).backward()
    gone = [weakref.ref(replica), *(weakref.ref(param) for param in inner(replica, wrap).parameters())]
    del replica, compiled
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_dropped_after_traced_backward(wrap: str) -> None:
    fresh()
    replica = wrapped(mlp(), wrap)
    compiled = torch.compile(replica, backend="aot_eager")
    for salt in range(2):
        loss = square_loss(compiled, salt)
        with backward_context("torch"):
            loss.backward()
        del loss
    gone = [weakref.ref(replica), *(weakref.ref(param) for param in inner(replica, wrap).parameters())]
    del replica, compiled
    # Compiled autograd's own cache of the last graphs may hold on to parameters.
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_dropped_without_backward(wrap: str) -> None:
    """A forward whose backward never comes keeps nothing."""
    fresh()
    replica = wrapped(mlp(), wrap)
    compiled = torch.compile(replica, backend="aot_eager")
    for salt in range(2):
        square_loss(compiled, salt)
    with torch.no_grad():
        compiled(make_rows(0, 0))
    gone = weakref.ref(replica)
    del replica, compiled
    gc.collect()
    assert gone() is None

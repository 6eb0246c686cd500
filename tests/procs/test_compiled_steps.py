"""Steps of compiled replicas on process-ranks, against eager ones and against a bare model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import everyday
from weft.testing.pool import shared_pool

GROUPS = pytest.mark.parametrize("group", ["gloo", "weft"])
WRAPS = pytest.mark.parametrize("wrap", ["replicate", "ddp"])


@GROUPS
@WRAPS
def test_steps(wrap: str, group: str) -> None:
    shared_pool(2).run(everyday.every_way, args=(wrap,), backend=group, timeout=150)


@pytest.mark.parametrize(("wrap", "group"), [("replicate", "gloo"), ("ddp", "weft")])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (everyday.every_backward, "torch"),
        (everyday.every_backward, "weft"),
        (everyday.backward_only, "weft"),
        (everyday.too_late, "torch"),
        (everyday.forward_and_backward_in_one, "torch"),
        (everyday.forward_and_backward_in_one, "weft"),
    ],
)
def test_traced_backward(body: Callable[[str, str], None], kind: str, wrap: str, group: str) -> None:
    shared_pool(2).run(body, args=(wrap, kind), backend=group, timeout=120)


@pytest.mark.parametrize(
    ("wrap", "kind", "group"),
    [("replicate", "plain", "gloo"), ("ddp", "plain", "weft"), ("ddp", "torch", "gloo")],
)
def test_inductor(wrap: str, kind: str, group: str) -> None:
    shared_pool(2).run(everyday.with_inductor, args=(wrap, kind), backend=group, timeout=150)


@WRAPS
@pytest.mark.parametrize("body", [everyday.optimizers, everyday.compiled_from_outside])
def test_loops(body: Callable[[str], None], wrap: str) -> None:
    shared_pool(2).run(body, args=(wrap,), backend="gloo", timeout=120)


@GROUPS
@WRAPS
def test_four_ranks(wrap: str, group: str) -> None:
    shared_pool(4).run(everyday.steps, args=(wrap, "aot_eager", True), backend=group, timeout=150)

"""Recompiles, buckets, recorded calls and leaks of compiled models, on process-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import counts, seed_buckets
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("wrap", ["replicate", "ddp"])
@pytest.mark.parametrize("body", counts.BODIES, ids=lambda body: body.__name__)
def test_two_ranks(body: Callable[[str], None], wrap: str) -> None:
    shared_pool(2).run(body, args=(wrap,), backend="gloo", timeout=150)


@pytest.mark.parametrize("wrap", ["replicate", "ddp"])
@pytest.mark.parametrize("body", [counts.forms, counts.recorded])
def test_on_the_local_group(body: Callable[[str], None], wrap: str) -> None:
    shared_pool(2).run(body, args=(wrap,), backend="weft", timeout=150)


def test_wrong_settings() -> None:
    shared_pool(2).run(counts.wrong_settings, backend="gloo", timeout=60)


@pytest.mark.parametrize("form", [None, "buffers", "concat", "coalesced"])
@pytest.mark.parametrize(
    ("kind", "backend"), [("plain", "inductor"), ("torch", "aot_eager"), ("weft", "inductor")]
)
def test_bucket_counter(form: str | None, kind: str, backend: str) -> None:
    numbers = shared_pool(2).run(
        counts.bucket_counter, args=(form, kind, backend), backend="gloo", timeout=150
    )
    assert numbers == [3, 3]


@pytest.mark.parametrize("fusing_pass", ["fuse_ddp_with_coalesced_op", "fuse_ddp_with_concat_op"])
def test_buckets_by_torchs_switches(fusing_pass: str) -> None:
    numbers = shared_pool(2).run(seed_buckets.count_buckets, args=(fusing_pass,), backend="gloo", timeout=150)
    assert numbers == [[3, 3], [3, 3]]

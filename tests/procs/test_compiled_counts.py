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


@pytest.mark.parametrize(("form", "wanted"), [(None, 4), ("concat", 3), ("coalesced", 3)])
def test_bucket_counter(form: str | None, wanted: int) -> None:
    """In the reducer's own buffers a gradient of more than half the cap goes alone."""
    numbers = shared_pool(2).run(
        counts.bucket_counter, args=(form, "plain", "inductor"), backend="gloo", timeout=150
    )
    assert numbers == [wanted, wanted]


@pytest.mark.parametrize("fusing_pass", ["fuse_ddp_with_coalesced_op", "fuse_ddp_with_concat_op"])
def test_buckets_by_torchs_switches(fusing_pass: str) -> None:
    numbers = shared_pool(2).run(seed_buckets.count_buckets, args=(fusing_pass,), backend="gloo", timeout=150)
    assert numbers == [[3, 3], [3, 3]]

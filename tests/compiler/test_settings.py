"""What graphs are told as constants, what users can set, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from tests.compiler.hand_graphs import Draft, HandOwner, bucket, slot
from weft.compiler import Settings, Slot, Wire, backend, form_in_force, settings
from weft.compiler.ops import live_owners, owner_of
from weft.compiler.pipeline import fingerprint, name_of
from weft.compiler.schedule import Bucket, Room, decode_schedule, encode_schedule
from weft.errors import ConfigError, StateError

# Schedules

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64]
DEVICES = [torch.device("cpu"), torch.device("cuda", 3), torch.device("cuda"), torch.device("meta")]
wires = st.builds(
    Wire,
    owner=st.integers(0, 1 << 40),
    group=st.text(),
    size=st.integers(1, 1 << 20),
    dtype=st.sampled_from([None, *DTYPES]),
    plan=st.text(),
    has_marks=st.booleans(),
    is_plain=st.booleans(),
)
shapes = st.lists(st.integers(0, 5), max_size=5)
buckets = st.builds(
    lambda shapes, dtype, device: Bucket(
        tuple(slot(index, *shape) for index, shape in enumerate(shapes)), dtype, device
    ),
    st.lists(shapes, max_size=5),
    st.sampled_from(DTYPES),
    st.sampled_from(DEVICES),
)


@given(wires)
def test_a_wire_comes_back(wire: Wire) -> None:
    assert Wire.decode(wire.encode()) == wire


@given(wires, wires)
def test_two_wires_are_two_constants(one: Wire, other: Wire) -> None:
    assert (one.encode() == other.encode()) == (one == other)


@given(st.lists(buckets, max_size=5), st.lists(st.integers(0, 1000)))
def test_a_schedule_comes_back(buckets: list[Bucket], order: list[int]) -> None:
    rooms, got = decode_schedule(encode_schedule(buckets, order))
    assert got == order
    assert rooms == [
        Room(sum(one.numel for one in bucket.slots), len(bucket.slots) + 1, bucket.dtype, bucket.device)
        for bucket in buckets
    ]


@given(shapes, st.randoms())
def test_the_order_of_dimensions_is_how_they_lie(shape: list[int], random: Any) -> None:
    """A tensor that is permuted to that order is contiguous."""
    order = list(range(len(shape)))
    random.shuffle(order)
    back = sorted(range(len(order)), key=order.__getitem__)
    tensor = torch.empty([shape[dim] for dim in order]).permute(back)
    place = slot(0, *shape, strides=tensor.stride())
    assert place.numel == tensor.numel() == math.prod(shape)
    assert sorted(place.order) == list(range(len(shape)))
    assert tensor.permute(place.order).is_contiguous()


def test_bytes_of_a_bucket() -> None:
    assert bucket(slot(0, 2, 3), slot(1), dtype=torch.float64).num_bytes == 56
    assert bucket(dtype=torch.float16).num_bytes == 0


def test_a_slot_is_frozen() -> None:
    place: Any = Slot(0, "weight", (2,), (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        place.index = 1


# Settings


@pytest.mark.parametrize("form", [None, "buffers", "concat", "coalesced"])
@pytest.mark.parametrize("cap", [None, 0, 0.5, 25, math.inf])
def test_good_settings(form: str | None, cap: float | None) -> None:
    Settings(form, cap).check()


@pytest.mark.parametrize("form", ["", "Concat", "flat", 3, ["concat"], False])
def test_a_form_that_is_none(form: Any) -> None:
    with pytest.raises(ConfigError, match=r"form is one of .* or None, got"):
        Settings(form=form).check()


@pytest.mark.parametrize("cap", [-1, -0.001, math.nan, True, False, "25", [25]])
def test_a_cap_that_is_none(cap: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb must be a number of megabytes"):
        Settings(bucket_cap_mb=cap).check()


def test_settings_have_no_other_names() -> None:
    with pytest.raises(AttributeError):
        settings.fom = "concat"  # type: ignore[attr-defined]


def test_a_bad_setting_is_found_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "form", "flat")
    with pytest.raises(ConfigError):
        form_in_force()


def test_the_form_that_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    assert form_in_force() == "buffers"
    with dynamo.patch(optimize_ddp="python_reducer"):
        with inductor.patch(_fuse_ddp_communication_passes=["fuse_ddp_with_concat_op"]):
            assert form_in_force() == "concat"
        with inductor.patch(_fuse_ddp_communication_passes=["fuse_ddp_with_coalesced_op", "other"]):
            assert form_in_force() == "coalesced"
        with inductor.patch(_fuse_ddp_communication_passes=[]):
            assert form_in_force() == "concat"
        monkeypatch.setattr(settings, "form", "buffers")
        assert form_in_force() == "buffers"
    monkeypatch.setattr(settings, "form", "coalesced")
    assert form_in_force() == "coalesced"


def test_the_fingerprint_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fingerprint()
    assert fingerprint() == plain
    monkeypatch.setattr(settings, "form", "concat")
    other = fingerprint()
    monkeypatch.setattr(settings, "bucket_cap_mb", 3.0)
    assert len({plain, other, fingerprint()}) == 3


# The backend


def _nothing() -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), Draft().give())


@pytest.mark.parametrize("engine", ["eager", "", None, 3])
def test_a_bad_engine(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine is one of \('inductor', 'aot_eager'\), got"):
        backend(_nothing(), [], options={"engine": engine})


@pytest.mark.parametrize(
    ("options", "mode", "given"),
    [
        ({"max_autotune": True}, None, r"\['max_autotune'\]"),
        ({}, "reduce-overhead", r"\['mode=reduce-overhead'\]"),
        ({"b": 1, "a": 1}, "default", r"\['a', 'b', 'mode=default'\]"),
    ],
)
def test_graphs_that_run_as_they_are_take_no_options(options: Any, mode: str | None, given: str) -> None:
    mine = {"engine": "aot_eager", **options}
    with pytest.raises(ConfigError, match=f"takes no other options, got {given}"):
        backend(_nothing(), [], options=mine, mode=mode)
    assert mine == {"engine": "aot_eager", **options}


# Owners


def test_owners_have_their_numbers_for_good() -> None:
    one, two = HandOwner("one"), HandOwner("two")
    assert two.number > one.number
    assert owner_of(one.number) is one
    assert one in live_owners()
    gone = one.number
    del one
    assert [owner for owner in live_owners() if isinstance(owner, HandOwner) and owner.number == gone] == []
    with pytest.raises(StateError, match="after the module that it was compiled for was dropped"):
        owner_of(gone)
    three = HandOwner("three")
    assert three.number > two.number


def test_names_of_ops() -> None:
    assert name_of(torch.ops.weft.send_bucket.default) == "weft.send_bucket"
    assert name_of(torch.ops.aten.slice.Tensor) == "aten.slice.Tensor"

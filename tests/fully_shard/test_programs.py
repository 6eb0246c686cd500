"""What programs around a sharded model do with it: they save it, and make it on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.ranks import run_on
from weft.errors import StateError
from weft.fsdp import full_state_dict


class Saving(nn.Sequential):
    """Saves itself as models of transformers do."""

    saved: tuple[str, bool, Any] | None = None

    def save_pretrained(
        self, save_directory: str, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> str:
        self.saved = (save_directory, is_main_process, state_dict)
        return save_directory


@run_on(threads=2)
def test_shards_are_not_saved_as_a_pretrained_model() -> None:
    model = weft.fully_shard(Saving(nn.Linear(4, 4)))
    for arguments in ({}, {"state_dict": None}):
        with pytest.raises(StateError, match=r"FSDPSaving is sharded.*full_state_dict"):
            model.save_pretrained("here", **arguments)
    assert model.saved is None


@run_on(threads=2)
def test_whole_tensors_are_saved_as_a_pretrained_model() -> None:
    model = weft.fully_shard(Saving(nn.Linear(4, 4)))
    state = full_state_dict(model, rank0_only=False)
    assert model.save_pretrained("here", state_dict=state) == "here"
    assert model.saved == ("here", True, state)
    assert model.save_pretrained("there", False, state) == "there"
    assert model.saved == ("there", False, state)
    assert not hasattr(weft.fully_shard(nn.Linear(4, 4)), "save_pretrained")


class WithBuffers(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("lost", self.make(dtype), persistent=False)

    @staticmethod
    def make(dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(1, 5).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.kept * self.lost


def on_meta(dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(WithBuffers(dtype), nn.Linear(4, 4))
    weft.fully_shard(model[0])
    weft.fully_shard(model)
    model.to_empty(device="cpu")
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    return model


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@run_on(threads=2)
def test_a_buffer_that_nobody_set_is_named(dtype: torch.dtype) -> None:
    model = on_meta(dtype)
    for _ in range(2):
        with pytest.raises(StateError, match=r"buffers \['0\.lost'\] have no values"):
            model(torch.ones(2, 4))
    model[0].lost.copy_(WithBuffers.make(dtype))
    model(torch.ones(2, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["in place", "replaced"])
@run_on(threads=2)
def test_a_buffer_may_be_set_in_any_way(how: str, dtype: torch.dtype) -> None:
    model = on_meta(dtype)
    values = WithBuffers.make(dtype)
    if how == "in place":
        model[0].lost.copy_(values)
    else:
        model[0].lost = values
    assert torch.isfinite(model(torch.ones(2, 4))).all()


@run_on(threads=2)
def test_a_buffer_set_through_data_counts() -> None:
    model = on_meta()
    model[0].lost.data.copy_(WithBuffers.make(torch.float32))
    assert torch.isfinite(model(torch.ones(2, 4))).all()


@run_on(threads=2)
def test_buffers_that_are_in_the_state_dict_are_left_to_it() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(4)
    weft.fully_shard(model)
    model.to_empty(device="cpu")
    model.reset_parameters()
    model(torch.ones(2, 4))

"""A group's parameters as flat lists, for what is done with all of them many times a step.

A method called for each of 600 parameters takes longer than the layers they belong to, so loops run over
plain lists that are made once, and again only when a parameter was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.autograd import set_versions
from weft.fsdp.param import ShardedParam


class Roster:
    """The parameters of a group, and where they are registered."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.params = list(params)
        self._sharded: list[Any] = []
        self._homes: list[tuple[Any, str]] = []  # where the first module has each
        self._sharded_places: list[tuple[Any, str, Any]] = []
        self._whole_places: list[tuple[Any, str, Any]] = []
        self._wholes: list[Any] = []
        self._trainable: list[bool] = []
        self._versions: list[int] | None = None  # of the whole parameters, while they are freed
        self.renew()

    def renew(self) -> None:
        """Look again which parameters there are."""
        self._sharded = [param.sharded for param in self.params]
        self._homes = [param.slots[0] for param in self.params]
        self._sharded_places = [
            (slot, name, param.sharded) for param in self.params for slot, name in param.slots
        ]
        self._whole_places, self._wholes = [], []
        self._versions = None

    def addresses(self) -> list[tuple[int, bool]]:
        """Where the registered parameters' local tensors lie, and whether these say themselves what is
        gathered; -1 for what is no DTensor.
        """
        try:
            tensors = [slot[name]._local_tensor for slot, name in self._homes]
        except AttributeError:
            return [(-1, False)]
        return [(tensor.data_ptr(), hasattr(tensor, "fsdp_pre_all_gather")) for tensor in tensors]

    def versions(self) -> list[int]:
        """Numbers that go up when a parameter is changed in place."""
        return [param._version + param._local_tensor._version for param in self._sharded]

    def trainable(self) -> list[bool]:
        """Which of them need gradients."""
        return [param.requires_grad for param in self._sharded]

    def show_sharded(self) -> None:
        """Let modules have the sharded parameters."""
        for slot, name, param in self._sharded_places:
            slot[name] = param

    def mark_freed(self) -> None:
        """The whole parameters' memory is given back.

        A backward that comes to them unannounced, by a tensor that forward did not return, must not read
        there: autograd takes them for changed, and raises, until they are whole again.
        """
        if self._wholes and self._versions is None:
            self._versions = [whole._version for whole in self._wholes]
            set_versions(self._wholes, [version + 1 for version in self._versions])

    def show_whole(self) -> None:
        """Let modules have the whole parameters."""
        if not self._wholes:
            self._wholes = [param.whole for param in self.params]
            self._whole_places = [
                (slot, name, param.whole) for param in self.params for slot, name in param.slots
            ]
            self._trainable = []
        for slot, name, param in self._whole_places:
            slot[name] = param
        if self._versions is not None:
            set_versions(self._wholes, self._versions)
            self._versions = None
        trainable = self.trainable()
        if trainable != self._trainable:
            self._trainable = trainable
            for whole, needs_gradient in zip(self._wholes, trainable, strict=True):
                if whole.requires_grad != needs_gradient:
                    whole.requires_grad_(needs_gradient)

    def is_up_to_date(self) -> bool:
        """Whether modules still have the whole parameters (functional_call puts others there), and the same
        ones need gradients.
        """
        is_shown = all(slot[name] is param for slot, name, param in self._whole_places)
        return is_shown and self._trainable == self.trainable()

    def has_gradients(self) -> bool:
        """Whether whole parameters have gradients."""
        return any(whole.grad is not None for whole in self._wholes)


def take_gradients(params: Sequence[ShardedParam], wholes: Sequence[Any]) -> list[torch.Tensor | None]:
    """This rank's gradients, plain, dense and contiguous; the whole parameters have them no longer."""
    if wholes[0] is None:  # never gathered here: this rank only helps
        return [param.take_gradient() for param in params]
    grads = [whole.grad for whole in wholes]
    if not _are_plain(grads) or any(param.accumulated is not None for param in params):
        return [param.take_gradient() for param in params]
    for whole in wholes:
        whole.grad = None
    return grads


def _are_plain(grads: Sequence[Any]) -> bool:
    try:
        return all(type(grad) is torch.Tensor and grad.is_contiguous() for grad in grads)
    except RuntimeError:  # a sparse one doesn't say
        return False

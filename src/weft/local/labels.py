"""What c10d keeps of a group in its C++ backends, of which a group written in Python has none."""

from __future__ import annotations

from typing import Self

import torch


class Labels:
    """A group's name, its description, and the devices that it serves."""

    _name = ""
    _desc = ""
    # What c10d asks of backends before it calls what only some of them have.
    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        """The name by which c10d and compiled graphs find the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for, in its maker's words."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Self:
        """Itself: there is nothing behind it. Inductor asks, each time that it finds a graph in its cache."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether c10d may have memory from it."""
        return False

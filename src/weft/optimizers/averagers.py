"""Average the parameters of ranks that train on their own for some steps.

A model averager is called after every optimizer step, on all ranks, and counts. When
it is time it replaces each parameter by its mean over a group.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft import comm
from weft.comm.group import resolve_group
from weft.errors import ConfigError
from weft.tensors import batch_by_dtype, copy_all, dense_strides, view_in

FEATURE = "averaging"
_FLAT_BYTES = 256 << 20  # of the copy that travels at a time

ParamsOrGroups = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


class _KindError(ConfigError, NotImplementedError):
    """torch promises NotImplementedError here."""


def average_parameters(params: Iterable[torch.Tensor], process_group: ProcessGroup | None = None) -> None:
    """Replace each parameter by its mean over the group, in place. Ranks outside of it do nothing."""
    if process_group is not None and not isinstance(process_group, ProcessGroup):  # type: ignore[reportUnnecessaryIsInstance]
        return  # what new_group gives to outsiders
    group = resolve_group(process_group)
    if group.size() == 1:
        return
    for batch in batch_by_dtype([param.detach() for param in params], _FLAT_BYTES):
        flat = comm.allocate((sum(param.numel() for param in batch),), batch[0].dtype, batch[0].device, group)
        views: list[torch.Tensor] = []
        offset = 0
        for param in batch:
            views.append(view_in(flat, offset, param.shape, dense_strides(param.shape, param.stride())))
            offset += param.numel()
        copy_all(views, batch)
        flat.div_(group.size())  # first, so that sums of 16-bit numbers don't overflow
        comm.all_reduce(flat, group=group, feature=FEATURE).wait()
        copy_all(batch, views)


def get_params_to_average(params: ParamsOrGroups) -> list[torch.nn.Parameter]:
    """The parameters that have a gradient, out of parameters or an optimizer's groups."""
    found: list[torch.nn.Parameter] = []
    for one in params:
        if isinstance(one, torch.nn.Parameter):
            candidates = [one]
        elif isinstance(one, dict):  # type: ignore[reportUnnecessaryIsInstance]
            candidates = one["params"]
        else:
            raise _KindError(
                f"Parameter input of type {type(one)} is not supported. Pass parameters or an optimizer's "
                "groups."
            )
        found.extend(param for param in candidates if param.grad is not None)
    return found


class ModelAverager(ABC):
    """Averages parameters now and then; `step` counts the calls."""

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self.process_group = resolve_group(process_group)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: ParamsOrGroups) -> None:
        """Count a step, and average the parameters that have gradients when it is time."""
        ...


class PeriodicModelAverager(ModelAverager):
    """Averages over one group every `period` steps, after `warmup_steps`."""

    def __init__(self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self.warmup_steps = _checked_warmup(warmup_steps)
        if period < 1:
            raise ConfigError(f"Arg ``period`` must be a positive value. It is {period}.")
        if period == 1:
            _warn_of_period_one("period")
        self.period = period

    def average_parameters(self, params: ParamsOrGroups) -> None:
        """Count a step, and average when it is time."""
        since_warmup = self.step - self.warmup_steps
        if since_warmup >= 0 and since_warmup % self.period == 0:
            average_parameters(get_params_to_average(params), self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages over small groups often and over large ones seldom.

    `period_group_size_dict` maps periods to group sizes, both rising; the last size is the
    whole group's. At a step that several periods divide, the longest one counts.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ConfigError("Arg ``period_group_size_dict`` must not be empty. Map periods to group sizes.")
        periods = list(period_group_size_dict)
        if periods[0] <= 0:
            raise ConfigError(
                "The minimum period in arg ``period_group_size_dict`` must be a positive value. It is "
                f"{periods[0]}."
            )
        if periods[-1] == 1:
            _warn_of_period_one("the maximum period in arg ``period_group_size_dict``")
        last_size = period_group_size_dict[periods[-1]]
        if last_size != self.process_group.size():
            raise ConfigError(
                f"The last value in arg ``period_group_size_dict`` {last_size} must be equal to the size of "
                f"arg ``process_group`` {self.process_group.size()}."
            )
        self.warmup_steps = _checked_warmup(warmup_steps)
        self.period_process_group_dict: OrderedDict[int, ProcessGroup] = OrderedDict(
            (period, self._group_of_size(size)) for period, size in period_group_size_dict.items()
        )

    def _group_of_size(self, size: int) -> ProcessGroup:
        if size == self.process_group.size():
            return self.process_group
        group: Any = dist.new_subgroups(group_size=size, group=self.process_group)[0]
        return group

    def average_parameters(self, params: ParamsOrGroups) -> None:
        """Count a step, and average over the largest group whose time it is."""
        if self.step >= self.warmup_steps:
            group = self._find_process_group()
            if group is not None:
                average_parameters(get_params_to_average(params), group)
        self.step += 1

    def _find_process_group(self) -> ProcessGroup | None:
        for period, group in reversed(self.period_process_group_dict.items()):
            if self.step % period == 0:
                return group
        return None


def _checked_warmup(warmup_steps: int) -> int:
    if warmup_steps < 0:
        raise ConfigError(f"Arg ``warmup_steps`` must be a non-negative number. It is {warmup_steps}.")
    return warmup_steps


def _warn_of_period_one(what: str) -> None:
    warnings.warn(
        f"When {what} is 1, no need to use model averaging because the communication cost of all-reducing "
        "parameters will be no less than the cost of all-reducing gradients by DistributedDataParallel in "
        "the backward pass. Therefore, only DistributedDataParallel should be used for this case.",
        stacklevel=3,
    )

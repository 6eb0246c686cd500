"""An optimizer whose state is shared out among the ranks (ZeRO, stage 1).

Each parameter has one owner. A step runs the real optimizer on the parameters that this
rank owns and then gives every rank the others' results. Which rank owns what is
partition.py's work, how parameters travel shards.py's. `zero.optim` is the local
optimizer; `zero.param_groups` are all groups, and options changed there (by a scheduler,
say) reach the local optimizer at the next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_global_rank
from torch.futures import Future
from torch.optim import Optimizer

from weft import comm
from weft.comm.call import hosted_by
from weft.comm.group import resolve_group
from weft.comm.simulated import check_one_rank
from weft.comm_hooks.in_order import launch_in_order
from weft.errors import ConfigError, StateError
from weft.join import Join, Joinable, JoinHook
from weft.optimizers.arguments import check_params
from weft.optimizers.partition import plan_balanced, plan_runs
from weft.optimizers.shards import OwnedFlat, launch_share, pack_params
from weft.tensors import map_tensors
from weft.torch_private import check_torch

FEATURE = "zero"
ParamGroup = dict[str, Any]


class ZeroRedundancyOptimizer(Optimizer, Joinable, calls_by_feature=True):
    """Wrap an optimizer class so that each rank keeps the state of its share of the parameters.

    With `parameters_as_bucket_view` parameters lie in flat buffers from then on, and
    sharing them copies nothing. With `overlap_with_ddp` the step runs inside backward, by a
    hook of `weft.comm_hooks.ddp_zero_hook`; `step` does nothing then. `defaults` go to the
    optimizer class.
    """

    join_features = frozenset((FEATURE,))

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        check_torch()
        given = check_params(params)
        self.process_group = resolve_group(process_group)
        self.world_size = self.process_group.size()
        if self.world_size > 1:
            check_one_rank("ZeroRedundancyOptimizer")
        self.rank = self.process_group.rank()
        self.global_rank = get_global_rank(self.process_group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.initialized = False  # until then Optimizer's constructor adds the groups
        self._optimizer_class = optimizer_class
        self._optimizer_defaults = defaults
        self._overlap_with_ddp = overlap_with_ddp
        self._owner_of: dict[torch.Tensor, int] = {}
        self._packs: list[OwnedFlat] | None = None
        self._packed_mask: list[bool] = []  # which parameters required gradients when they were packed
        self._bucket_packs: dict[tuple[int, ...], list[OwnedFlat]] = {}
        self._whole_state: dict[int, Any] | None = None
        Optimizer.__init__(self, given, defaults)
        Joinable.__init__(self)
        self.optim: Optimizer
        if not overlap_with_ddp:
            self._make_local(plan_balanced)
            if parameters_as_bucket_view:
                self._repack()
        self.initialized = True

    def _make_local(self, plan: Callable[[Sequence[Sequence[int]], int], list[list[int]]]) -> None:
        """Share out the parameters and make the optimizer of this rank's."""
        self._assign(plan)
        self.optim = self._optimizer_class(
            [self._local_group(group) for group in self.param_groups], **self._optimizer_defaults
        )
        _copy_options(self.optim.param_groups, self.param_groups)
        self.state = self.optim.state

    def _assign(self, plan: Callable[[Sequence[Sequence[int]], int], list[list[int]]]) -> None:
        sizes = [[param.numel() for param in group["params"]] for group in self.param_groups]
        for group, owners in zip(self.param_groups, plan(sizes, self.world_size), strict=True):
            self._owner_of.update(zip(group["params"], owners, strict=True))

    def _local_group(self, group: ParamGroup) -> ParamGroup:
        return {**group, "params": [param for param in group["params"] if self._is_mine(param)]}

    def _is_mine(self, param: torch.Tensor) -> bool:
        return self._owner_of[param] == self.rank

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group. Every rank must do it, with the same parameters in the same order."""
        if getattr(self, "initialized", False):
            self._check_local_made()
        super().add_param_group(param_group)
        if not getattr(self, "initialized", False):
            return
        self._assign(plan_balanced)
        self.optim.add_param_group(self._local_group(self.param_groups[-1]))
        _copy_options(self.optim.param_groups, self.param_groups)
        self._packs = None

    # -- a step --------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's share and take the other ranks'. Extra arguments go to the local optimizer."""
        if self._overlap_with_ddp:
            return None  # it has been done in backward
        Join.notify_join_context(self)
        _copy_options(self.param_groups, self.optim.param_groups)
        given = kwargs if closure is None else {"closure": closure, **kwargs}
        with hosted_by(FEATURE):
            loss = self.optim.step(**given)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._share()
        return loss

    def _share(self) -> None:
        if self.world_size == 1:
            return
        if self._packs is None or self._packed_mask != [param.requires_grad for param in self._all_params()]:
            self._repack()
        for handle in [launch_share(packed, self.process_group, FEATURE) for packed in self._packs or ()]:
            handle.wait()

    def _repack(self) -> None:
        # Frozen parameters don't change, so they don't travel.
        params = [param for param in self._all_params() if param.requires_grad]
        owners = [self._owner_of[param] for param in params]
        self._packed_mask = [param.requires_grad for param in self._all_params()]
        self._packs = pack_params(
            params, owners, self.process_group, keeps_views=self.parameters_as_bucket_view
        )

    # -- a step inside backward (see weft.comm_hooks.ddp_zero_hook) ---------------------

    @property
    def overlaps_with_ddp(self) -> bool:
        """Whether steps are run by a gradient hook."""
        return self._overlap_with_ddp

    def prepare_overlap(self, *, shard_buckets: bool) -> None:
        """Share out the parameters: neighbours together, or spread so that ranks share each bucket's work."""
        self._make_local(plan_balanced if shard_buckets else plan_runs)

    def step_bucket(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Update those of the parameters that are this rank's, with these gradients."""
        _copy_options(self.param_groups, self.optim.param_groups)
        grad_of = {
            param: grad
            for param, grad in zip(params, grads, strict=True)
            if self._owner_of.get(param) == self.rank
        }
        if not grad_of:
            return
        groups = self.optim.param_groups
        all_params = [group["params"] for group in groups]
        kept = {param: param.grad for param in grad_of}
        try:
            for group in groups:
                group["params"] = [param for param in group["params"] if param in grad_of]
            for param, grad in grad_of.items():
                param.grad = grad
            with hosted_by(FEATURE):
                self.optim.step()
        finally:
            for group, its_params in zip(groups, all_params, strict=True):
                group["params"] = its_params
            for param, grad in kept.items():
                param.grad = grad

    def launch_bucket_share(self, params: Sequence[torch.Tensor], feature: str) -> list[Future[Any]]:
        """Start giving those of the parameters that are owned to all ranks, each from its owner.

        Behind the gradient hooks that are under way on the group: ranks must agree on the order.
        """
        if self.world_size == 1:
            return []
        key = tuple(id(param) for param in params)  # buckets stay the same but for one time
        packs = self._bucket_packs.get(key)
        if packs is None:
            owned = [param for param in params if param in self._owner_of]
            owners = [self._owner_of[param] for param in owned]
            packs = pack_params(owned, owners, self.process_group, keeps_views=False)
            self._bucket_packs[key] = packs
        group = self.process_group
        return [
            launch_in_order(group, packed.flat, functools.partial(launch_share, packed, group, feature))
            for packed in packs
        ]

    def _check_local_made(self) -> None:
        if self._overlap_with_ddp and not hasattr(self, "optim"):
            raise StateError(
                "This method should not be called until this ZeroRedundancyOptimizer instance has been fully "
                "initialized: with overlap_with_ddp=True, by "
                "weft.comm_hooks.ddp_zero_hook.hook_with_zero_step."
            )

    # -- state -------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on one (of the group), for `state_dict`. Every rank must call it."""
        self._check_local_made()
        if not 0 <= to < self.world_size:
            raise ConfigError(
                f"consolidate_state_dict: there is no rank {to}; the group has {self.world_size}."
            )
        _copy_options(self.param_groups, self.optim.param_groups)
        mine = {
            index: map_tensors(lambda tensor: tensor.detach().cpu(), self.optim.state[param])
            for index, param in enumerate(self._all_params())
            if self._is_mine(param) and param in self.optim.state
        }
        if self.world_size == 1:
            self._whole_state = mine
            return
        root = get_global_rank(self.process_group, to)
        parts = comm.gather_object(mine, root, self.process_group, feature=FEATURE).wait()
        if parts is not None:
            self._whole_state = dict(sorted(item for part in parts for item in part.items()))

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters as of the last `consolidate_state_dict` to this rank."""
        self._check_local_made()
        if self._whole_state is None:
            raise StateError(
                "Optimizer state has not been consolidated on this rank. Please call "
                f"`consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to save the "
                "global state."
            )
        return {**super().state_dict(), "state": dict(self._whole_state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the options of all groups and the state of this rank's parameters; a plain one's too."""
        self._check_local_made()
        indices = {param: index for index, param in enumerate(self._all_params())}
        lengths = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in state_dict["param_groups"]] != lengths:
            raise ConfigError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's "
                f"group. This optimizer has groups of {lengths} parameters."
            )
        local_params = [param for group in self.optim.param_groups for param in group["params"]]
        state: dict[int, Any] = {}
        for local_index, param in enumerate(local_params):
            if indices[param] in state_dict["state"]:
                state[local_index] = state_dict["state"][indices[param]]
        groups = self.optim.state_dict()["param_groups"]
        _copy_options(state_dict["param_groups"], groups)
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        _copy_options(self.optim.param_groups, self.param_groups)
        self.state = self.optim.state

    # -- uneven inputs ---------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Step on joined ranks too: they own parameters. DDP's hook, which runs first, has the gradients."""
        return _ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where the first parameter lies."""
        return self._all_params()[0].device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that shares the state."""
        return self.process_group


class _ZeroJoinHook(JoinHook):
    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        self._zero.step()


def _copy_options(sources: Sequence[ParamGroup], targets: Sequence[ParamGroup]) -> None:
    """Copy everything but the parameters from one list of groups to another."""
    for source, target in zip(sources, targets, strict=True):
        target.update((name, value) for name, value in source.items() if name != "params")

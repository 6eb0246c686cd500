"""What a group of parameters has to do with gradients: reduce what has come, give parameters the means.

A parameter without a gradient on this rank may have one on another. Its mean is kept until the end of
backward tells; only then it is given to the parameter, or dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from weft.comm.record import note
from weft.errors import StateError
from weft.fsdp.flat import FEATURE
from weft.fsdp.mesh import DataMesh
from weft.fsdp.param import ShardedParam
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.fsdp.reduce import Batch, Reduction, gradient_batches
from weft.fsdp.reductions import Reductions
from weft.fsdp.roster import Roster, take_gradients
from weft.fsdp.settings import Settings
from weft.fsdp.user_hooks import give_gradient


class GroupGradients:
    """The half of a ParamGroup that gradients concern."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        data: DataMesh,
        policy: MixedPrecisionPolicy,
        settings: Settings,
        *,
        is_pinned: bool,
    ) -> None:
        self.params = list(params)
        self.data = data
        self.policy = policy
        self.settings = settings
        self.is_pinned = is_pinned  # shards, in the CPU's memory
        self.index = 0  # among the groups of its mesh
        self.name = "root"  # of its module, from the root
        self.reductions = Reductions()
        self._roster = Roster(params)
        self._trainable: list[bool] = []
        self._batches: list[Batch] = []
        self._undecided: list[tuple[ShardedParam, DTensor]] = []
        # A bit for each parameter: this rank has had a gradient for it in this backward; it was given one.
        self.used = self.given = 0
        self.keeps_unsynced = False  # gradients of backwards that didn't reduce wait here

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has anything to do with these parameters."""
        return self.data.shard_size * self.data.replicate_size == 1

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait to be reduced."""
        if self._has_unsynced():
            return True
        return self.settings.reduces_replicas and any(batch.partial is not None for batch in self._batches)

    def _has_unsynced(self) -> bool:
        return self._roster.has_gradients() or any(param.accumulated is not None for param in self.params)

    def accumulate(self) -> None:
        """Keep the gradients of a backward that doesn't reduce."""
        for param in self.params:
            param.accumulate(param.reduce_dtype(self.policy))
        self.keeps_unsynced = self._has_unsynced()

    @torch.no_grad()
    def launch_reduce(self) -> None:
        """Start to reduce the gradients that are here, or help others to. In the same order on all ranks."""
        self.keeps_unsynced = False
        if self.is_alone and self.settings.comm_hook is None and self.settings.all_reduce_hook is None:
            self._keep_own_gradients()
            return
        self.reductions.make_room()
        for number, batch in enumerate(self._find_batches()):
            grads = take_gradients(batch.params, batch.wholes())
            self.used |= batch.bits_of(grads) | batch.partial_bits()
            self.reductions.add(self, Reduction(batch, grads, self.name, self.index * 8 + number))

    def _find_batches(self) -> list[Batch]:
        trainable = self._roster.trainable()
        if self._trainable != trainable:
            self._check_nothing_waits()
            self._trainable = trainable
            wanted = gradient_batches(self.params, lambda param: param.reduce_dtype(self.policy))
            self._batches = [
                Batch(
                    params,
                    self.data,
                    params[0].reduce_dtype(self.policy),
                    self.settings,
                    is_pinned=self.is_pinned,
                )
                for params in wanted
            ]
        return self._batches

    def _keep_own_gradients(self) -> None:
        """A single rank's gradients are the mean already."""
        factor = self.settings.divide_factor
        grads = take_gradients(self.params, [param.whole for param in self.params])
        for param, grad in zip(self.params, grads, strict=True):
            if grad is None:
                if self.settings.reduces_unused and param.sharded.requires_grad:
                    grad = torch.zeros(param.local_shape, dtype=param.dtype, device=param.local.device)
                else:
                    continue
            if factor is not None:
                grad.div_(factor)
            grad = grad.to(param.local.device, param.dtype)
            give_gradient(param, _wrapped(param, grad))
        note("reduce", FEATURE, self.name, None)

    def deliver(self, param: ShardedParam, grad: DTensor | None, had: bool) -> None:
        """A mean is there; None: it was added to the gradient. `had`: this rank had a part in it."""
        if had or self.settings.reduces_unused:
            self.given |= 1 << param.bit
            give_gradient(param, grad)
        elif grad is not None:
            self._undecided.append((param, grad))

    def decide(self, used_somewhere: int) -> None:
        """Now it is known which parameters some rank has used: those get the mean, the others nothing."""
        undecided, self._undecided = self._undecided, []
        totals: dict[ShardedParam, DTensor] = {}
        for param, grad in undecided:
            if not used_somewhere >> param.bit & 1:
                continue
            if param in totals:
                totals[param]._local_tensor.add_(grad._local_tensor)
            else:
                totals[param] = grad
        for param, grad in totals.items():
            # A reduction in which no rank had a part is no gradient for one that has got its own.
            if not self.given >> param.bit & 1 or bool(grad._local_tensor.any()):
                give_gradient(param, grad)
        self.used = self.given = 0

    def release_gradients(self) -> None:
        """Let go of the memory of gradients that nobody has any more."""
        if self.is_alone:
            for param in self.params:
                if _is_free(param):
                    param.grad_wrapper._local_tensor = _NOTHING  # type: ignore[union-attr]
        for batch in self._batches:
            batch.release()

    def forget_gradients(self) -> None:
        """Drop everything that an exception has left unfinished."""
        self._undecided.clear()
        self.used = self.given = 0
        self.keeps_unsynced = False
        for batch in self._batches:
            batch.partial, batch.partial_had = None, 0
        for param in self.params:
            param.drop_gradients()

    def _renew_batches(self) -> None:
        """Parameters are not what they were: plan the reductions anew."""
        self._check_nothing_waits()
        self._batches, self._trainable = [], []

    def _check_nothing_waits(self) -> None:
        if any(batch.partial is not None for batch in self._batches):
            raise StateError(
                f"fully_shard: gradients of {self.name} wait to be reduced over the replicas, and its "
                "parameters have got another dtype, or other ones need gradients now. Run a backward with "
                "set_requires_all_reduce(True) first."
            )


_NOTHING = torch.empty(0)


def _wrapped(param: ShardedParam, grad: torch.Tensor) -> DTensor:
    """The gradient as a DTensor: last step's, unless somebody still has that."""
    if _is_free(param):
        param.grad_wrapper._local_tensor = grad  # type: ignore[union-attr]
        return param.grad_wrapper  # type: ignore[return-value]
    param.grad_wrapper = wrapper = param.wrap_gradient(grad)
    return wrapper


def _is_free(param: ShardedParam) -> bool:
    """Whether last step's gradient is there and nobody has it."""
    wrapper = param.grad_wrapper
    # Three names: the attribute, this one and the argument. The parameter's own `.grad` is none of Python's.
    return wrapper is not None and param.sharded.grad is None and sys.getrefcount(wrapper) <= 3

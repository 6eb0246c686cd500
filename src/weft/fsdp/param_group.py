"""A group of parameters that are unsharded, resharded and reduced together: what one fully_shard call makes.

A group is sharded, unsharded, or (between forward and backward) sharded over a smaller mesh; its modules have
the parameters that go with that. state.py's hooks say when it changes; order.py, in which order it uses the
network, by `start_all_gather` and `start_reduce`.

A parameter without a gradient on this rank may have one on another. Its mean is withheld until the end of
backward tells; then it is given to the parameter, or dropped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weft.autograd import set_versions
from weft.comm.record import note
from weft.errors import InternalError, StateError, UnsupportedError
from weft.fsdp.all_gather import FlatParams
from weft.fsdp.extension import ExtensionParam
from weft.fsdp.mesh import FEATURE, DataParallelMesh
from weft.fsdp.order import CollectiveOrder
from weft.fsdp.param import ShardedParam, is_unsharded_param
from weft.fsdp.policy import GroupSettings, MixedPrecisionPolicy
from weft.fsdp.reduce import GradReduction, Grads, ReduceBucket, ReductionQueue, accumulate_grad, plan_buckets

_MAX_BUCKETS = 8  # of a group, for the numbers that comm hooks know buckets by


class ShardedState(Enum):
    """Which parameters the modules have."""

    SHARDED = 0
    SHARDED_POST_FORWARD = 1  # over a smaller mesh
    UNSHARDED = 2


class ParamGroup:
    """The parameters of one call of fully_shard, their buffers, and the collectives under way for them."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dp_mesh: DataParallelMesh,
        policy: MixedPrecisionPolicy,
        settings: GroupSettings,
        shard_device: torch.device,
        *,
        is_pinned: bool = False,
    ) -> None:
        self.params = list(params)
        self.dp_mesh = dp_mesh
        self.policy = policy
        self.settings = settings
        self.shard_device = shard_device
        self.is_pinned = is_pinned  # shards, in the CPU's memory
        self.is_single_rank = dp_mesh.shard_size * dp_mesh.replicate_size == 1
        # Known once the model's first forward begins.
        self.name = "root"  # fqn of its module
        self.index = 0  # among the groups of its mesh
        self.order = CollectiveOrder(dp_mesh, [self])
        self.reduction_queue = ReductionQueue()
        # Parameters.
        self.sharded_state = ShardedState.SHARDED
        self.is_unshard_pending = False  # for this rank's modules, or prefetched for nobody but peers
        self.is_in_graphs = False  # compiled graphs unshard it
        self._registered = RegisteredParams(params)
        self._buffers: list[FlatParams | ExtensionParam] = []
        self._all_gathers_post_forward = False  # from the smaller mesh: all ranks agreed to
        self._handles_for_peers: list[Any] = []
        self._start_secs = 0.0  # of the pending unshard
        self._versions: list[int] = []
        self._local_ptrs: list[tuple[int, bool]] = []
        # Gradients.
        self._trainable: list[bool] = []
        self._buckets: list[ReduceBucket] = []
        self._withheld: list[tuple[ShardedParam, DTensor]] = []
        # A bit for each parameter: had a gradient on this rank in this backward; was given its mean.
        self.used = self.delivered = 0
        self.keeps_unreduced_grads = False  # of backwards that didn't reduce

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    @property
    def is_unsharded_or_pending(self) -> bool:
        """Whether the parameters are unsharded, or an all-gather of them is under way."""
        return self.is_unshard_pending or self.sharded_state is ShardedState.UNSHARDED

    # Buffers

    def prepare(self) -> None:
        """Make the flat buffers, anew where parameters have changed their dtype or their device."""
        replaced = [param for param in self.params if param.adopt_replacement()]
        if replaced:
            self._registered.refresh()
        if any(param.local.is_meta for param in self.params):
            return
        if not self._buffers or not all(buffer.fits() for buffer in self._buffers):
            self._make_buffers()

    def _make_buffers(self) -> None:
        mesh, policy = self.dp_mesh, self.policy
        buffers = [ExtensionParam(param, mesh, policy) for param in self.params if param.has_extension]
        flat_params = [param for param in self.params if not param.has_extension]
        self._check_no_partial_sums()
        self._buckets, self._trainable = [], []
        self._buffers = list(buffers)
        for param in self.params:
            param.accumulated_grad = param.pop_unsharded_grad()
            param.unsharded = None
        if flat_params:
            self._buffers.append(
                FlatParams(flat_params, mesh, policy, self.settings, is_pinned=self.is_pinned)
            )
        self._registered.refresh()

    def _adopt_changes(self) -> None:
        """Notice what users have done to the parameters since the last all-gather."""
        if not self._buffers or self._local_ptrs != self._registered.local_ptrs():
            self.prepare()
            for buffer in self._buffers:
                buffer.adopt_moved()
            self._local_ptrs = self._registered.local_ptrs()

    # Unshard

    def unshard(self) -> None:
        """Return when the modules have unsharded parameters; the plan's next all-gather is under way then."""
        if self.sharded_state is ShardedState.UNSHARDED:
            return
        if self.is_unshard_pending:
            self.order.use_prefetched(self.index)
        else:
            self.start_unshard()
        self.wait_for_unshard()
        if not self.is_unsharded_or_pending:
            raise InternalError(f"fully_shard: {self.name} was all-gathered and is not unsharded.")

    def start_unshard(self) -> None:
        """Start an all-gather in the collective order, unless one is under way or done."""
        if self.sharded_state is ShardedState.UNSHARDED or self.is_unshard_pending:
            return
        if self.dp_mesh.shard_size == 1:
            self.start_all_gather()  # no other rank is concerned
        else:
            self.order.all_gather(self.index)

    def start_all_gather(self) -> None:
        """Start an all-gather, for this rank or for peers. Called in collective order, on all ranks."""
        if self.sharded_state is ShardedState.SHARDED and not self.is_unshard_pending:
            self._adopt_changes()
        if self.sharded_state is ShardedState.UNSHARDED or self.is_unshard_pending:
            self._handles_for_peers += [buffer.launch_for_peers(self.name) for buffer in self._buffers]
            return
        self._start_secs = time.perf_counter()
        for buffer in self._buffers:
            buffer.start_all_gather(self.name, from_post_forward=self._all_gathers_post_forward)
        self.is_unshard_pending, self._all_gathers_post_forward = True, False

    def wait_for_unshard(self) -> None:
        """Wait for the pending all-gather, and register the unsharded parameters."""
        self._wait_for_peers()
        if not self.is_unshard_pending:
            return
        self.is_unshard_pending = False
        for buffer in self._buffers:
            buffer.finish_all_gather()
        self._registered.register_unsharded()
        self.sharded_state = ShardedState.UNSHARDED
        # Only what is kept can become stale.
        is_kept = self.settings.post_forward_mesh is None or not self.settings.reshards_after_backward
        self._versions = self._registered.versions() if is_kept else []
        note(
            "unshard",
            FEATURE,
            self.name,
            self.dp_mesh.shard_group,
            bytes_out=self.num_bytes,
            start_secs=self._start_secs,
        )

    def _wait_for_peers(self) -> None:
        handles, self._handles_for_peers = self._handles_for_peers, []
        for handle in handles:
            if handle is not None:
                handle.wait()

    def check_not_transformed(self) -> None:
        """Raise where somebody has put parameters with tangents, or batches of them, in the modules."""
        for param in self.params:
            for slot, name in param.slots:
                registered = slot[name]
                if not isinstance(registered, DTensor) and not is_unsharded_param(registered):
                    raise UnsupportedError(
                        f"fully_shard: parameter {param.fqn} was replaced for a transform of torch.func or "
                        "for forward-mode AD, and the gathered parameter would take its place. Give tangents "
                        "to inputs only; differentiate by parameters in reverse mode."
                    )

    # Reshard

    def reshard(self) -> None:
        """Register the sharded parameters, and free the unsharded ones."""
        self._wait_for_peers()
        if self.is_unshard_pending:  # nobody needs it any more
            self.is_unshard_pending = False
            for buffer in self._buffers:
                buffer.wait_all_gather()
        elif self.sharded_state is ShardedState.SHARDED:
            return
        self._registered.register_sharded()
        if not all(buffer.is_alias for buffer in self._buffers):
            self._registered.invalidate_unsharded()
        for buffer in self._buffers:
            buffer.reshard()
        self.sharded_state = ShardedState.SHARDED
        self._all_gathers_post_forward = False
        note("reshard", FEATURE, self.name, self.dp_mesh.shard_group, bytes_in=self.num_bytes)

    def reshard_after_forward(self) -> None:
        """Reshard as the settings say for after forward."""
        mesh = self.settings.post_forward_mesh
        if mesh is None:
            return
        if mesh is self.dp_mesh:
            self.reshard()
        elif self.is_unsharded_or_pending:
            self.wait_for_unshard()
            for buffer in self._buffers:
                buffer.reshard_to(mesh)
            self._registered.invalidate_unsharded()
            self.sharded_state = ShardedState.SHARDED_POST_FORWARD
            note("reshard", FEATURE, self.name, mesh.shard_group, bytes_in=self.num_bytes)

    def reshard_if_stale(self) -> None:
        """Reshard if the sharded parameters were changed while the unsharded ones were kept."""
        if self.sharded_state is not ShardedState.UNSHARDED or not self._versions:
            return
        if self._versions != self._registered.versions() or not self._registered.has_unsharded():
            self.reshard()

    def drop_prefetched(self) -> None:
        """Free what was all-gathered for peers."""
        if not self.is_unshard_pending:
            return
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            self.is_unshard_pending = False  # the post-forward shard stays
            for buffer in self._buffers:
                buffer.free_unsharded()
        else:
            self.reshard()

    def drop_post_forward(self) -> None:
        """Before a forward: what an earlier one left on the smaller mesh may be older than the shards."""
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            self.reshard()
        self._all_gathers_post_forward = False

    def settle_post_forward(self, *, is_everywhere: bool) -> None:
        """After a forward of all ranks: whether every one of them has the group on the smaller mesh."""
        if self.is_unshard_pending and is_everywhere:
            self.drop_prefetched()  # all-gathered for peers once more, after this rank was there
        elif self.is_unshard_pending or (
            self.sharded_state is ShardedState.SHARDED_POST_FORWARD and not is_everywhere
        ):
            self.reshard()
        self._all_gathers_post_forward = is_everywhere

    def register_sharded(self) -> None:
        """Register the sharded parameters. What ranks agreed to all-gather from stays as it is."""
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            self._registered.register_sharded()
        else:
            self.reshard()

    def stays_unsharded(self, *, in_backward: bool) -> bool:
        """Whether it is unsharded and stays so past the end of the forward, or of the backward."""
        is_kept = not in_backward or not self.settings.reshards_after_backward
        return self.sharded_state is ShardedState.UNSHARDED and is_kept and self.dp_mesh.shard_size > 1

    def ptrs_freed_after_forward(self, *, frees_all: bool) -> list[int]:
        """The storages that the end of forward frees."""
        is_freed = frees_all or self.settings.post_forward_mesh is not None
        if not is_freed or self.sharded_state is not ShardedState.UNSHARDED:
            return []
        return [ptr for buffer in self._buffers for ptr in buffer.freed_ptrs()]

    # Gradients

    @property
    def has_grads(self) -> bool:
        """Whether gradients wait to be reduced."""
        if self._has_unreduced_grads():
            return True
        all_reduces = self.settings.all_reduces_grads
        return all_reduces and any(bucket.partial_sum is not None for bucket in self._buckets)

    def _has_unreduced_grads(self) -> bool:
        if self._registered.has_unsharded_grads():
            return True
        return any(param.accumulated_grad is not None for param in self.params)

    def accumulate_grads(self) -> None:
        """Keep the gradients of a backward that doesn't reduce."""
        for param in self.params:
            param.accumulate_unsharded_grad(param.reduce_dtype(self.policy))
        self.keeps_unreduced_grads = self._has_unreduced_grads()

    def reduce_grads(self) -> None:
        """Start to reduce this rank's gradients in the collective order."""
        if self.is_single_rank:
            self.start_reduce()
        else:
            self.order.reduce(self.index)

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Start a reduction, for this rank or for peers. Called in collective order, on all ranks."""
        self.keeps_unreduced_grads = False
        has_hook = self.settings.comm_hook is not None or self.settings.all_reduce_hook is not None
        if self.is_single_rank and not has_hook:
            self._deliver_own_grads()
            return
        self.reduction_queue.finish()  # of the group before; it may use the same buffers
        for number, bucket in enumerate(self._current_buckets()):
            grads = _pop_unsharded_grads(bucket.params, bucket.unsharded_params())
            self.used |= bucket.used_bits(grads)
            self.reduction_queue.add(GradReduction(self, bucket, grads, self.index * _MAX_BUCKETS + number))

    def _current_buckets(self) -> list[ReduceBucket]:
        trainable = self._registered.trainable()
        if self._trainable != trainable:
            self._check_no_partial_sums()
            self._trainable = trainable
            self._buckets = [
                ReduceBucket(
                    params,
                    self.dp_mesh,
                    params[0].reduce_dtype(self.policy),
                    self.settings,
                    is_pinned=self.is_pinned,
                )
                for params in plan_buckets(self.params, lambda param: param.reduce_dtype(self.policy))
            ]
        return self._buckets

    def _check_no_partial_sums(self) -> None:
        if any(bucket.partial_sum is not None for bucket in self._buckets):
            raise StateError(
                f"fully_shard: gradients of {self.name} wait to be reduced over the replicas, and its "
                "parameters have got another dtype, or other ones need gradients now. Run a backward with "
                "set_requires_all_reduce(True) first."
            )

    def _deliver_own_grads(self) -> None:
        """A single rank's gradients are the mean already."""
        factor = self.settings.gradient_divide_factor
        grads = _pop_unsharded_grads(self.params, [param.unsharded for param in self.params])
        for param, grad in zip(self.params, grads, strict=True):
            if grad is None:
                if self.settings.reduces_unused and param.sharded.requires_grad:
                    grad = torch.zeros(param.local_shape, dtype=param.dtype, device=param.local.device)
                else:
                    continue
            if factor is not None:
                grad.div_(factor)
            grad = grad.to(param.local.device, param.dtype)
            accumulate_grad(param, _make_own_grad(param, grad))
        note("reduce", FEATURE, self.name, None)

    def deliver(self, param: ShardedParam, grad: DTensor | None, *, is_used: bool) -> None:
        """Take a mean; None: it was added to the gradient already. `is_used`: this rank had a gradient."""
        if is_used or self.settings.reduces_unused:
            self.delivered |= 1 << param.bit
            accumulate_grad(param, grad)
        elif grad is not None:
            self._withheld.append((param, grad))

    def deliver_withheld(self, used_anywhere: int) -> None:
        """Give withheld means to the parameters that some rank has used, and drop the others."""
        withheld, self._withheld = self._withheld, []
        totals: dict[ShardedParam, DTensor] = {}
        for param, grad in withheld:
            if not used_anywhere >> param.bit & 1:
                continue
            if param in totals:
                totals[param]._local_tensor.add_(grad._local_tensor)
            else:
                totals[param] = grad
        for param, grad in totals.items():
            # A reduction in which no rank had a part is no gradient for a parameter that has got its own.
            if not self.delivered >> param.bit & 1 or bool(grad._local_tensor.any()):
                accumulate_grad(param, grad)
        self.used = self.delivered = 0

    def free_unheld_grads(self) -> None:
        """Free the memory of gradients that nobody holds any more."""
        if self.is_single_rank:
            for param in self.params:
                if _is_last_grad_unheld(param):
                    param.last_grad._local_tensor = _EMPTY  # type: ignore[union-attr]
        for bucket in self._buckets:
            bucket.free_unheld_grads()

    def drop_step(self) -> None:
        """Drop everything that an exception has left unfinished, gradients included."""
        self._withheld.clear()
        self.used = self.delivered = 0
        self.keeps_unreduced_grads = False
        for bucket in self._buckets:
            bucket.drop_partial()
        for param in self.params:
            param.drop_unreduced_grads()
        self.reshard()


class RegisteredParams:
    """A group's parameters as flat lists, for what is done with all of them many times a step.

    A method call for each of 600 parameters takes longer than their layers, so loops run over lists that are
    made once, and again when a parameter was replaced.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = list(params)
        self._sharded: list[Any] = []
        self._first_slots: list[tuple[Any, str]] = []
        self._sharded_slots: list[tuple[Any, str, Any]] = []
        self._unsharded: list[Any] = []
        self._unsharded_slots: list[tuple[Any, str, Any]] = []
        self._trainable: list[bool] = []  # as the unsharded parameters are
        self._valid_versions: list[int] | None = None  # of the unsharded parameters, while they are freed
        self.refresh()

    def refresh(self) -> None:
        """Read anew which parameters there are."""
        self._sharded = [param.sharded for param in self._params]
        self._first_slots = [param.slots[0] for param in self._params]
        self._sharded_slots = [
            (slot, name, param.sharded) for param in self._params for slot, name in param.slots
        ]
        self._unsharded, self._unsharded_slots = [], []
        self._valid_versions = None

    def local_ptrs(self) -> list[tuple[int, bool]]:
        """Where the registered parameters' local tensors lie, and whether these have an extension; -1 for
        what is no DTensor.
        """
        try:
            tensors = [slot[name]._local_tensor for slot, name in self._first_slots]
        except AttributeError:
            return [(-1, False)]
        return [(tensor.data_ptr(), hasattr(tensor, "fsdp_pre_all_gather")) for tensor in tensors]

    def versions(self) -> list[int]:
        """Numbers that increase when a sharded parameter is changed in place."""
        return [param._version + param._local_tensor._version for param in self._sharded]

    def trainable(self) -> list[bool]:
        """Which of the sharded parameters need gradients."""
        return [param.requires_grad for param in self._sharded]

    def register_sharded(self) -> None:
        """Let modules have the sharded parameters."""
        for slot, name, param in self._sharded_slots:
            slot[name] = param

    def register_unsharded(self) -> None:
        """Let modules have the unsharded parameters."""
        if not self._unsharded:
            self._unsharded = [param.unsharded for param in self._params]
            self._unsharded_slots = [
                (slot, name, param.unsharded) for param in self._params for slot, name in param.slots
            ]
            self._trainable = []
        for slot, name, param in self._unsharded_slots:
            slot[name] = param
        if self._valid_versions is not None:
            set_versions(self._unsharded, self._valid_versions)
            self._valid_versions = None
        trainable = self.trainable()
        if trainable != self._trainable:
            self._trainable = trainable
            for param, needs_grad in zip(self._unsharded, trainable, strict=True):
                if param.requires_grad != needs_grad:
                    param.requires_grad_(needs_grad)

    def invalidate_unsharded(self) -> None:
        """Let autograd take the unsharded parameters for changed, until they are unsharded again.

        Their memory is freed. A backward that reaches them without a pre-backward hook, by a tensor that
        forward did not return, raises then in place of reading it.
        """
        if self._unsharded and self._valid_versions is None:
            self._valid_versions = [param._version for param in self._unsharded]
            set_versions(self._unsharded, [version + 1 for version in self._valid_versions])

    def has_unsharded(self) -> bool:
        """Whether modules still have the unsharded parameters (functional_call puts others there), and the
        same ones need gradients.
        """
        is_registered = all(slot[name] is param for slot, name, param in self._unsharded_slots)
        return is_registered and self._trainable == self.trainable()

    def has_unsharded_grads(self) -> bool:
        """Whether unsharded parameters have gradients."""
        return any(param.grad is not None for param in self._unsharded)


def _pop_unsharded_grads(params: Sequence[ShardedParam], unsharded: Sequence[Any]) -> Grads:
    """This rank's gradients, plain, dense and contiguous; they are removed from the parameters."""
    if unsharded[0] is None:  # never unsharded here: this rank reduces for peers
        return [param.pop_unsharded_grad() for param in params]
    grads = [param.grad for param in unsharded]
    if not _are_plain(grads) or any(param.accumulated_grad is not None for param in params):
        return [param.pop_unsharded_grad() for param in params]
    for param in unsharded:
        param.grad = None
    return grads


def _are_plain(grads: Sequence[Any]) -> bool:
    try:
        return all(type(grad) is torch.Tensor and grad.is_contiguous() for grad in grads)
    except RuntimeError:  # of a sparse one
        return False


_EMPTY = torch.empty(0)


def _make_own_grad(param: ShardedParam, grad: torch.Tensor) -> DTensor:
    """A single rank's gradient as a DTensor: last step's, unless somebody still holds that."""
    if _is_last_grad_unheld(param):
        param.last_grad._local_tensor = grad  # type: ignore[union-attr]
        return param.last_grad  # type: ignore[return-value]
    param.last_grad = made = param.make_sharded_grad(grad)
    return made


def _is_last_grad_unheld(param: ShardedParam) -> bool:
    """Whether last step's gradient is there and nobody holds it."""
    grad = param.last_grad
    # Three names: the attribute, this one and the argument. The parameter's own `.grad` is none of Python's.
    return grad is not None and param.sharded.grad is None and sys.getrefcount(grad) <= 3

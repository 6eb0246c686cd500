"""Cross-entropy of logits that are split by class: no rank ever has them all.

`loss_parallel` is a context in which torch.nn.functional's `cross_entropy`, `log_softmax` and `nll_loss` (and
the modules that call them) take DTensors with class shards. It catches the calls of its own thread as a
torch function mode and changes nothing of torch's; what was computed in it can be differentiated anywhere.

The arithmetic is class_shards.py's. Here DTensors are checked, opened and made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from weft import comm
from weft.comm.simulated import check_one_rank
from weft.compiler import opened_piece
from weft.errors import ConfigError, ConfigTypeError, UnfitError, UnsupportedError
from weft.tensor_parallel import class_shards
from weft.tensor_parallel.class_shards import HALVES, Aims, ClassShard, make_aims, wide_dtype
from weft.tensor_parallel.ids import check_ids
from weft.tensors import contiguous_strides, local_of

REDUCTIONS = ("none", "mean", "sum")


@contextmanager
def loss_parallel() -> Generator[None]:
    """Let losses take logits that are sharded by class.

    Inside, `torch.nn.functional.cross_entropy` and `torch.nn.CrossEntropyLoss` take a DTensor whose class dim
    one mesh axis shards; other axes may shard other dims, or nothing. `target` has class indices: a DTensor
    with the logits' placements, but Replicate for the class axis and counted without the class dim, or a
    plain tensor where no other axis shards. `weight` has all classes. The loss is a DTensor: of `reduction`
    "none" it lies as the target; of "sum" it is Partial over axes that shard other dims; "mean" is for
    meshes of one axis. Plain tensors are torch's, as always.

    Beyond torch's: label_smoothing, classes that don't divide by the ranks, backward outside the context,
    second derivatives, `log_softmax` and `nll_loss` by themselves.

    Raises ValueError for a DTensor that isn't sharded so. Every rank of the class axis calls alike.
    """
    with _LossMode():
        yield


class _LossMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            logits = args[0] if args else kwargs.get("input")
            if isinstance(logits, DTensor):
                return handler(*args, **kwargs)
        return func(*args, **kwargs)


# -- the functions, with torch's signatures ----------------------------------------------


def _cross_entropy(
    input: DTensor,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DTensor:
    if not 0.0 <= label_smoothing <= 1.0:
        raise UnfitError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    border = _find_classes(input, 1 if input.ndim > 1 else 0)
    reduction = border.check_reduction(reduction, size_average, reduce)
    aims = border.aim(target, weight, ignore_index, label_smoothing)
    losses = class_shards.cross_entropy(border.open(), aims, border.shard)
    return border.reduce(losses, aims.weight, reduction)


def _nll_loss(
    input: DTensor,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> DTensor:
    border = _find_classes(input, 1 if input.ndim > 1 else 0)
    reduction = border.check_reduction(reduction, size_average, reduce)
    aims = border.aim(target, weight, ignore_index, 0.0)
    losses = class_shards.nll_loss(border.open(), aims, border.shard)
    return border.reduce(losses, aims.weight, reduction)


def _functional_log_softmax(
    input: DTensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> DTensor:
    return _log_softmax(input, dim, dtype)


def _log_softmax(input: DTensor, dim: int | None = None, dtype: torch.dtype | None = None) -> DTensor:
    if dim is None:
        raise ConfigError("loss_parallel(): log_softmax of a DTensor needs `dim`, that of the classes.")
    border = _find_classes(input, dim % input.ndim)
    made = class_shards.log_softmax(border.open(), border.shard, dtype or input.dtype)
    return border.close(made, input.placements, input.shape)


_HANDLERS: dict[Any, Callable[..., DTensor]] = {
    functional.cross_entropy: _cross_entropy,
    functional.nll_loss: _nll_loss,
    functional.log_softmax: _functional_log_softmax,
    torch.log_softmax: _log_softmax,
    torch.Tensor.log_softmax: _log_softmax,
}


# -- between DTensors and local tensors ----------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Border:
    """Logits as they lie: which mesh axis shards the classes, and what lies how beside them."""

    logits: DTensor
    class_axis: int
    shard: ClassShard

    def open(self) -> torch.Tensor:
        """What this rank has of the logits, for autograd too."""
        if torch.compiler.is_compiling():  # Dynamo knows DTensor's own way
            return self.logits.to_local(grad_placements=self.logits.placements)
        return opened_piece(self.logits)

    def close(self, local: torch.Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
        """A result as a DTensor, for autograd too."""
        size = torch.Size(shape)
        strides = contiguous_strides(size)
        mesh = self.logits.device_mesh
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=strides)

    @property
    def position_placements(self) -> tuple[Placement, ...]:
        """How targets and losses by position lie: as the logits, without the class dim."""
        dim = self.shard.dim
        return tuple(
            Shard(place.dim - (place.dim > dim))
            if isinstance(place, Shard) and axis != self.class_axis
            else Replicate()
            for axis, place in enumerate(self.logits.placements)
        )

    def check_reduction(self, reduction: str, size_average: bool | None, reduce: bool | None) -> str:
        """The reduction that is meant, where it can be had."""
        if size_average is not None or reduce is not None:  # torch's old names for it
            mean_or_sum = "sum" if size_average is False else "mean"
            reduction = "none" if reduce is False else mean_or_sum
        if reduction not in REDUCTIONS:
            raise ConfigError(f"{reduction} is not a valid value for reduction: take one of {REDUCTIONS}.")
        mesh = self.logits.device_mesh
        if reduction == "mean" and mesh.ndim > 1:
            raise UnsupportedError(
                "loss_parallel() with reduction='mean' is only supported on one-dimensional DeviceMesh; got "
                f"mesh with ndim={mesh.ndim}: ranks may have different numbers of targets. Use "
                "reduction='sum' or 'none' instead, and divide by the number that you mean."
            )
        return reduction

    def aim(self, target: Any, weight: Any, ignore_index: int, smoothing: float) -> Aims:
        """What the loss wants, from a user's arguments."""
        mesh, shard = self.logits.device_mesh, self.shard
        ids = _open_argument(target, "target", self.position_placements, mesh)
        if ids.is_floating_point():
            raise UnsupportedError(
                f"loss_parallel(): the target is of {ids.dtype}. Class probabilities are not supported: give "
                "class indices (int64)."
            )
        if ids.dtype not in (torch.int64, torch.uint8):
            raise UnfitError(f"expected target dtype to be Long or Byte, but got {ids.dtype}.")
        sizes = list(local_of(self.logits).shape)
        del sizes[shard.dim]
        if list(ids.shape) != sizes:
            raise UnfitError(
                f"Expected input batch_size ({sizes}, the shape of this rank's logits without classes) to "
                f"match target batch_size ({list(ids.shape)})."
            )
        check_ids(
            ids,
            shard.num_classes,
            lambda wrong: f"Target {wrong} is out of bounds. There are {shard.num_classes} classes.",
            ignored=ignore_index,
        )
        weights = None
        if weight is not None:
            weights = _open_argument(weight, "weight", (Replicate(),) * mesh.ndim, mesh)
            if weights.shape != (shard.num_classes,):
                raise UnfitError(
                    f"weight tensor should be defined either for all {shard.num_classes} classes or no "
                    f"classes but got weight tensor of shape: {list(weights.shape)}"
                )
        return make_aims(ids.long(), shard, weights, ignore_index, smoothing, wide_dtype(self.logits.dtype))

    def reduce(self, losses: torch.Tensor, weights: torch.Tensor, reduction: str) -> DTensor:
        """The losses by position as the user wants them."""
        dtype, device = self.logits.dtype, losses.device.type
        is_wide = dtype in HALVES and torch.is_autocast_enabled(device)
        dtype = torch.float32 if is_wide else dtype
        placements = self.position_placements
        if reduction == "none":
            shape = list(self.logits.shape)
            del shape[self.shard.dim]
            return self.close(losses.to(dtype), placements, shape)
        total = losses.sum()
        if reduction == "mean":
            total = total / weights.sum()
        summed = [Partial() if isinstance(place, Shard) else place for place in placements]
        return self.close(total.to(dtype), summed, ())


def _find_classes(logits: DTensor, dim: int) -> _Border:
    """Where the classes are. Raises ValueError where they are not on one axis, and only they."""
    mesh, placements = logits.device_mesh, logits.placements
    axes = [axis for axis, place in enumerate(placements) if place.is_shard(dim)]
    if len(axes) != 1:
        raise ConfigError(
            f"loss_parallel() requires exactly one mesh dim to shard tensor dimension {dim}, but got "
            f"placements {placements} with {len(axes)} such mesh dim(s). Redistribute the logits, or leave "
            "the context."
        )
    (class_axis,) = axes
    for axis, place in enumerate(placements):
        if not (place.is_shard() or place.is_replicate()):
            raise ConfigError(
                f"loss_parallel() expects non-TP mesh dims to be Shard or Replicate, got {place} at dim "
                f"{axis}. Redistribute the logits first."
            )
    group = mesh.get_group(class_axis)
    sizes = comm.chunk_sizes(logits.shape[dim], group.size())
    check_one_rank("loss_parallel")
    rank = mesh.get_local_rank(class_axis)
    num_own = local_of(logits).shape[dim]
    if num_own != sizes[rank]:
        raise ConfigError(
            f"loss_parallel(): rank {rank} of {group.size()} has {num_own} classes, and of {sum(sizes)} in "
            f"all it should have {sizes[rank]}. Give DTensor.from_local the whole's shape and stride."
        )
    return _Border(logits, class_axis, ClassShard(dim, sum(sizes[:rank]), num_own, sum(sizes), group))


def _open_argument(
    tensor: Any, name: str, placements: tuple[Placement, ...], mesh: DeviceMesh
) -> torch.Tensor:
    """What this rank has of a target or weight that must lie so."""
    if isinstance(tensor, DTensor):
        if tensor.placements != placements or tensor.device_mesh != mesh:
            raise UnfitError(
                f"Expected {placements} but got {tensor.placements}: loss_parallel() needs the {name} on the "
                f"logits' mesh {mesh}. Redistribute it."
            )
        return local_of(tensor)
    if not isinstance(tensor, torch.Tensor):
        raise ConfigTypeError(f"Unsupported type {type(tensor)}: loss_parallel() needs a tensor as {name}.")
    if any(isinstance(place, Shard) for place in placements):
        raise ConfigError(
            f"loss_parallel() requires a DTensor (not a plain torch.Tensor) as {name}: with the logits' "
            f"placements it lies as {placements}, and nobody knows whether a plain one is the whole or this "
            "rank's part. Wrap it with DTensor.from_local or distribute_tensor."
        )
    return tensor

"""Parameters whose local tensor defines what is all-gathered, and what becomes of it: torch's extensions.

Its `fsdp_pre_all_gather` gives the inputs of the all-gather (8-bit values and a scale, say), and its
`fsdp_post_all_gather` makes the unsharded parameter of the outputs. A tensor subclass has these methods, or
users set them on the local tensor of a sharded parameter.

Invariant: the same methods as FlatParams (all_gather.py), so that a param group drives both alike.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from weft import comm
from weft.comm import Handle
from weft.comm.call import hosted_by
from weft.errors import RefusedError, UnsupportedError
from weft.fsdp.all_gather import allocate_storage, free_storage
from weft.fsdp.mesh import FEATURE, DataParallelMesh
from weft.fsdp.param import ShardedParam
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.tensors import contiguous_strides


class ExtensionParam:
    """One such parameter, all-gathered by itself."""

    def __init__(self, param: ShardedParam, dp_mesh: DataParallelMesh, policy: MixedPrecisionPolicy) -> None:
        self.params = [param]
        self._param = param
        self._dp_mesh = dp_mesh
        self._policy = policy
        self._outputs: list[torch.Tensor] = []  # of the all-gather, 1D
        self._sizes: list[torch.Size] = []
        self._inner: Any = ()  # tensors that the unsharded parameter is made of
        self._metadata: Any = None
        self._pending: Handle[Any] | None = None
        check_extension(param)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is all-gathered."""
        return sum(output.numel() * output.element_size() for output in self._outputs)

    is_alias = False

    def fits(self) -> bool:
        """Whether the tensor still has the extension: users may take the methods off again."""
        return self._param.has_extension

    def adopt_moved(self) -> None:
        """No effect: nothing is kept of the sharded parameter."""

    def start_all_gather(self, name: str, *, from_post_forward: bool) -> None:
        """Start to all-gather what the tensor gives."""
        self._pending = self._launch(name, keeps=True)

    def launch_for_peers(self, name: str) -> Handle[Any] | None:
        """Take part in an all-gather for peers; already unsharded here."""
        return self._launch(name, keeps=False)

    @torch.no_grad()
    def _launch(self, name: str, *, keeps: bool) -> Handle[Any] | None:
        param = self._param
        inputs, metadata = self._call_pre_all_gather(param)
        device = self._dp_mesh.device
        flat = [tensor.to(device, non_blocking=True).contiguous().view(-1) for tensor in inputs]
        outputs = [tensor.new_empty(tensor.numel() * self._dp_mesh.shard_size) for tensor in flat]
        if keeps:
            self._sizes, self._metadata = [tensor.size() for tensor in inputs], metadata
            if list(map(_size_of, self._outputs)) == list(map(_size_of, outputs)):
                outputs = self._outputs
                for output in outputs:
                    allocate_storage(output)
            self._outputs = outputs
        if self._dp_mesh.shard_size == 1:
            for output, tensor in zip(outputs, flat, strict=True):
                output.copy_(tensor)
            return None
        handle = comm.all_gather_into_tensor_coalesced(
            outputs, flat, self._dp_mesh.shard_group, feature=FEATURE, label=name
        )
        return handle.followed()

    def _call_pre_all_gather(self, param: ShardedParam) -> tuple[Any, Any]:
        pre_all_gather = self._find_pre_all_gather(param)
        num_args = len(inspect.signature(pre_all_gather).parameters)
        mesh = self._dp_mesh.mesh
        shard_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]
        if num_args == 1:
            with hosted_by(FEATURE):
                return pre_all_gather(shard_mesh)
        if num_args != 5:
            raise RefusedError(
                f"Invalid fsdp_pre_all_gather of parameter {param.fqn}: it takes {num_args} arguments. "
                "Expects fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)."
            )
        shape = torch.Size(param.layout.shape)
        with hosted_by(FEATURE):
            inputs, metadata = pre_all_gather(
                shard_mesh, shape, contiguous_strides(shape), param.sites[0].module, self._policy
            )
        self._check_padding(param, inputs)
        return inputs, metadata

    def _find_pre_all_gather(self, param: ShardedParam) -> Any:
        """The tensor's own, on the device; one that the user has set stays with the tensor it was set on."""
        local: Any = param.local.to(self._dp_mesh.device, non_blocking=True)
        return getattr(local, "fsdp_pre_all_gather", None) or param.local.fsdp_pre_all_gather  # type: ignore[attr-defined]

    def _check_padding(self, param: ShardedParam, inputs: Any) -> None:
        """Raise unless all ranks give as much, also those with a short shard or none."""
        padded = torch.Size((param.layout.chunk_length, *param.layout.shape[1:]))
        is_short = param.local_shape != tuple(padded)
        if is_short and any(tensor.size() != padded for tensor in inputs):
            raise RefusedError(
                f"parameter {param.fqn}: When a parameter is unevenly sharded by FSDP (orig "
                f"size={tuple(param.layout.shape)}, FSDP world size={self._dp_mesh.shard_size}), "
                "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
                f"{tuple(padded)} but got {[tuple(tensor.size()) for tensor in inputs]}."
            )

    def finish_all_gather(self) -> None:
        """Wait, and let the tensor class make the unsharded parameter."""
        self.wait_all_gather()
        param = self._param
        tensor: Any = param.local
        dtype = param.compute_dtype(self._policy)
        with torch.inference_mode(False), torch.no_grad(), hosted_by(FEATURE):
            outputs = tuple(
                output.view(-1, *size[1:]) for output, size in zip(self._outputs, self._sizes, strict=True)
            )
            if param.unsharded is None:
                unsharded, self._inner = tensor.fsdp_post_all_gather(outputs, self._metadata, dtype)
                shape = param.layout.shape
                if tuple(unsharded.shape) != shape:  # padding
                    unsharded = torch.as_strided(unsharded, shape, contiguous_strides(shape), 0)
                param.init_unsharded(unsharded)
            else:
                for inner in self._inner:
                    allocate_storage(inner)
                tensor.fsdp_post_all_gather(outputs, self._metadata, dtype, out=param.unsharded)
        self._metadata = None

    def wait_all_gather(self) -> None:
        """Wait for the all-gather under way, needed or not."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()

    def free_unsharded(self) -> None:
        """Free the memory of the unsharded parameter."""
        self.wait_all_gather()
        self.reshard()

    def reshard(self) -> None:
        """Free the memory of the unsharded parameter."""
        for tensor in (*self._outputs, *self._inner):
            free_storage(tensor)

    def freed_ptrs(self) -> list[int]:
        """The storages that `reshard` frees."""
        return [tensor.untyped_storage().data_ptr() for tensor in (*self._outputs, *self._inner)]

    def reshard_to(self, mesh: DataParallelMesh) -> None:
        """Raise: only the tensor class could chunk what it has all-gathered."""
        raise RefusedError(
            f"fully_shard: parameter {self._param.fqn} has fsdp_pre_all_gather, and reshard_after_forward="
            f"{mesh.shard_size} can't shard what it all-gathered. Use True or False."
        )


def _size_of(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.numel(), tensor.dtype


def check_extension(param: ShardedParam) -> None:
    """Raise for a parameter whose tensor can't be all-gathered."""
    if param.layout.dim != 0 and param.layout.num_ranks > 1:
        raise UnsupportedError(
            f"fully_shard: parameter {param.fqn} has fsdp_pre_all_gather and is sharded along dim "
            f"{param.layout.dim}; what it all-gathers is joined along dim 0 only. Return Shard(0) from "
            "shard_placement_fn."
        )
    names = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    missing = [name for name in names if not hasattr(param.local, name)]
    if missing:
        raise RefusedError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather "
            f"extensions: {type(param.local).__name__} of parameter {param.fqn} lacks {missing[0]}."
        )

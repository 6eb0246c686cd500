"""Parameters whose tensor says itself what is gathered, and what becomes of it.

Its `fsdp_pre_all_gather` gives the tensors that travel (8-bit values and a scale, say), and its
`fsdp_post_all_gather` makes the whole parameter of what has arrived. A tensor subclass has these methods, or
users set them on the local tensor of a sharded parameter.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from weft import comm
from weft.comm import Handle
from weft.errors import RefusedError, UnsupportedError
from weft.fsdp.flat import FEATURE
from weft.fsdp.mesh import DataMesh
from weft.fsdp.param import ShardedParam
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.fsdp.storage import allocate_storage, free_storage
from weft.tensors import contiguous_strides


class ExtendedParam:
    """One such parameter, gathered by itself."""

    def __init__(self, param: ShardedParam, data: DataMesh, policy: MixedPrecisionPolicy) -> None:
        self.params = [param]
        self._param = param
        self._data = data
        self._policy = policy
        self._outs: list[torch.Tensor] = []  # what has arrived, 1D
        self._sizes: list[torch.Size] = []
        self._inner: Any = ()  # what the whole parameter is made of
        self._metadata: Any = None
        self._pending: Handle[Any] | None = None
        check_extension(param)

    @property
    def num_bytes(self) -> int:
        """Of what is gathered."""
        return sum(out.numel() * out.element_size() for out in self._outs)

    is_in_place = False

    def fits(self) -> bool:
        """Whether the tensor still says what is gathered: users may take the methods off again."""
        return self._param.is_extended

    def keep_up(self) -> None:
        """Nothing is kept of the parameter."""

    def launch_gather(self, name: str, *, from_small: bool) -> None:
        """Start to gather what the tensor gives."""
        self._pending = self._launch(name, keeps=True)

    def serve_gather(self, name: str) -> Handle[Any] | None:
        """Help others to gather what this rank has whole already."""
        return self._launch(name, keeps=False)

    @torch.no_grad()
    def _launch(self, name: str, *, keeps: bool) -> Handle[Any] | None:
        param = self._param
        given, metadata = self._ask(param)
        device = self._data.device
        flat = [tensor.to(device, non_blocking=True).contiguous().view(-1) for tensor in given]
        outs = [tensor.new_empty(tensor.numel() * self._data.shard_size) for tensor in flat]
        if keeps:
            self._sizes, self._metadata = [tensor.size() for tensor in given], metadata
            if [(out.numel(), out.dtype) for out in self._outs] == [(out.numel(), out.dtype) for out in outs]:
                outs = self._outs
                for out in outs:
                    allocate_storage(out)
            self._outs = outs
        if self._data.shard_size == 1:
            for out, tensor in zip(outs, flat, strict=True):
                out.copy_(tensor)
            return None
        handle = comm.all_gather_into_tensor_coalesced(
            outs, flat, self._data.shard_group, feature=FEATURE, label=name
        )
        return handle.followed()

    def _ask(self, param: ShardedParam) -> tuple[Any, Any]:
        ask = self._find_method(param)
        num_args = len(inspect.signature(ask).parameters)
        mesh = self._data.mesh
        shard_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]
        if num_args == 1:
            return ask(shard_mesh)
        if num_args != 5:
            raise RefusedError(
                f"Invalid fsdp_pre_all_gather of parameter {param.name}: it takes {num_args} arguments. "
                "Expects fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)."
            )
        shape = torch.Size(param.split.shape)
        given, metadata = ask(
            shard_mesh, shape, contiguous_strides(shape), param.sites[0].module, self._policy
        )
        self._check_padding(param, given)
        return given, metadata

    def _find_method(self, param: ShardedParam) -> Any:
        """The tensor's own, on the device; one that was set by hand stays with the tensor it was set on."""
        local: Any = param.local.to(self._data.device, non_blocking=True)
        return getattr(local, "fsdp_pre_all_gather", None) or param.local.fsdp_pre_all_gather  # type: ignore[attr-defined]

    def _check_padding(self, param: ShardedParam, given: Any) -> None:
        """All ranks give as much, also those with a short piece or none."""
        padded = torch.Size((param.split.length, *param.split.shape[1:]))
        is_short = param.local_shape != tuple(padded)
        if is_short and any(tensor.size() != padded for tensor in given):
            raise RefusedError(
                f"parameter {param.name}: When a parameter is unevenly sharded by FSDP (orig "
                f"size={tuple(param.split.shape)}, FSDP world size={self._data.shard_size}), "
                "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
                f"{tuple(padded)} but got {[tuple(tensor.size()) for tensor in given]}."
            )

    def finish_gather(self) -> None:
        """Wait, and let the tensor class make the whole parameter."""
        self.drop_gather()
        param = self._param
        tensor: Any = param.local
        dtype = param.compute_dtype(self._policy)
        with torch.inference_mode(False), torch.no_grad():
            outs = tuple(out.view(-1, *size[1:]) for out, size in zip(self._outs, self._sizes, strict=True))
            if param.whole is None:
                whole, self._inner = tensor.fsdp_post_all_gather(outs, self._metadata, dtype)
                shape = param.split.shape
                if tuple(whole.shape) != shape:  # padding
                    whole = torch.as_strided(whole, shape, contiguous_strides(shape), 0)
                param.set_whole(whole)
            else:
                for inner in self._inner:
                    allocate_storage(inner)
                tensor.fsdp_post_all_gather(outs, self._metadata, dtype, out=param.whole)
        self._metadata = None

    def drop_gather(self) -> None:
        """Wait for a gathering, needed or not."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()

    def drop_whole(self) -> None:
        """Give the memory back, needed or not."""
        self.drop_gather()
        self.free()

    def free(self) -> None:
        """Give the memory back."""
        for tensor in (*self._outs, *self._inner):
            free_storage(tensor)

    def whole_addresses(self) -> list[int]:
        """Where the memory is that `free` gives back."""
        return [tensor.untyped_storage().data_ptr() for tensor in (*self._outs, *self._inner)]

    def shrink(self, small: DataMesh) -> None:
        """A smaller mesh would have to cut what only the tensor class understands."""
        raise RefusedError(
            f"fully_shard: parameter {self._param.name} has fsdp_pre_all_gather, and reshard_after_forward="
            f"{small.shard_size} can't cut what it gathered. Use True or False."
        )


def check_extension(param: ShardedParam) -> None:
    """Raise for a parameter whose tensor can't be gathered."""
    if param.split.dim != 0 and param.split.num_ranks > 1:
        raise UnsupportedError(
            f"fully_shard: parameter {param.name} has fsdp_pre_all_gather and is cut along dim "
            f"{param.split.dim}; what it gathers is joined along dim 0 only. Return Shard(0) from "
            "shard_placement_fn."
        )
    names = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    missing = [name for name in names if not hasattr(param.local, name)]
    if missing:
        raise RefusedError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather "
            f"extensions: {type(param.local).__name__} of parameter {param.name} lacks {missing[0]}."
        )

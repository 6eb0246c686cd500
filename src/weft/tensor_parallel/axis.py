"""The mesh axis that tensor parallel works on, with what is asked of it at every call."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import comm
from weft.errors import ConfigError
from weft.local import LocalGroup

FEATURE = "tp"  # in records


class Axis:
    """A mesh of one axis: its group, how many ranks it has, and which of them this is.

    `label` says which module its collectives are about, for records.
    """

    def __init__(self, mesh: DeviceMesh, label: str = "") -> None:
        if mesh.ndim != 1:
            names = f" It has {', '.join(mesh.mesh_dim_names)}." if mesh.mesh_dim_names else ""
            raise ConfigError(
                f"tensor parallel works on one axis of a mesh, and got a mesh of {mesh.ndim}.{names} Give a "
                'slice of it, such as mesh["tp"].'
            )
        self.mesh = mesh
        self.label = label
        self.group: dist.ProcessGroup = mesh.get_group()
        self.size = self.group.size()
        self.rank = self.group.rank()
        # Whether something else than the ranks' own threads moves data. On a local group of CPUs they do it
        # themselves, and what is launched early only takes turns with the computation.
        self.has_help = not (mesh.device_type == "cpu" and isinstance(self.group, LocalGroup))

    def whole_size(self, size: int, dim: int, where: str) -> int:
        """How large a tensor is along the dim that it is cut along, of which this rank has `size`.

        Nothing in a plain tensor tells, so ranks tell each other. Raises on all of them where sizes aren't
        those of torch.chunk.
        """
        if self.size == 1:
            return size
        rows = comm.exchange_rows([size], self.group, feature=FEATURE, name=where, label=self.label)
        sizes = [row[0] for row in rows]
        whole = sum(sizes)
        if sizes != comm.chunk_sizes(whole, self.size):
            raise ConfigError(
                f"{where}: ranks have {sizes} along dim {dim}, which is not how {whole} are cut into "
                f"{self.size}: {comm.chunk_sizes(whole, self.size)}. Cut with torch.chunk, or give a DTensor."
            )
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # the same ranks, whoever asks

    def __reduce__(self) -> tuple[type, tuple[DeviceMesh, str]]:
        return Axis, (self.mesh, self.label)

"""What weft writes itself it does not take from torch."""

from __future__ import annotations

import ast

import pytest

from tests.repo.source import Source, find_references, read_package

# These, and all that lies below them.
FORBIDDEN = (
    "torch._C._distributed_autograd",
    "torch._C._distributed_c10d.Logger",
    "torch._C._distributed_c10d.Reducer",
    "torch._C._distributed_rpc",
    "torch._inductor.fx_passes.ddp_fusion",
    "torch.distributed.Logger",
    "torch.distributed.Reducer",
    "torch.distributed._composable",
    "torch.distributed._compute_bucket_assignment_by_size",
    "torch.distributed.algorithms",
    "torch.distributed.autograd",
    "torch.distributed.fsdp",
    "torch.distributed.nn",
    "torch.distributed.optim",
    "torch.distributed.rpc",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed",
    "torch.testing._internal",
)

# Wherever in torch they are taken from.
FORBIDDEN_NAMES = ("DistributedDataParallel", "FullyShardedDataParallel", "Reducer")

# Taken for their names alone: what isinstance asks for, and where torch's tools look. One file, these names.
NOMINAL = "modules/nominal.py"
BY_NAME = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.DistributedDataParallel.register",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
    "torch.distributed.fsdp.FSDPModule",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._composable.contract",
)


def find_forbidden(sources: list[Source]) -> list[str]:
    found = [
        f"{source.path}:{reference.line}: {reference.name}"
        for source in sources
        for reference in find_references(source)
        if is_forbidden(reference.name) and not (source.path == NOMINAL and reference.name in BY_NAME)
    ]
    return sorted(set(found))


def is_forbidden(name: str) -> bool:
    if any(f"{name}.".startswith(f"{forbidden}.") for forbidden in FORBIDDEN):
        return True
    parts = name.split(".")
    return parts[0] == "torch" and any(part in FORBIDDEN_NAMES for part in parts)


def test_weft_takes_nothing_that_it_writes_itself() -> None:
    assert find_forbidden(read_package()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed.fsdp",
        "import torch.distributed.fsdp._fully_shard as f",
        "from torch.distributed import fsdp",
        "from torch.distributed.fsdp import fully_shard",
        "from torch.distributed.algorithms.join import Join",
        "from torch.distributed.algorithms import ddp_comm_hooks",
        "from torch.distributed.tensor import parallel",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "from torch.nn.parallel.distributed import _MixedPrecision",
        "def f():\n    import torch.distributed.rpc as rpc",
        "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(model)",
        "import torch.distributed as dist\nr = dist.Reducer()",
        "from torch import distributed\nr = distributed.rpc.RRef",
        "from torch._C._distributed_c10d import Reducer",
        "import importlib\nimportlib.import_module('torch.distributed.optim')",
        "from torch._inductor.fx_passes import ddp_fusion",
        "from torch.testing._internal.common_utils import TestCase",
    ],
)
def test_a_forbidden_reference_is_found(text: str) -> None:
    assert find_forbidden([Source("data_parallel/ddp.py", text)])


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed.fsdp import FSDPModule",
        "from torch.nn.parallel import DistributedDataParallel\nDistributedDataParallel.register(X)",
    ],
)
def test_what_is_taken_by_name_is_taken_in_one_file(text: str) -> None:
    assert find_forbidden([Source(NOMINAL, text)]) == []
    assert find_forbidden([Source("modules/attached.py", text)])
    assert find_forbidden([Source("fsdp/nominal.py", text)])


@pytest.mark.parametrize(
    "text",
    [
        "from torch.nn.parallel import DistributedDataParallel as D\nD.forward(model)",
        "from torch.nn.parallel import DistributedDataParallel as D\nD._sync_buffers",
        "from torch.distributed.fsdp import fully_shard as f\nf.state(model)",
        "from torch.distributed.fsdp import MixedPrecisionPolicy",
    ],
)
def test_that_file_uses_none_of_it(text: str) -> None:
    assert find_forbidden([Source(NOMINAL, text)])


def test_that_file_calls_none_of_it() -> None:
    (source,) = [source for source in read_package() if source.path == NOMINAL]
    names = {name.rsplit(".")[-1] for name in BY_NAME}
    calls = [node.func for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    assert [call.id for call in calls if isinstance(call, ast.Name) and call.id in names] == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(t)",
        "import torch.distributed._functional_collectives as funcol",
        "from torch.distributed.tensor import DTensor, Shard",
        "from torch.distributed.device_mesh import DeviceMesh",
        "from torch.nn.parameter import Parameter",
        "from torch.nn import functional",
        "from weft.data_parallel.reducer import Reducer\nReducer.launch",
        "import torch.testing\ntorch.testing.assert_close(a, b)",
    ],
)
def test_the_engine_is_free_to_use(text: str) -> None:
    assert find_forbidden([Source("data_parallel/ddp.py", text)]) == []

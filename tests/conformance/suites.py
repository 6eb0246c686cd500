"""The suites: which of torch's shipped test classes run here, and what stands in torch's place.

A suite is test classes that come with torch, a table of names, and a list of expectations in a file of its
name (`ddp.toml`). Running one is runner.py's work. A feature adds a suite here and the file beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class ShippedTests:
    """One of torch's test classes."""

    module: str
    name: str
    """Dotted where the class is nested."""
    fixtures: tuple[str, ...]
    """The classes that it is mixed with ("module:class"); they bring unittest's methods."""
    num_ranks: int = 2
    """Unless a test's own decorators ask for more."""


@dataclass(frozen=True, eq=False)
class Suite:
    """Test classes of torch's and how weft gets under them.

    `names` replaces single attributes ("module:attribute" of torch, the same of weft). `modules` replaces
    every public name of a module of torch's by the one that weft's module has; `swapped` puts weft's module
    itself in its place, for tests that patch it. A name that weft lacks becomes a stub that raises.
    `forbidden` raises in every process, so that nothing passes on torch's own engine.
    """

    name: str
    classes: tuple[ShippedTests, ...]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    swapped: Mapping[str, str] = field(default_factory=dict[str, str])
    forbidden: tuple[str, ...] = ()
    backend: str = "gloo"
    has_group: bool = True
    """Whether a test finds the default group made, or makes its own."""
    is_moved: bool = True
    """Whether the CPU stands in the GPU's place. If not, what needs a GPU is skipped without one."""
    takes_all: bool = False
    """Whether every test of its classes concerns it, or only those that reach a replaced name."""

    @property
    def expectations(self) -> Path:
        """The file that says which tests do not pass, and why."""
        return HERE / f"{self.name}.toml"


_TESTS = "torch.testing._internal"
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_AVERAGING = "torch.distributed.algorithms.model_averaging"

DDP = Suite(
    name="ddp",
    classes=(
        ShippedTests(
            f"{_TESTS}.distributed.distributed_test",
            "DistributedTest._DistTestBase",
            fixtures=(f"{_TESTS}.distributed.distributed_test:TestDistBackend",),
        ),
    ),
    names={
        "torch.nn.parallel:DistributedDataParallel": "weft:DistributedDataParallel",
        "torch.nn.parallel.distributed:DistributedDataParallel": "weft:DistributedDataParallel",
        "torch.distributed:GradBucket": "weft:GradBucket",
        "torch.distributed.optim:_apply_optimizer_in_backward": "weft.optimizers:apply_optimizer_in_backward",
    },
    modules={
        _HOOKS: "weft.comm_hooks",
        f"{_HOOKS}.default_hooks": "weft.comm_hooks.default_hooks",
        f"{_HOOKS}.powerSGD_hook": "weft.comm_hooks.powerSGD_hook",
        f"{_HOOKS}.quantization_hooks": "weft.comm_hooks.quantization_hooks",
        f"{_HOOKS}.post_localSGD_hook": "weft.comm_hooks.post_localSGD_hook",
        f"{_HOOKS}.debugging_hooks": "weft.comm_hooks.debugging_hooks",
        "torch.distributed.algorithms.join": "weft.join",
        f"{_AVERAGING}.averagers": "weft.optimizers",
        f"{_AVERAGING}.hierarchical_model_averager": "weft.optimizers",
        f"{_AVERAGING}.utils": "weft.optimizers",
        "torch.distributed.optim.post_localSGD_optimizer": "weft.optimizers",
        "torch.distributed.optim.zero_redundancy_optimizer": "weft.optimizers",
    },
    forbidden=(
        "torch.nn.parallel.distributed:DistributedDataParallel.__init__",
        "torch.distributed:Reducer",
        "torch._C._distributed_c10d:Reducer",
        "torch.distributed.algorithms.join:Join.__init__",
        f"{_HOOKS}.powerSGD_hook:PowerSGDState.__init__",
        f"{_HOOKS}.post_localSGD_hook:PostLocalSGDState.__init__",
        f"{_AVERAGING}.averagers:ModelAverager.__init__",
        "torch.distributed.optim.post_localSGD_optimizer:PostLocalSGDOptimizer.__init__",
        "torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer.__init__",
    ),
)

_RPC_TESTS = f"{_TESTS}.distributed.rpc"
_REMOTE_MODULE_TESTS = f"{_TESTS}.distributed.nn.api.remote_module_test"
_REMOTE_MODULE = "torch.distributed.nn.api.remote_module"
_WORKER = (
    f"{_RPC_TESTS}.tensorpipe_rpc_agent_test_fixture:TensorPipeRpcAgentTestFixture",
    f"{_TESTS}.common_distributed:MultiProcessTestCase",
)
_FAULTY_WORKER = (
    f"{_RPC_TESTS}.faulty_rpc_agent_test_fixture:FaultyRpcAgentTestFixture",
    f"{_TESTS}.common_distributed:MultiProcessTestCase",
)

RPC = Suite(
    name="rpc",
    classes=(
        ShippedTests(f"{_RPC_TESTS}.rpc_test", "RpcTest", _WORKER, 4),
        ShippedTests(f"{_RPC_TESTS}.rpc_test", "TensorPipeAgentRpcTest", _WORKER, 4),
        ShippedTests(f"{_RPC_TESTS}.rpc_test", "CudaRpcTest", _WORKER, 4),
        ShippedTests(f"{_RPC_TESTS}.rpc_test", "TensorPipeAgentCudaRpcTest", _WORKER, 4),
        ShippedTests(f"{_RPC_TESTS}.faulty_agent_rpc_test", "FaultyAgentRpcTest", _FAULTY_WORKER, 4),
        ShippedTests(f"{_RPC_TESTS}.examples.parameter_server_test", "ParameterServerTest", _WORKER, 4),
        ShippedTests(
            f"{_RPC_TESTS}.examples.reinforcement_learning_rpc_test",
            "ReinforcementLearningRpcTest",
            _WORKER,
            4,
        ),
        ShippedTests(_REMOTE_MODULE_TESTS, "RemoteModuleTest", _WORKER, 2),
        ShippedTests(_REMOTE_MODULE_TESTS, "ThreeWorkersRemoteModuleTest", _WORKER, 3),
        ShippedTests(_REMOTE_MODULE_TESTS, "CudaRemoteModuleTest", _WORKER, 2),
    ),
    names={
        "torch.nn.parallel:DistributedDataParallel": "weft:DistributedDataParallel",
        "torch.distributed.nn:RemoteModule": "weft:RemoteModule",
        f"{_REMOTE_MODULE}:RemoteModule": "weft:RemoteModule",
        "torch.distributed.optim:DistributedOptimizer": "weft:DistributedOptimizer",
    },
    swapped={
        "torch.distributed.autograd": "weft.dist_autograd",
        "torch.distributed.rpc": "weft.rpc",
        "torch.distributed.rpc.api": "weft.rpc.api",
        "torch.distributed.rpc.backend_registry": "weft.rpc.backend_registry",
        "torch.distributed.rpc.constants": "weft.rpc.constants",
        "torch.distributed.rpc.functions": "weft.rpc.functions",
        "torch.distributed.rpc._testing": "tests.conformance.faulty",
    },
    forbidden=(
        "torch.distributed.rpc:TensorPipeAgent",
        "torch._C._distributed_rpc:TensorPipeAgent",
        "torch.distributed.rpc.api:_invoke_rpc_builtin",
        "torch.distributed.rpc.api:_invoke_rpc_python_udf",
        "torch.distributed.rpc.api:_invoke_remote_builtin",
        "torch.distributed.rpc.api:_invoke_remote_python_udf",
        "torch.distributed.rpc.internal:_build_rpc_profiling_key",
        f"{_REMOTE_MODULE}:_RemoteModule.__init__",
        "torch._C._distributed_autograd:_init",
        "torch._C._distributed_autograd:_new_context",
        "torch._C._distributed_autograd:backward",
        "torch.distributed.autograd:_init",
        "torch.distributed.autograd:_new_context",
        "torch.distributed.autograd:backward",
        "torch.distributed.optim.optimizer:DistributedOptimizer.__init__",
    ),
    has_group=False,
    is_moved=False,
    takes_all=True,
)

_AUTOGRAD_TESTS = f"{_RPC_TESTS}.dist_autograd_test"
_DDP_RPC_TESTS = f"{_TESTS}.distributed.ddp_under_dist_autograd_test"

DIST_AUTOGRAD = replace(
    RPC,
    name="dist_autograd",
    classes=(
        ShippedTests(_AUTOGRAD_TESTS, "DistAutogradTest", _WORKER, 4),
        ShippedTests(_AUTOGRAD_TESTS, "TensorPipeAgentDistAutogradTest", _WORKER, 4),
        ShippedTests(_AUTOGRAD_TESTS, "FaultyAgentDistAutogradTest", _FAULTY_WORKER, 4),
        ShippedTests(_AUTOGRAD_TESTS, "CudaDistAutogradTest", _WORKER, 4),
        ShippedTests(_AUTOGRAD_TESTS, "TensorPipeCudaDistAutogradTest", _WORKER, 4),
        ShippedTests(f"{_RPC_TESTS}.dist_optimizer_test", "DistOptimizerTest", _WORKER, 4),
        ShippedTests(_DDP_RPC_TESTS, "DdpUnderDistAutogradTest", _WORKER, 6),
        ShippedTests(_DDP_RPC_TESTS, "DdpComparisonTest", _WORKER, 4),
        ShippedTests(_DDP_RPC_TESTS, "CudaDdpComparisonTest", _WORKER, 4),
    ),
)

SUITES = {suite.name: suite for suite in (DDP, RPC, DIST_AUTOGRAD)}

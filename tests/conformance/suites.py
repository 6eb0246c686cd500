"""The suites: which of torch's shipped test classes run here, and what stands in torch's place.

A suite is a test class that comes with torch, a table of names, and a list of expectations in a file of
its name (`ddp.toml`). Running one is runner.py's work. A feature adds a suite here and the file beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, eq=False)
class Suite:
    """One of torch's test classes and how weft gets under it.

    `names` replaces single attributes ("module:attribute" of torch, the same of weft). `modules` replaces
    every public name of a module of torch's by the one that weft's module has; one that weft lacks becomes
    a stub that raises. `forbidden` raises in every process, so that nothing passes on torch's own engine.
    """

    name: str
    module: str
    tests: str
    """The class that holds the tests, dotted where it is nested."""
    fixture: str
    """The class that it is mixed with; it brings unittest's methods."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    forbidden: tuple[str, ...] = ()
    backend: str = "gloo"
    num_ranks: int = 2
    """Unless a test's own decorators ask for more."""

    @property
    def expectations(self) -> Path:
        """The file that says which tests do not pass, and why."""
        return HERE / f"{self.name}.toml"


_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_AVERAGING = "torch.distributed.algorithms.model_averaging"

DDP = Suite(
    name="ddp",
    module="torch.testing._internal.distributed.distributed_test",
    tests="DistributedTest._DistTestBase",
    fixture="TestDistBackend",
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

SUITES = {suite.name: suite for suite in (DDP,)}

"""An optimizer that averages the model after its step, when the averager says so."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer

from weft.optimizers.averagers import ModelAverager


class PostLocalSGDOptimizer(Optimizer):
    """Run a local optimizer, then a model averager; after warm-up, with `post_localSGD_hook` for gradients.

    The averager's `warmup_steps` must be the hook's `start_localSGD_iter`.
    """

    # Optimizer's constructor is not called: groups and state are the local optimizer's own.
    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        self.optim = optim
        self.averager = averager
        self.param_groups = optim.param_groups
        self.defaults = optim.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The local optimizer's state."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step, then average the parameters if it is time."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the local optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state and, as "step", how many steps the averager has counted."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the local optimizer's state and the averager's count; warns where there is no count."""
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups  # loading makes new ones
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter "
                "to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

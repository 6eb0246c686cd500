"""Where weft listens to autograd: gradients that arrive, backwards that begin and end."""

from weft.autograd.backward import (
    accumulation_node,
    current_backward,
    current_node,
    is_reachable,
    on_backward_end,
    set_versions,
    unseen_by_autograd,
    will_run,
)

__all__ = [
    "accumulation_node",
    "current_backward",
    "current_node",
    "is_reachable",
    "on_backward_end",
    "set_versions",
    "unseen_by_autograd",
    "will_run",
]

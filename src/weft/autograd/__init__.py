"""Where weft listens to autograd: gradients that arrive, backwards that begin and end."""

from weft.autograd.backward import (
    accumulation_node,
    current_backward,
    current_node,
    has_hooks,
    has_tensor_hooks,
    is_reachable,
    on_backward_end,
    run_engine,
    run_first,
    run_last,
    run_soon,
    set_versions,
    unseen_by_autograd,
    will_run,
)
from weft.autograd.frames import traced_inside_only
from weft.autograd.homes import Renew, Unsynced, announce_gradients, on_announcement
from weft.autograd.told import told_of_backward

__all__ = [
    "Renew",
    "Unsynced",
    "accumulation_node",
    "announce_gradients",
    "current_backward",
    "current_node",
    "has_hooks",
    "has_tensor_hooks",
    "is_reachable",
    "on_announcement",
    "on_backward_end",
    "run_engine",
    "run_first",
    "run_last",
    "run_soon",
    "set_versions",
    "told_of_backward",
    "traced_inside_only",
    "unseen_by_autograd",
    "will_run",
]

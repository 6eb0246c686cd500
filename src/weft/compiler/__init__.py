"""Compiled graphs: gradients marked while the forward is traced, reduced in the backward by passes over it."""

from weft.compiler.install import install
from weft.compiler.ops import GradientOwner, enlist
from weft.compiler.pipeline import PASSES, Work, run_passes
from weft.compiler.schedule import Bucket, Slot, Wire
from weft.compiler.settings import Settings, settings
from weft.compiler.tracing import (
    allow_in_graph,
    at_trace,
    current_trace,
    is_backward_traced,
    is_tracing,
    made_again_in_backward,
    note_gathers,
    note_owner,
    run_at_trace,
    traced_inside_only,
)

__all__ = [
    "PASSES",
    "Bucket",
    "GradientOwner",
    "Settings",
    "Slot",
    "Wire",
    "Work",
    "allow_in_graph",
    "at_trace",
    "current_trace",
    "enlist",
    "install",
    "is_backward_traced",
    "is_tracing",
    "made_again_in_backward",
    "note_gathers",
    "note_owner",
    "run_at_trace",
    "run_passes",
    "settings",
    "traced_inside_only",
]

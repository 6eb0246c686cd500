"""Compiled graphs: gradients marked while the forward is traced, reduced in the backward by passes over it."""

from weft.compiler.install import install
from weft.compiler.ops import GradientOwner, enlist
from weft.compiler.pipeline import PASSES, Work, run_passes
from weft.compiler.schedule import Bucket, Slot, Wire
from weft.compiler.settings import Settings, settings
from weft.compiler.tracing import at_trace, current_trace, is_backward_traced, is_tracing, note_owner

__all__ = [
    "PASSES",
    "Bucket",
    "GradientOwner",
    "Settings",
    "Slot",
    "Wire",
    "Work",
    "at_trace",
    "current_trace",
    "enlist",
    "install",
    "is_backward_traced",
    "is_tracing",
    "note_owner",
    "run_passes",
    "settings",
]

"""Compiled graphs: gradients are marked before autograd is traced and reduced by passes over the backward."""

from weft.compiler.backend import backend
from weft.compiler.explain import Explanation, Launch, explain
from weft.compiler.install import install
from weft.compiler.opened import opened_piece
from weft.compiler.ops import GradientOwner, enlist
from weft.compiler.pipeline import PASSES, Work, run_passes
from weft.compiler.schedule import LARGE_NUMEL, Bucket, Slot, Wire
from weft.compiler.settings import Settings, form_in_force, settings
from weft.compiler.traced_backward import autograd
from weft.compiler.tracing import (
    allow_in_graph,
    at_trace,
    call_before_traces,
    current_trace,
    is_backward_traced,
    is_tracing,
    made_again_in_backward,
    note_gathers,
    note_owner,
    run_at_trace,
)

__all__ = [
    "LARGE_NUMEL",
    "PASSES",
    "Bucket",
    "Explanation",
    "GradientOwner",
    "Launch",
    "Settings",
    "Slot",
    "Wire",
    "Work",
    "allow_in_graph",
    "at_trace",
    "autograd",
    "backend",
    "call_before_traces",
    "current_trace",
    "enlist",
    "explain",
    "form_in_force",
    "install",
    "is_backward_traced",
    "is_tracing",
    "made_again_in_backward",
    "note_gathers",
    "note_owner",
    "opened_piece",
    "run_at_trace",
    "run_passes",
    "settings",
]

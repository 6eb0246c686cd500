"""The test kit: ranks for tests, faults, parity with torch, recorded events to assert on."""

from weft.testing.events import Expect, Span, assert_calls, bytes_by_op, overlaps, span
from weft.testing.faults import Fault, Injection, inject, open_gate, random_fault
from weft.testing.parity import (
    CLOSE,
    EXACT,
    Tolerance,
    assert_ranks_agree,
    assert_same,
    bare,
    compare,
)
from weft.testing.pool import close_shared_pools, shared_pool
from weft.testing.ranks import on_ranks
from weft.testing.trace import StepTrace, Trace, Tracer, train

__all__ = [
    "CLOSE",
    "EXACT",
    "Expect",
    "Fault",
    "Injection",
    "Span",
    "StepTrace",
    "Tolerance",
    "Trace",
    "Tracer",
    "assert_calls",
    "assert_ranks_agree",
    "assert_same",
    "bare",
    "bytes_by_op",
    "close_shared_pools",
    "compare",
    "inject",
    "on_ranks",
    "open_gate",
    "overlaps",
    "random_fault",
    "shared_pool",
    "span",
    "train",
]

"""Products of parameters, of which the everyday tier runs a part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

FULL = pytest.mark.full


def cases(*axes: Sequence[Any], everyday: Callable[..., bool]) -> list[Any]:
    """Every combination of the axes' values, as parameters. Those that aren't everyday are marked `full`."""
    return [
        pytest.param(*values, id="-".join(map(_id_of, values)), marks=() if everyday(*values) else FULL)
        for values in itertools.product(*axes)
    ]


def _id_of(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)

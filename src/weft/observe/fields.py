"""Validation of a recorded run's values: each of the type and range that a run writes, else ValueError.

Files may come from anywhere; values that pass need no further check to be added up, drawn or written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.observe.plain_files import plain_text
from weft.observe.run_files import MOST_RANKS, OWN_KEYS

_MOST_SECS = 1e12
_MOST_BYTES = 2**63
_MOST_STEP = 2**53  # what a page can count
_MOST_SCALARS = 1000
Values = Mapping[str, Any]


def mapping(value: Any, what: str = "it") -> dict[str, Any]:
    """A JSON object."""
    if type(value) is not dict:
        raise ValueError(f"{what} is {_short(value)}, not a JSON object")
    return value  # type: ignore[reportUnknownVariableType]


def text(values: Values, key: str) -> str:
    """A text, without surrogates that can't be encoded."""
    value = values[key]
    if type(value) is not str:
        raise ValueError(f"{key} is {_short(value)}, not a text")
    return plain_text(value)


def optional_text(values: Values, key: str) -> str | None:
    """A text, or None."""
    return None if values[key] is None else text(values, key)


def secs(values: Values, key: str) -> float:
    """A time or a duration."""
    value = values[key]
    if type(value) not in (int, float) or not abs(value) <= _MOST_SECS:
        raise ValueError(f"{key} is {_short(value)}, not a number of seconds")
    return float(value)


def count(values: Values, key: str, most: int = _MOST_BYTES) -> int:
    """A number of things, or of bytes."""
    value = values[key]
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{key} is {_short(value)}, not an integer from 0 to {most}")
    return value


def step_number(values: Values, key: str = "step") -> int:
    """The number of a step."""
    value = values[key]
    if type(value) is not int or abs(value) > _MOST_STEP:
        raise ValueError(f"{key} is {_short(value)}, not the number of a step")
    return value


def optional_step(values: Values, key: str = "step") -> int | None:
    """The number of a step, or None."""
    return None if values[key] is None else step_number(values, key)


def scalars(values: Values) -> dict[str, float]:
    """The scalars that a step noted; they may be infinite or NaN."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if name not in OWN_KEYS and type(value) in (int, float):
            found[plain_text(name)] = _as_float(value)
    if len(found) > _MOST_SCALARS:
        raise ValueError(f"it notes {len(found)} numbers; a step has at most {_MOST_SCALARS}")
    return found


def about_run(value: Any) -> dict[str, Any]:
    """Validate run.json; the result has every field that a report uses.

    Only the format and the number of ranks are required. The rest was passed to an Observer by users: values
    of other types than a report shows are left out.
    """
    about = mapping(value)
    ranks = about.get("ranks")
    if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks is {_short(ranks)}; a run has 1 to {MOST_RANKS}")
    mesh, model = _object(about.get("mesh")), _object(about.get("model"))
    return {
        "ranks": ranks,
        "command": [_word(word) for word in _list(about.get("command"))],
        "mesh": {
            "names": [_word(name) for name in _list(mesh.get("names"))][:32],
            "shape": [size for size in _list(mesh.get("shape")) if _size(size)][:32],
        },
        "model": {
            "name": _word(model.get("name")),
            "num_parameters": _size(model.get("num_parameters")),
        },
        "options": {name: _word(option) for name, option in _object(about.get("options")).items()},
        "buckets": [
            {
                "label": _word(bucket.get("label", at)),
                "num_bytes": _size(bucket.get("num_bytes")) or 0,
                "parameters": [_word(name) for name in _list(bucket.get("parameters"))],
            }
            for at, bucket in enumerate(map(_object, _list(about.get("buckets"))))
        ],
        "resumed": [step for step in _list(about.get("resumed")) if _size(step) is not None],
        **{name: _word(about.get(name)) for name in ("strategy", "weft", "torch", "started")},
    }


def _object(value: Any) -> dict[str, Any]:
    return value if type(value) is dict else {}  # type: ignore[reportUnknownVariableType]


def _list(value: Any) -> list[Any]:
    return value if type(value) is list else []  # type: ignore[reportUnknownVariableType]


def _word(value: Any) -> str:
    """A value as a text of bounded length."""
    if value is None:
        return ""
    # Python refuses to convert an integer of very many digits.
    return str(value)[:100_000] if type(value) is not int or abs(value) < _MOST_BYTES else "a number"


def _size(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST_STEP else None


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _short(value: Any) -> str:
    """A value for a message, in 60 characters."""
    if type(value) in (dict, list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!a}" if len(shown := f"{value!a}") <= 60 else f"{shown[:60]}..."

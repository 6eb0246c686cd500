"""Validation of integers that another process wrote: exact type and bounds."""

from __future__ import annotations

from weft.errors import TamperedError


def check_integer(value: object, what: str, low: int, high: int) -> int:
    """Return a value that is an int from `low` to `high`; raises TamperedError for anything else.

    bool and other subclasses of int are refused: JSON and struct decode an integer as a plain int.
    """
    if type(value) is not int or not low <= value <= high:
        seen = value if type(value) is int else type(value).__name__
        raise TamperedError(
            f"{what} must be an integer from {low} to {high}, got {seen}. The value was not used. "
            "Find out who else can write to the store in which the ranks meet."
        )
    return value

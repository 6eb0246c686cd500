"""Amounts as people write them: 80GB, 400T, 10us. Pure."""

from __future__ import annotations

import argparse
import re

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SECS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def read_bytes(text: str) -> float:
    """Bytes, from 80GB, 1.5TB, 512MB; GiB and the like count in powers of 1024."""
    found = re.fullmatch(_NUMBER + r"([KMGTP]?)(i?)B?(?:/s)?", text, flags=re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of bytes: write 80GB, say")
    letter = found[2].upper()
    if found[3]:
        return float(found[1]) * 1024.0 ** "KMGTP".index(letter) * 1024.0 if letter else float(found[1])
    return float(found[1]) * _SCALES[letter]


def read_count(text: str) -> float:
    """A large number: 400T, 1.5G."""
    found = re.fullmatch(_NUMBER + r"([KMGTP]?)(?:FLOPS?)?(?:/s)?", text, flags=re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: write 400T, say")
    return float(found[1]) * _SCALES[found[2].upper()]


def read_secs(text: str) -> float:
    """Seconds: 10us, 0.5ms."""
    found = re.fullmatch(_NUMBER + r"(s|ms|us|ns)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 10us, say")
    return float(found[1]) * _SECS[found[2]]


def show_bytes(num_bytes: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    digits = 0 if unit == "B" or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:.{digits}f} {unit}"


def show_secs(secs: float) -> str:
    """Three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        amount = secs * scale
        if amount >= 1 or unit == "us":
            break
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def show_count(number: float) -> str:
    """With a letter for thousands, millions and so on."""
    for letter in ("", "k", "M", "G", "T"):
        if number < 999.5 or letter == "T":
            break
        number /= 1000
    return f"{number:.3g}{letter}" if number < 100 or letter else f"{number:.0f}"

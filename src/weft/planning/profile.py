"""A measured machine as a file: JSON, in the user's cache unless told otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe.plain_files import read_json, write_whole
from weft.planning.machine import Curve, Link, Links, Machine

FORMAT = 2
_LEAST, _MOST = 1e-30, 1e30


def default_path() -> Path:
    """Where a profile lies unless another file is named."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "weft" / "machine.json"


def save_profile(machine: Machine, path: Path) -> None:
    """Write the profile, whole or not at all. Raises ConfigError where that can't be."""
    text = json.dumps({"format": FORMAT, **_encode(machine)}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [text.encode()])
    except OSError as error:
        raise ConfigError(f"plan: the profile {path} can't be written: {error.strerror or error}.") from None


def load_profile(path: Path) -> Machine:
    """Read a profile. Raises ConfigError for one that isn't there or isn't a profile."""
    try:
        found: Any = read_json(path)
    except OSError as error:
        raise ConfigError(
            f"plan: the profile {path} can't be read: {error.strerror or error}. `weft plan --calibrate` "
            "writes one."
        ) from None
    except ValueError as error:
        raise ConfigError(f"plan: {path} is no profile: {error}.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:  # type: ignore[reportUnknownMemberType]
        raise ConfigError(
            f"plan: {path} is no profile of format {FORMAT}. `weft plan --calibrate` writes one."
        )
    try:
        return _decode(found)  # type: ignore[reportUnknownArgumentType]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"plan: the profile {path} is damaged: {error!r:.200}. Calibrate again.") from None


def _encode(machine: Machine) -> dict[str, Any]:
    links = machine.links
    return {
        "name": machine.name,
        "device": machine.device,
        "memory_bytes": machine.memory_bytes,
        "flops_per_sec": machine.flops_per_sec,
        "memory_bytes_per_sec": machine.memory_bytes_per_sec,
        "op_secs": machine.op_secs,
        "view_secs": machine.view_secs,
        "work_factor": machine.work_factor,
        "dtensor_secs": machine.dtensor_secs,
        "curves": _encode_curves(machine.curves),
        "links": {
            "local": [links.local.bytes_per_sec, links.local.latency_secs],
            "between": [links.between.bytes_per_sec, links.between.latency_secs],
            "ranks_per_host": links.ranks_per_host,
            "reads_peers": links.reads_peers,
            "overlap_cost": links.overlap_cost,
            "call_secs": links.call_secs,
            "curves": _encode_curves(links.curves),
        },
    }


def _decode(found: dict[str, Any]) -> Machine:
    links = found["links"]
    device = _text(found, "device")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}, not cpu or cuda")
    return Machine(
        name=_text(found, "name"),
        device=device,
        memory_bytes=int(_number(found, "memory_bytes", least=1)),
        flops_per_sec=_number(found, "flops_per_sec", least=1),
        memory_bytes_per_sec=_number(found, "memory_bytes_per_sec", least=1),
        op_secs=_number(found, "op_secs"),
        view_secs=_number(found, "view_secs"),
        work_factor=_number(found, "work_factor"),
        dtensor_secs=_number(found, "dtensor_secs"),
        curves=_decode_curves(found["curves"]),
        links=Links(
            local=_link(links, "local"),
            between=_link(links, "between"),
            ranks_per_host=int(_number(links, "ranks_per_host", least=1)),
            reads_peers=bool(links["reads_peers"]),
            overlap_cost=_number(links, "overlap_cost"),
            call_secs=_number(links, "call_secs"),
            curves=_decode_curves(links["curves"]),
        ),
    )


def _text(found: dict[str, Any], key: str) -> str:
    value = found[key]
    if type(value) is not str or len(value) > 1000 or not value.isprintable():
        raise ValueError(f"{key} is {value!r:.60}, not a printable text")
    return value


def _number(found: dict[str, Any], key: str, least: float = 0.0) -> float:
    return _in_range(found[key], key, least)


def _in_range(value: Any, what: str, least: float) -> float:
    if type(value) not in (int, float) or not least <= value <= _MOST:
        raise ValueError(f"{what} is {value!r:.60}, not a number from {least:g} to {_MOST:g}")
    return float(value)


def _link(found: dict[str, Any], key: str) -> Link:
    rate, latency = found[key]
    return Link(_in_range(rate, key, 1.0), _in_range(latency, key, 0.0))


def _encode_curves(curves: Mapping[str, Curve]) -> dict[str, list[list[float]]]:
    return {name: [list(point) for point in curve.points] for name, curve in sorted(curves.items())}


def _decode_curves(found: Any) -> dict[str, Curve]:
    """Curves by name. Sizes must increase, and all numbers be above 0, for their logarithms are used."""
    curves: dict[str, Curve] = {}
    for name, points in found.items():
        pairs = [(_in_range(size, name, _LEAST), _in_range(secs, name, _LEAST)) for size, secs in points]
        sizes = [size for size, _ in pairs]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"the sizes of {name!r:.60} are not in order")
        if pairs:
            curves[name] = Curve(tuple(pairs))
    return curves

"""A measured machine as a file: JSON, in the user's cache unless told otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe.run_files import write_whole
from weft.planning.machine import Curve, Link, Links, Machine

FORMAT = 2


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
        found: Any = json.loads(path.read_text())
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
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"plan: the profile {path} is damaged: {error!r}. Calibrate again.") from None


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
    return Machine(
        name=found["name"],
        device=found["device"],
        memory_bytes=int(found["memory_bytes"]),
        flops_per_sec=float(found["flops_per_sec"]),
        memory_bytes_per_sec=float(found["memory_bytes_per_sec"]),
        op_secs=float(found["op_secs"]),
        view_secs=float(found["view_secs"]),
        work_factor=float(found["work_factor"]),
        dtensor_secs=float(found["dtensor_secs"]),
        curves=_decode_curves(found["curves"]),
        links=Links(
            local=Link(*links["local"]),
            between=Link(*links["between"]),
            ranks_per_host=int(links["ranks_per_host"]),
            reads_peers=bool(links["reads_peers"]),
            overlap_cost=float(links["overlap_cost"]),
            call_secs=float(links["call_secs"]),
            curves=_decode_curves(links["curves"]),
        ),
    )


def _encode_curves(curves: Mapping[str, Curve]) -> dict[str, list[list[float]]]:
    return {name: [list(point) for point in curve.points] for name, curve in sorted(curves.items())}


def _decode_curves(found: dict[str, list[list[float]]]) -> dict[str, Curve]:
    return {
        name: Curve(tuple((float(size), float(secs)) for size, secs in points))
        for name, points in found.items()
        if points
    }

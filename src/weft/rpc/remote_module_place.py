"""Read where a remote module lives: "worker1", "worker1/cuda:0", "rank:1/cuda:0", or "cpu" on this worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.errors import ConfigError, ConfigTypeError, UnfitError


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a worker. `worker` is its name or its id; None is the worker that reads it."""

    worker: str | int | None
    device: torch.device


def parse_place(text: str | torch.device) -> Place:
    """Read a remote device.

    Raises ConfigError (a ValueError) for a text that has no such form, UnfitError (a RuntimeError) where it
    is the device that torch doesn't know.
    """
    if isinstance(text, torch.device):
        return Place(None, text)
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigTypeError(f"Invalid type for remote_device: {type(text)}. Give a text: 'worker1/cuda:0'.")
    match text.split("/"):
        case [device] if _is_device(device):
            return Place(None, torch.device(device))
        case [worker]:
            return Place(_parse_worker(worker, text), torch.device("cpu"))
        case [worker, device]:
            return Place(_parse_worker(worker, text), _parse_device(device, text))
        case _:
            raise _unreadable(text)


def _parse_worker(worker: str, text: str) -> str | int:
    match worker.split(":"):
        case ["rank", rank] if rank.isdigit():
            return int(rank)
        case [name] if name:
            return name
        case _:
            raise _unreadable(text)


def _parse_device(device: str, text: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UnfitError(f"RemoteModule: remote_device '{text}' names no device: {error}") from error


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"Could not parse remote_device: {text}. The valid format is "
        "'<workername>/<device>' or 'rank:<rank>/<device>' or '<device>'"
    )

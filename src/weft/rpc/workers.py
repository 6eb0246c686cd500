"""Names and ids of workers, and the addresses of each.

A `Card` is what a worker publishes about itself for the others. It is JSON, so that decoding a
card runs no code, and each field is checked.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import cast
from urllib.parse import urlparse

from weft.errors import ConfigError, TamperedError, UnfitError

_NAME = re.compile(r"[A-Za-z0-9_:\-]+")
_MAX_NAME_LENGTH = 128
MAX_ID = (1 << 32) - 1  # as messages have it
_MAX_DEVICES = 4096
_MAX_TEXT_LENGTH = 300
_HOST = re.compile(r"[ -~]+")
_LOCAL_ADDRESS = re.compile(r"ipc://(/proc/[0-9]+/fd/[0-9]+|@weft-rpc-[0-9a-f]{32})")
_REMOTE_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):[0-9]{1,5}")
_DEVICE = re.compile(r"[a-z_]+[0-9]*(:[0-9]+)?")
_PROBE_SECS = 1.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and id (its rank)."""

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@dataclass(frozen=True)
class Card:
    """What a worker publishes about itself; until the handshake it is all that the others know of it."""

    name: str
    id: int
    host: str  # equal for workers that can share memory
    pid: int
    local_address: str  # for workers of the same host
    remote_address: str | None  # for the others; None: it listens to nobody outside its host
    bell: list[int] = field(default_factory=list[int])  # the name of the memory to wake it through
    takes_memory: bool = True  # it opens memory that its peers lend
    num_devices: int = 0
    devices: list[str] = field(default_factory=list[str])
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    @property
    def info(self) -> WorkerInfo:
        """The worker's name and id."""
        return WorkerInfo(self.name, self.id)

    def encode(self) -> bytes:
        """The card as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(text: bytes, worker_id: int, where: str) -> Card:
        """Decode the card of a worker, found `where`. Raises TamperedError for anything else."""
        card: Card | None = None
        try:
            card = Card(**json.loads(text))
            problem = _find_problem(card, worker_id)
        except (ValueError, TypeError, RecursionError) as error:
            problem = f"it can't be read ({str(error)[:200]})"
        if card is None or problem is not None:
            raise TamperedError(
                f"the card of worker {worker_id} in {where} was refused: {problem}. All workers must run the "
                "same version of weft, and no other program may write to the store."
            )
        return card


def _find_problem(card: Card, worker_id: int) -> str | None:
    """Return what is wrong with the fields of a card; None when each is of its type and in range."""
    fields: dict[str, bool] = {
        "name": type(card.name) is str
        and len(card.name) < _MAX_NAME_LENGTH
        and bool(_NAME.fullmatch(card.name)),
        "id": type(card.id) is int and card.id == worker_id and 0 <= card.id <= MAX_ID,
        "host": _is_text(card.host, _HOST),
        "pid": _is_number(card.pid, 1 << 22),
        "local_address": _is_text(card.local_address, _LOCAL_ADDRESS)
        and card.local_address.startswith((f"ipc:///proc/{card.pid}/", "ipc://@")),
        "remote_address": card.remote_address is None or _is_text(card.remote_address, _REMOTE_ADDRESS),
        "bell": _is_list(card.bell, lambda number: _is_number(number, (1 << 64) - 1))
        and len(card.bell) == 5
        and card.bell[0] == card.pid,
        "takes_memory": type(card.takes_memory) is bool,
        "num_devices": _is_number(card.num_devices, _MAX_DEVICES),
        "devices": _is_list(card.devices, lambda device: _is_text(device, _DEVICE)),
        "device_maps": _is_map(card.device_maps, lambda one: _is_map(one, lambda to: _is_text(to, _DEVICE))),
    }
    wrong = [field for field, is_right in fields.items() if not is_right]
    return f"its '{wrong[0]}' is not valid" if wrong else None


def _is_number(value: object, high: int) -> bool:
    return type(value) is int and 0 <= value <= high


def _is_text(value: object, form: re.Pattern[str]) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT_LENGTH and form.fullmatch(value) is not None


def _is_list(value: object, is_right: Callable[[object], bool]) -> bool:
    return (
        isinstance(value, list) and len(cast("list[object]", value)) <= _MAX_DEVICES
        and all(map(is_right, cast("list[object]", value)))
    )  # fmt: skip


def _is_map(value: object, is_right: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_right, cast("dict[str, object]", value).values()))


def check_name(name: object) -> None:
    """Raise for a name that no worker may have."""
    if not isinstance(name, str):
        raise UnfitError(
            f"Argument {name!r} must be of type {str} but got type {type(name)}: a worker's name."
        )
    if not (0 < len(name) < _MAX_NAME_LENGTH and _NAME.fullmatch(name)):
        shown = name if len(name) < _MAX_NAME_LENGTH else f"{name[:20]}... ({len(name)} characters)"
        raise UnfitError(
            f"Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than "
            f"{_MAX_NAME_LENGTH} chars, but got {shown!r}. Use letters, digits, '-', '_' and ':'."
        )


def check_distinct(cards: list[Card]) -> None:
    """Raise when two workers have one name, or one id."""
    seen: dict[str, int] = {}
    for card in cards:
        if card.name in seen:
            raise UnfitError(
                f"init_rpc: RPC worker name {card.name} is not unique. Workers {seen[card.name]} and "
                f"{card.id} share the same name: '{card.name}' is already in use. Give each worker a name of "
                "its own."
            )
        seen[card.name] = card.id


def this_host() -> str:
    """A text that is equal in processes that can open each other's memory and local sockets.

    Processes of different users can't, so they count as different hosts.
    """
    return f"{_own_machine()}-{os.geteuid()}"


@cache
def _own_machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
            boot = boot_id.read().strip()
        # Containers of one machine may have networks and process numbers of their own.
        spaces = [str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("net", "pid")]
    except OSError as error:
        raise ConfigError(f"weft.rpc needs Linux with /proc mounted ({error}).") from error
    return "-".join([boot, *spaces])


def own_address(towards: str | None) -> str:
    """The address of this host on the way to another one, or that its own name stands for."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A datagram socket sends nothing when it connects; it only picks its own address.
            probe.connect((towards or socket.gethostname(), 9))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(
                f"init_rpc: this host's address can't be found ({error}). Give the one that other hosts "
                "reach it by: listen='10.0.0.5', or WEFT_RPC_LISTEN."
            ) from error


def is_listening(card: Card) -> bool:
    """Whether a process listens at a worker's address; True where that can't be found out from here."""
    if card.host == this_host():
        path = card.local_address.removeprefix("ipc://")
        family, address = socket.AF_UNIX, path.replace("@", "\0", 1) if path.startswith("@") else path
    elif card.remote_address is not None:
        parsed = urlparse(card.remote_address)
        family, address = socket.AF_INET, (parsed.hostname, parsed.port)
    else:
        return True
    with socket.socket(family) as probe:
        probe.settimeout(_PROBE_SECS)
        try:
            probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError, PermissionError):
            return False  # no process listens, or by now one of another user
        except OSError:
            return True
    return True

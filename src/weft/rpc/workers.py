"""Who takes part: names and ids of workers, and where each can be reached.

A `Card` is what a worker publishes about itself for the others. It is JSON, so that reading a
stranger's card runs none of its code.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass, field
from functools import cache
from urllib.parse import urlparse

from weft.errors import ConfigError, StateError, UnfitError

_NAME = re.compile(r"[A-Za-z0-9_:\-]+")
_MAX_NAME_LENGTH = 128
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
    """What a worker tells the others, and all that they know of it before it proves the secret."""

    name: str
    id: int
    host: str  # equal for workers that can share memory
    pid: int
    local_address: str  # for workers of the same host
    remote_address: str | None  # for the others; None: it listens to nobody outside its host
    bell: list[int] = field(default_factory=list[int])  # the name of the memory to wake it through
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
    def decode(text: bytes) -> Card:
        """Read a card. Raises StateError for anything else."""
        try:
            card = Card(**json.loads(text))
        except (ValueError, TypeError, UnicodeDecodeError) as error:
            raise StateError(
                f"init_rpc: what a worker published about itself can't be read ({error}). All workers must "
                "run the same version of weft, and nobody else may write to the store."
            ) from error
        check_name(card.name)
        return card


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


@cache
def this_host() -> str:
    """A text that is equal in processes that can open each other's memory and local sockets."""
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
    """Whether somebody listens where a worker did. Where nobody can tell from here it is taken to be so."""
    if card.host == this_host():
        family, address = socket.AF_UNIX, "\0" + card.local_address.removeprefix("ipc://@")
    elif card.remote_address is not None:
        parsed = urlparse(card.remote_address)
        family, address = socket.AF_INET, (parsed.hostname, parsed.port)
    else:
        return True
    with socket.socket(family) as probe:
        probe.settimeout(_PROBE_SECS)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True

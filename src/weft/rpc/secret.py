"""The secret of a group of workers, and the keys derived from it.

Every worker derives the same CURVE key pair from the secret. A peer needs the public key to begin the
handshake and the secret key to complete it, so no message of a client without the secret is delivered.
Workers' entries in the store in which they meet are sealed with it too.

Sources, in this order: the option secret=; WEFT_RPC_SECRET, which is removed from the environment, so that no
program started by a worker inherits it; the job's secret; else, among workers of one host, the first worker
makes one and exposes it to processes of its own user. The store then holds only its location.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import zmq
import zmq.utils.z85

from weft.errors import ConfigError, ConfigTypeError, TamperedError
from weft.rpc.workers import this_host
from weft.trust import JobSecret, expose_secret, job_secret, make_secret, read_exposed_secret

_VARIABLE = "WEFT_RPC_SECRET"
_MIN_BYTES = 16
_MIN_DISTINCT_BYTES = 8
_RANDOM_HEX = re.compile(rb"[0-9a-f]{64}")
_PURPOSE = b"weft.rpc secret"
# Of scrypt: each guess takes some 50 ms and 16 MiB.
_COST, _BLOCK_SIZE = 1 << 14, 8
_ADVICE = "Give every worker the same secret: WEFT_RPC_SECRET, or the option secret=."


@dataclass(frozen=True)
class Keys:
    """A CURVE key pair, as zmq takes it. Neither half is printed: the public one opens the handshake."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


def derive_keys(secret: JobSecret) -> Keys:
    """Derive the key pair of a secret."""
    key = zmq.utils.z85.encode(secret.derive("rpc connections"))
    return Keys(zmq.curve_public(key), key)


# Secrets that users give


def check_secret(secret: object, name: str = "secret") -> bytes:
    """Return a secret as bytes; raises ConfigError, without showing it, if it is easy to guess."""
    if not isinstance(secret, str | bytes):
        raise ConfigTypeError(f"RPC options: {name} must be a str or bytes, not a {type(secret).__name__}.")
    text = secret.encode() if isinstance(secret, str) else secret
    if len(text) < _MIN_BYTES or len(set(text)) < _MIN_DISTINCT_BYTES:
        raise ConfigError(
            f"RPC options: {name} is too easy to guess: at least {_MIN_BYTES} bytes are needed, "
            f"{_MIN_DISTINCT_BYTES} of them different. Use a random one, the same for all workers: "
            'python -c "import secrets; print(secrets.token_hex())".'
        )
    return text


@lru_cache(maxsize=8)
def strengthen_secret(text: bytes) -> JobSecret:
    """Derive 32 bytes from a secret's text: with scrypt, since it may be a phrase, unless it is random."""
    if _RANDOM_HEX.fullmatch(text):  # as secrets.token_hex() makes it: no search can find it
        return JobSecret(hmac.digest(_PURPOSE, text, "sha256"))
    return JobSecret(
        hashlib.scrypt(text, salt=_PURPOSE, n=_COST, r=_BLOCK_SIZE, p=1, maxmem=1 << 26, dklen=32)
    )


# Process-wide: the variable's value, which each init_rpc needs, and the first removes from the environment.
_taken: bytes | None = None
_own: tuple[int, JobSecret] | None = None
_lock = threading.Lock()


def resolve_secret(given: str | bytes | None) -> JobSecret | None:
    """Return the secret of this worker's group; None where the workers must share one when they meet."""
    if given:
        return strengthen_secret(check_secret(given))
    from_environment = _take_variable()
    if from_environment is not None:
        return strengthen_secret(check_secret(from_environment, _VARIABLE))
    job = job_secret()
    return None if job is None else job.derive_secret("rpc")


def _take_variable() -> bytes | None:
    """Remove WEFT_RPC_SECRET from the environment; returns its last value."""
    global _taken
    with _lock:
        text = os.environ.pop(_VARIABLE, None)
        if text:
            _taken = text.encode()
        return _taken


# A secret that workers of one host share


def share_own_secret() -> tuple[JobSecret, str]:
    """Expose a secret of this process's own; returns it with its location, as text for a store."""
    global _own
    with _lock:
        if _own is None or _own[0] != os.getpid():
            _own = os.getpid(), make_secret()
        secret = _own[1]
    return secret, share_secret(secret)


def share_secret(secret: JobSecret) -> str:
    """Expose a secret to processes of this host and user; returns its location, as text for a store."""
    return json.dumps({"host": this_host(), "place": expose_secret(secret)})


def read_shared_secret(text: bytes | str) -> JobSecret | None:
    """Read a secret that another process shares; None when that process is gone.

    Raises ConfigError when it is another host's or another user's, TamperedError for a false location.
    """
    host, place = _parse_place(text)
    if host != this_host():
        raise ConfigError(
            f"init_rpc: the first worker's secret can't be read here: it runs on another host, or as another "
            f"user. {_ADVICE}"
        )
    own = _own
    if own is not None and place[0] == os.getpid() == own[0] and expose_secret(own[1]) == tuple(place):
        return own[1]  # of another thread of this process
    try:
        return read_exposed_secret(place)
    except PermissionError as error:
        raise ConfigError(
            f"init_rpc: the first worker's secret can't be read here ({error}): it runs as another user, or "
            f"is undumpable. {_ADVICE}"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH, errno.ESTALE):
            return None
        raise ConfigError(
            f"init_rpc: the first worker's secret can't be read ({error}). {_ADVICE}"
        ) from error


def _parse_place(text: bytes | str) -> tuple[object, Sequence[Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, dict)
        or found.keys() != {"host", "place"}
        or not isinstance(found["place"], list)
        or len(found["place"]) != 3  # pyright: ignore[reportUnknownArgumentType]
    ):
        raise TamperedError(
            "init_rpc: the store's entry on the workers' secret is not one that a worker writes. It was not "
            f"used: find out who else can write to the store. {_ADVICE}"
        )
    return found["host"], found["place"]  # pyright: ignore[reportUnknownVariableType]

"""Distribution of the job's secret among ranks that meet in a store.

Most ranks have it before: from the launcher, or by WEFT_SECRET_FILE. Ranks of one host without either get one
from the first rank, which exposes it to processes of its own user and publishes its location in the store: a
process id, a descriptor and an inode.

What a client of the store that is not a rank can do here:
- Publish another location. It leads to nothing (an error), or to a secret that another process of this same
  user exposes: owner, name and seals of any other memory don't pass. The client doesn't know that secret
  either. The rank that read it seals its values with it, so its peers refuse them, and it refuses theirs.
  Ranks of two jobs of one user can't be led to each other: each binds its secret to the store that it is
  connected to (`bound_to`), and two jobs have two.
- Publish that there is no secret. Only the rank that reads this goes without: the first rank has one and
  refuses values that are not sealed.
- Publish nothing, or delete the entry: a timeout.
So ranks agree on a secret that only their user has, or the job ends with an error.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from typing import Any

from weft.errors import ConfigError, PeerError, StateError, TamperedError
from weft.trust.sealed_store import MAX_VALUE_BYTES, KeyValueStore
from weft.trust.secret import JobSecret, expose_secret, job_secret, make_secret, read_exposed_secret

SECRET_KEY = "secret"
_ADVICE = (
    "Give all ranks the same WEFT_SECRET_FILE, start them with one launcher, or find out who else reaches "
    "the port of their store."
)

# Process-wide: one secret, and so one descriptor, for all stores in which this process is the first rank.
_own: JobSecret | None = None
_making = threading.Lock()


def address_of(store: Any) -> str:
    """The address of a store: the port that this process is connected to, or the path of its file.

    Equal on all ranks of a host that share the store; empty for a store in this process's memory.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port, path = getattr(store, "port", None), getattr(store, "path", None)
    if port is not None:
        return f"port {port}"
    return "" if path is None else f"file {os.path.realpath(path)}"


def share_secret(store: KeyValueStore, rank: int, *, bound_to: str = "") -> JobSecret | None:
    """Return the secret of the ranks of one host; None where the first rank can't expose one.

    Every rank calls it; `rank` 0 never waits. `bound_to` distinguishes this store from others of this user;
    it must not come from the store, and be the same on all ranks. Raises TamperedError for a false entry,
    PeerError where the first rank is gone, and ConfigError where only the first rank was given a secret.
    """
    secret = job_secret()
    if rank == 0:
        secret, entry = _make_entry(secret)
        store.set(SECRET_KEY, json.dumps(entry))
        if "place" not in entry:
            return secret
    elif secret is not None:
        return secret
    else:
        secret = _read_secret(_decode_entry(store.get(SECRET_KEY)))
    return None if secret is None else secret.derive_secret(bound_to)


def _make_entry(secret: JobSecret | None) -> tuple[JobSecret | None, dict[str, object]]:
    """The first rank's secret, and the entry for the store: where it is, or why it is not there."""
    global _own
    if secret is not None:
        return secret, {"given": True}
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None, {"none": "it needs Linux and /proc"}
    with _making:  # thread-ranks may be the first of several groups
        own = _own = _own or make_secret()
    try:
        return own, {"place": expose_secret(own)}
    except OSError as error:
        return None, {"none": f"it can't make or seal shared memory: {error.strerror}"}


def _decode_entry(value: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(value) if len(value) <= MAX_VALUE_BYTES else None
    except (ValueError, RecursionError):
        entry = None
    if type(entry) is not dict or len(entry) != 1:
        raise TamperedError(f"the store's entry on the job's secret is not one that rank 0 writes. {_ADVICE}")
    return entry


def _read_secret(entry: dict[str, Any]) -> JobSecret | None:
    if "given" in entry:
        raise ConfigError(
            f"the first rank has been given a secret for this job, and this rank has not. {_ADVICE}"
        )
    if "none" in entry:
        return None
    try:
        return read_exposed_secret(entry.get("place", ()))
    except PermissionError as error:
        raise StateError(
            f"the secret of the first rank can't be read: its process is another user's, or undumpable "
            f"({error}). {_ADVICE}"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.ESTALE):
            raise
        raise PeerError(
            f"the first rank, which has the secret of this job, can't be found here ({error}): it has ended, "
            "it runs in another container or on another host, or the store's entry on it is false. "
            f"{_ADVICE}",
            [0],
        ) from error

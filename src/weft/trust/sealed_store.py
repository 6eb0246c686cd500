"""Values in a store that others may write to, sealed with the job's secret.

A store serves any client that reaches its port. A sealed value carries an HMAC-SHA256 over its key, its
group, the rank that wrote it and the value: it can't be forged without the secret, nor moved to another key,
group or writer. A client without the secret can still delete a value or replay an older one of the same key.
Both must end in a timeout or an error, so a key is written only once wherever a replay would matter.

Without a secret (ranks on several hosts without WEFT_SECRET_FILE) values are not authenticated: the reader's
checks of types and bounds are the only ones.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from weft.errors import TamperedError
from weft.trust.numbers import check_integer
from weft.trust.secret import JobSecret

_TAG_BYTES = 32
_MAX_TURN = 1 << 62
_MAX_TURN_CHARS = 20
MAX_VALUE_BYTES = 4 << 20  # far more than ranks write


class KeyValueStore(Protocol):
    """The methods of torch's stores that are used here; they accept bytes where they declare str."""

    def set(self, arg0: str, arg1: Any, /) -> None: ...
    def get(self, arg0: str, /) -> bytes: ...
    def check(self, arg0: list[str], /) -> bool: ...
    def wait(self, arg0: list[str], arg1: timedelta, /) -> None: ...
    def delete_key(self, arg0: str, /) -> bool: ...


class SealedStore:
    """One rank's view of the keys of a group, with every value authenticated."""

    def __init__(
        self, store: KeyValueStore, secret: JobSecret | None, *, group: str, rank: int | str
    ) -> None:
        """`group` names the group, and its generation where names are reused; `rank` is this writer."""
        self.store = store
        self._group = group
        self._rank = rank
        self._key = None if secret is None else secret.derive("values in a store")

    @property
    def is_sealed(self) -> bool:
        """Whether values are authenticated."""
        return self._key is not None

    def set(self, key: str, value: str | bytes) -> None:
        """Seal a value as this rank's and write it."""
        self.store.set(key, self.seal(key, value))

    def get(self, key: str, writer: int | str) -> bytes:
        """Wait for a value and return it if `writer` wrote it; raises TamperedError if not."""
        return self.unseal(key, writer, self.store.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist. Their writers are not checked."""
        self.store.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist. Their writers are not checked."""
        return self.store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        """Delete a value; returns whether it existed."""
        return self.store.delete_key(key)

    def seal(self, key: str, value: str | bytes) -> bytes:
        """Return the tag of a value that this rank writes under a key, followed by the value."""
        content = value.encode() if isinstance(value, str) else value
        return content if self._key is None else self._tag(self._key, key, self._rank, content) + content

    def unseal(self, key: str, writer: int | str, sealed: bytes) -> bytes:
        """Return the value found under a key if `writer` sealed it; raises TamperedError if not."""
        if len(sealed) > MAX_VALUE_BYTES:
            raise self._refusal(key, writer, f"it has {len(sealed):,} bytes")
        if self._key is None:
            return sealed
        tag, content = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(self._key, key, writer, content)):
            raise self._refusal(
                key, writer, "its tag does not match this job's secret, this group, key and writer"
            )
        return content

    def get_json(self, key: str, writer: int | str) -> Any:
        """Return a value that was written as JSON; raises TamperedError if it is not JSON."""
        value = self.get(key, writer)
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
            raise self._refusal(key, writer, "it is not JSON") from error

    def _tag(self, secret_key: bytes, key: str, writer: int | str, content: bytes) -> bytes:
        # Each part follows its length, so that no two lists of parts give the same message.
        parts = [part.encode() for part in (self._group, key, repr(writer))] + [content]
        message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(secret_key, message, "sha256")

    def _refusal(self, key: str, writer: int | str, problem: str) -> TamperedError:
        return TamperedError(
            f"the value '{key[:200]}' of rank {writer} in the store of {self._group} was refused: {problem}. "
            "Either another program writes to this store: find out who reaches its port. Or the ranks have "
            "different secrets: start them with one launcher, or give all of them the same WEFT_SECRET_FILE."
        )


def next_turn(store: KeyValueStore, key: str) -> int:
    """Count a rank's meetings in a store, this one included. Each rank has a key of its own for it.

    With a false count the ranks miss each other. Raises TamperedError for what is no count.
    """
    before = store.get(key) if store.check([key]) else b"0"
    digits = before if len(before) <= _MAX_TURN_CHARS and before.isdigit() else b""
    seen = int(digits) if digits else "something else"
    turn = check_integer(seen, f"the number of meetings, '{key}' in the store,", 0, _MAX_TURN) + 1
    store.set(key, str(turn))
    return turn

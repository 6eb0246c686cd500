"""Decoding of messages on a worker with `allow=`.

No bytes of a peer reach the pickle module: indexes and notices are plain data of fixed forms
(message_forms.py), pickles are interpreted opcode by opcode (fenced_unpickler.py), and the function of a call
is on the user's list, or is one of weft's own that check their arguments (OWN_CALLS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from weft.rpc import message_forms as forms
from weft.rpc.allowed import Allowed
from weft.rpc.data_unpickler import load_data
from weft.rpc.fenced_unpickler import OWN_CALLS, FencedUnpickler, OwnName, check_sealed
from weft.rpc.wire import INLINE_BYTES

Payload = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class Fence:
    """Decodes for one worker. `rebuild_rref(index)` returns an RRef of the current message."""

    def __init__(self, names: Sequence[str], rebuild_rref: Callable[[int], Any]) -> None:
        self.allowed = Allowed(names)
        self._rebuild_rref = rebuild_rref

    def read_direct(self, index: bytes | memoryview, sender_id: int) -> tuple[Any, ...]:
        """Decode a message that is an index alone."""
        *parts, forks, has_forks = forms.check_direct(load_data(index))
        forms.check_forks([fork for _, fork in forks], sender_id)
        return (*parts, forks) if has_forks else tuple(parts)

    def read_index(self, index: bytes | memoryview, sender_id: int) -> tuple[Any, list[Any], Any]:
        """Decode the index of a message with a pickle behind it."""
        descriptors, forks, stub = forms.check_index(load_data(index))
        forms.check_forks(forks, sender_id)
        return descriptors, forks, stub

    def own_buffers(self, descriptors: Any, buffers: Sequence[bytes | memoryview]) -> list[Any]:
        """Copy the buffers to memory that their sender can't write to; small ones are copied later.

        Raises RefusedError where they don't fit the tensors that are described.
        """
        forms.check_buffers(descriptors or (), list(map(len, buffers)))
        return [bytearray(buffer) if len(buffer) > INLINE_BYTES else buffer for buffer in buffers]

    def unpickle(
        self,
        body: bytes | memoryview,
        buffers: Sequence[bytes | memoryview],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Read a pickle. Raises RefusedError for what is not allowed, and whatever users' classes raise."""
        return FencedUnpickler(body, buffers, tensors, self.allowed, self._rebuild_rref).load()

    def find_function(self, module: str, name: str) -> Any:
        """Look up the function that a message without a pickle names."""
        full_name = f"{module}.{name}"
        return OwnName(full_name) if full_name in OWN_CALLS else self.allowed.find(module, name).value

    def check_call(self, function: object) -> None:
        """Raise RefusedError for a function or a class that peers may not have called."""
        self.allowed.check_call(function)
        check_sealed(function)

    def check_payload(self, payload: object) -> Payload:
        """Check the payload of a call. Raises RefusedError for a function that may not be called."""
        forms.need(type(payload) is tuple and len(cast("tuple[Any, ...]", payload)) == 3, "a call")
        function, args, kwargs = cast("tuple[Any, Any, Any]", payload)
        forms.need(type(args) is tuple and forms.is_named(kwargs), "a call")
        if type(function) is not OwnName:
            self.allowed.check_callable(function)
            check_sealed(function)
        else:
            is_own = function.full_name in OWN_CALLS
            function = function.resolve()
            if not is_own:
                self.allowed.check_call(function)
        return function, args, kwargs

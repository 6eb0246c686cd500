"""`save_pretrained` of transformers and peft on a sharded model: of whole tensors, or refused.

It would write what this rank holds. What it makes of shards is an error about shared tensors, for they lie in
one buffer. To gather them all ranks must take part, and programs call it on one.
"""

from __future__ import annotations

import functools
from typing import Any

from weft.errors import StateError

_METHOD = "save_pretrained"
_PLACE = 2  # of `state_dict` among its positional arguments, behind `self`


def with_saving(own: type, methods: type) -> type:
    """The methods of a sharded module, with one that refuses to save shards where its own class can save."""
    return _refusing(methods) if hasattr(own, _METHOD) else methods


@functools.cache
def _refusing(methods: type) -> type:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[_PLACE] if len(args) > _PLACE else kwargs.get("state_dict")
        if given is None:
            raise StateError(
                f"save_pretrained: {type(self).__name__} is sharded, and this rank holds a part of each "
                "parameter. Gather first, on every rank: state = weft.fsdp.full_state_dict(model). Then save "
                "on rank 0: model.save_pretrained(folder, state_dict=state)."
            )
        return getattr(super(cls, self), _METHOD)(*args, **kwargs)

    cls = type(methods.__name__, (methods,), {"__module__": methods.__module__, _METHOD: save_pretrained})
    return cls

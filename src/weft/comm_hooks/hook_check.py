"""What can be told of a gradient hook before it is called."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.futures import Future

from weft.comm_hooks.bucket import GradBucket
from weft.errors import ConfigError, ConfigTypeError

_EMPTY = inspect.Signature.empty


def check_hook(hook: Any) -> None:
    """Raise if this can't be a gradient hook."""
    if not callable(hook):
        raise ConfigTypeError(
            f"Communication hook must be callable. It is {type(hook).__name__}; give a function "
            "(state, bucket) that returns a Future."
        )
    try:
        signature = inspect.signature(hook)
    except ValueError:  # a callable of C, which doesn't tell
        return
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _is_one_of(bucket.annotation, "GradBucket", GradBucket):
        raise ConfigError(
            f"Communication hook: bucket annotation should be dist.GradBucket. or weft.GradBucket; it is "
            f"{bucket.annotation}."
        )
    if not _is_one_of(signature.return_annotation, "Future[torch.Tensor]", Future[torch.Tensor]):
        raise ConfigError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]; it is "
            f"{signature.return_annotation}."
        )


def _is_one_of(annotation: Any, ending: str, wanted: Any) -> bool:
    if annotation in (_EMPTY, Any, "Any", wanted):
        return True
    if isinstance(annotation, str):  # postponed annotations are text
        return annotation.endswith((ending, "Future[Tensor]"))
    return getattr(annotation, "__name__", "") == "GradBucket" and wanted is GradBucket

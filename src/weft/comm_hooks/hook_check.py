"""What can be told of a gradient hook before it does anything."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.futures import Future

from weft.comm_hooks.bucket import GradBucket
from weft.errors import ConfigError, ConfigTypeError, UnsupportedError

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


def check_parameters(bucket: GradBucket, name: str) -> None:
    """Raise if a hook that updates the bucket's parameters has none: a sharded module's are stand-ins."""
    if bucket.sharers() is not None:
        raise UnsupportedError(
            f"{name} updates the parameters of a bucket, and the buckets of fully_shard are made of shards. "
            "Register the hook without it; to optimize in backward, let each parameter's "
            "register_post_accumulate_grad_hook step its optimizer."
        )


def _is_one_of(annotation: Any, ending: str, wanted: Any) -> bool:
    if annotation in (_EMPTY, Any, "Any", wanted):
        return True
    if isinstance(annotation, str):  # postponed annotations are text
        return annotation.endswith((ending, "Future[Tensor]"))
    return getattr(annotation, "__name__", "") == "GradBucket" and wanted is GradBucket

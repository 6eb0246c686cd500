"""What the passes can be told, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ConfigError

FORMS = ("buffers", "concat", "coalesced")


@dataclass(slots=True)
class Settings:
    """How gradients are bucketed in compiled graphs. Set before a module is compiled, alike on all ranks.

    `form` is "buffers" (the reducer's own buckets, its hooks and its collectives, called from the graph),
    "concat" (a bucket is a flat tensor of the graph, reduced by an op that compilers know) or "coalesced" (a
    list of tensors that one such op reduces). None: "buffers", unless torch's own Python reducer is
    asked for (`torch._dynamo.config.optimize_ddp = "python_reducer"`): then what Inductor's list of
    data-parallel passes says. `bucket_cap_mb` overrides the caps of the modules. For collectives of
    fully_shard, each of which is one module's already, it is the size up to which neighbours become one;
    None: one megabyte, where the time of a collective is not that of its bytes.
    """

    form: str | None = None
    bucket_cap_mb: float | None = None

    def check(self) -> None:
        """Raise for what can't be meant."""
        if self.form not in (None, *FORMS):
            raise ConfigError(f"weft.compiler: form is one of {FORMS} or None, got {self.form!r}.")
        cap = self.bucket_cap_mb
        is_number = isinstance(cap, int | float) and not isinstance(cap, bool)  # type: ignore[reportUnnecessaryIsInstance]
        if cap is not None and not (is_number and cap >= 0):
            raise ConfigError(f"weft.compiler: bucket_cap_mb must be a number of megabytes, it is {cap!r}.")


settings = Settings()
_SHARD_CAP_MB = 1.0


def shard_cap_bytes() -> float:
    """Up to which size neighbouring collectives of sharded parameters become one."""
    settings.check()
    cap_mb = _SHARD_CAP_MB if settings.bucket_cap_mb is None else settings.bucket_cap_mb
    return cap_mb * 2**20


def form_in_force() -> str:
    """The form of buckets: the user's wish, or what torch's own switches say."""
    settings.check()
    if settings.form is not None:
        return settings.form
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    if "python_reducer" not in str(dynamo.optimize_ddp):
        return "buffers"
    named = getattr(inductor, "_fuse_ddp_communication_passes", ())
    return "coalesced" if "fuse_ddp_with_coalesced_op" in named else "concat"

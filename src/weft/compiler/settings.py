"""What the passes can be told, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ConfigError

FORMS = ("concat", "coalesced")


@dataclass(slots=True)
class Settings:
    """How gradients are bucketed in compiled graphs. Set before a module is compiled, alike on all ranks.

    `form` is "concat" (a bucket is one flat tensor, as without a compiler) or "coalesced" (a list of tensors
    that one op reduces; nothing is copied together). None: as Inductor's own configuration says, which is
    "concat" unless it was changed. `bucket_cap_mb` overrides the caps of the modules.
    """

    form: str | None = None
    bucket_cap_mb: float | None = None

    def check(self) -> None:
        """Raise for what can't be meant."""
        if self.form not in (None, *FORMS):
            raise ConfigError(f"weft.compiler: form is one of {FORMS} or None, got {self.form!r}.")
        cap = self.bucket_cap_mb
        if cap is not None and (isinstance(cap, bool) or not cap >= 0):
            raise ConfigError(f"weft.compiler: bucket_cap_mb must be a number of megabytes, it is {cap!r}.")


settings = Settings()


def form_in_force() -> str:
    """The form of buckets: the user's wish, or what Inductor's list of data-parallel passes names."""
    settings.check()
    if settings.form is not None:
        return settings.form
    from torch._inductor import config

    named = getattr(config, "_fuse_ddp_communication_passes", ())
    return "coalesced" if "fuse_ddp_with_coalesced_op" in named else "concat"

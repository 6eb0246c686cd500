"""One entry of the list of torch's private names. A release is written as "2.15"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateNames:
    """Names below one owner that serve one purpose.

    `owner`: a dotted path, of a module or a class; below a class the names are its attributes, or those of
    its instances.
    `used_in`: files below src/weft, or folders of it.
    `since`, `until`: the first release that has them, and the first that no longer has them. Without them
    every supported release has them.
    `is_optional`: weft does without them where they are missing, in a release or in a build of torch.
    `on_instances`: only an object has them, so that whether they are there is asked in tests alone.
    `is_convention`: nobody defines them. Programs set them on objects of theirs, as torch's own parts do.
    """

    owner: str
    names: tuple[str, ...]
    purpose: str
    used_in: tuple[str, ...]
    since: str = ""
    until: str = ""
    is_optional: bool = False
    on_instances: bool = False
    is_convention: bool = False

    @property
    def paths(self) -> list[str]:
        """The dotted paths."""
        return [f"{self.owner}.{name}" for name in self.names]

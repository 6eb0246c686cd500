"""Find broken links in the built site: missing files, missing anchors, and what is loaded from elsewhere.

mkdocs checks links between documents. This reads the HTML that came out, the reference and listings included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

# Elements whose address the browser opens by itself, and the attribute that has it. A link's may be anywhere.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
# Made for a server's answer to a missing page: its links begin at the server's root.
NOT_CHECKED = {"404.html"}


@dataclass
class Page(HTMLParser):
    """The anchors of a page, the addresses that it links to and those that it loads."""

    anchors: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin with nothing read."""
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element is called and where it leads."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.add(values[LOADED[tag]])


def read_page(path: Path) -> Page:
    """Read a page of the site."""
    page = Page()
    page.feed(path.read_text())
    return page


def find_faults(site: Path) -> list[str]:
    """What is wrong with the links of a built site: a line for each."""
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    faults: list[str] = []
    for path, page in pages.items():
        name = str(path.relative_to(site))
        if name in NOT_CHECKED:
            continue
        faults += [
            f"{name}: loads {address} from elsewhere"
            for address in sorted(page.loaded)
            if _is_elsewhere(address)
        ]
        for address in sorted(page.links | page.loaded):
            if not _is_elsewhere(address) and (why := _why_broken(path, address, pages)):
                faults.append(f"{name}: {address}: {why}")
    return faults


def _is_elsewhere(address: str) -> bool:
    return "://" in address or address.startswith(("//", "mailto:", "data:"))


def _why_broken(path: Path, address: str, pages: dict[Path, Page]) -> str:
    file, _, anchor = address.partition("#")
    file = unquote(file.partition("?")[0])
    target = (path.parent / file).resolve() if file else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "there is no such file"
    if anchor and target in pages and unquote(anchor) not in pages[target].anchors:
        return "there is no such anchor"
    return ""

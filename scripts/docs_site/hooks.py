"""What mkdocs is told: pages of files outside of docs/, links to them, and the order of the API's pages."""

# mkdocs is in the extra `docs` alone, which checks do without.
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from scripts.docs_site import pages, reference

HERE = Path(__file__).parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the reference's pages in the navigation."""
    names = ["api/weft.md", *(namespace.page for namespace in reference.NAMESPACES)]
    for section in config.nav or ():
        if "API" in section:
            section["API"] = [{Path(name).stem: name} for name in names]
        if "Project" in section and (pages.ROOT / "CHANGELOG.md").exists():
            section["Project"].append({"Changes": "changelog.md"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside of docs/, the reference and listings of sources."""
    readme = files.get_file_from_path("README.md")
    assert readme is not None
    files.remove(readme)  # mkdocs would make it the front page
    documents = [path for path in pages.DOCUMENTS if (pages.ROOT / path).exists()]
    for path in documents:
        files.append(File.generated(config, pages.page_of(path), content=(pages.ROOT / path).read_text()))
    for name, text in reference.make_pages():
        files.append(File.generated(config, name, content=text))
    in_docs = [pages.file_of(file.src_uri) for file in files.documentation_pages() if not file.generated_by]
    for path in pages.find_sources([*documents, *in_docs], reference.find_files()):
        files.append(File.generated(config, pages.page_of(path), content=pages.make_listing(path)))
    files.append(File.generated(config, "style.css", abs_src_path=str(HERE / "style.css")))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository to their pages."""
    name = page.file.src_uri
    if name.startswith((f"{pages.SOURCES}/", "api/")):
        return markdown
    page.meta.setdefault("search", {"boost": 2})  # before the reference, which has the same words
    return pages.rewrite_links(markdown, pages.file_of(name))

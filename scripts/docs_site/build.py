"""Build the docs site into build/site: what `scripts/docs` runs. Any warning and any broken link fails it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.docs_site.check_links import find_faults  # noqa: E402  (behind the path)

SITE = ROOT / "build" / "site"
CONFIG = ROOT / "scripts" / "docs_site" / "mkdocs.yml"


def main() -> None:
    """Build, or serve while documents are edited."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Build the docs site into build/site.")
    parser.add_argument("--serve", action="store_true", help="serve it, and build it again after each change")
    parser.add_argument("--address", default="127.0.0.1:8000", help="where to serve it (%(default)s)")
    options = parser.parse_args()
    if options.serve:
        sys.exit(run_mkdocs("serve", "--dev-addr", options.address, "--livereload"))
    if status := run_mkdocs("build", "--strict", "--quiet"):
        sys.exit(status)
    faults = find_faults(SITE)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(f"scripts/docs: {len(faults)} broken links; they are listed above.")
    num_pages = len(list(SITE.rglob("*.html")))
    print(f"{num_pages} pages in {SITE.relative_to(ROOT)}; scripts/docs --serve shows them.")


def run_mkdocs(command: str, *arguments: str) -> int:
    """Run a command of mkdocs on the site; its exit code."""
    words = [sys.executable, "-m", "mkdocs", command, "--config-file", str(CONFIG), *arguments]
    # Hooks are imported from ROOT. Without the variable the theme prints until when it is supported.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

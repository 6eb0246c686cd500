# Sourced by the other scripts: goes to the root of the repository and defines `use_environment EXTRA...`,
# which makes or updates .venv with these extras and sets $python.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

use_environment() {
    local candidate
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" scripts/environment.py "$@"
            python=.venv/bin/python
            return
        fi
    done
    echo "weft needs Python 3.11 or later: no python3.11, python3 or python on the path is one." >&2
    exit 1
}

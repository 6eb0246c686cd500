# Sourced by the other scripts: goes to the root of the repository and defines
# `find_python`, which sets $python to a Python that weft can use, and
# `use_environment EXTRA...`, which makes or updates .venv with these extras and sets $python to its Python.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    for python in python3.11 python3 python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            return
        fi
    done
    echo "weft needs Python 3.11 or later: no python3.11, python3 or python on the path is one." >&2
    exit 1
}

use_environment() {
    find_python
    "$python" scripts/environment.py "$@"
    python=.venv/bin/python
}

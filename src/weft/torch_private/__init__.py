"""The private names of torch that weft uses, in one list, and the check of the installed torch against it.

A private name has a leading underscore somewhere in its path, and may change with any release of torch. A use
that is not listed, and a listed use that is gone, fail in tests/repo/test_torch_private.py. A listed name
that this torch lacks fails in tests/torch_private/test_names.py, and in `check_torch` before a job starts.
"""

from weft.torch_private.check import NEWEST, OLDEST, PRIVATE_NAMES, check_torch
from weft.torch_private.entry import PrivateNames

__all__ = ["NEWEST", "OLDEST", "PRIVATE_NAMES", "PrivateNames", "check_torch"]

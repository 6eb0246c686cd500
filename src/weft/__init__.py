"""weft: distributed training for PyTorch, in Python that people can read and change."""

from weft.local import register_backend

register_backend()

"""`python -m weft demo`: see weft run on this machine. Start reading at tour.py."""

from weft.demo.command import add_demo_command

__all__ = ["add_demo_command"]

"""weft's version. Only here: the build reads this line, and a tree that was never installed has it, too."""

__version__ = "0.1.0"

"""The passes over compiled graphs, one a file."""

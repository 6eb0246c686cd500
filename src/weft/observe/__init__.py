"""What happened when: a run recorded step by step, and pictures of it. Start reading at observer.py."""

from weft.observe.command import define_report_command, write_page
from weft.observe.figures import StepFigures
from weft.observe.observer import Observer
from weft.observe.terminal import draw_run

__all__ = ["Observer", "StepFigures", "define_report_command", "draw_run", "write_page"]

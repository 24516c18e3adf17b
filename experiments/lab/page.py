"""The page: one HTML file that needs neither a network nor another file.

Figures are inline SVG; a few lines of JavaScript sort a table by the column whose header
is clicked. What is wider than the screen scrolls by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import pathlib

import jinja2

from experiments.lab.answers import NO_FIGURES, answers
from experiments.lab.rows import Row

_FOLDER = pathlib.Path(__file__).parent


def render(rows: Mapping[str, Sequence[Row]]) -> str:
  """Returns the page of all questions that have rows."""
  environment = jinja2.Environment(
      loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True,
      lstrip_blocks=True, undefined=jinja2.StrictUndefined,
  )
  template = environment.get_template("page.html.jinja")
  return template.render(answers=answers(rows), no_figures=NO_FIGURES)

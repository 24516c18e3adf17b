"""Tables and figures, before anybody decides how to show them."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

Cell = str | float | int | None

NO_TIMES = "No times, so no answer: on a CPU the results are only checked"


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of cells under headers.

  Attributes:
    title: what the rows have in common.
    headers: one a column, with units.
    rows: as many cells each.
    forms: how numbers of a column are written, by its header; default ".3g".
  """

  title: str
  headers: tuple[str, ...]
  rows: tuple[tuple[Cell, ...], ...]
  forms: dict[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for row in self.rows:
      if len(row) != len(self.headers):
        raise ValueError(f"{len(row)} cells under {len(self.headers)} headers: {row}")

  def text(self, header: str, cell: Cell) -> str:
    """Returns a cell as it is written."""
    if cell is None:
      return ""
    if isinstance(cell, str):
      return cell
    default = "d" if isinstance(cell, int) else ".3g"
    return format(cell, self.forms.get(header, default))

  def is_numeric(self, index: int) -> bool:
    """Whether no cell of a column is a word."""
    return not any(isinstance(row[index], str) for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Figure:
  """A drawing and what it shows."""

  title: str
  drawing: Drawing

  def svg(self, prefix: str) -> str:
    """Returns the drawing as an SVG element for a page.

    Its ids begin with `prefix`, its width is the page's, its black is the colour of the
    page's text.
    """
    of_axes = (axes.get_legend() for axes in self.drawing.axes)
    for legend in filter(None, (*self.drawing.legends, *of_axes)):
      legend.get_frame().set_facecolor("none")  # Its text has the page's colour.
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
      self.drawing.savefig(
          file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
      )
    text = file.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    for reference in ("url(#", 'href="#'):
      text = text.replace(reference, f"{reference}{prefix}-")
    # What draws no line of its own is black by default.
    text = text.replace("<svg ", '<svg fill="currentColor" role="img" ', 1)
    return text.replace("#000000", "currentColor").replace("stroke: black", "")


def in_powers_of_two(axis: Any) -> None:
  """Makes an axis logarithmic, with plain numbers at powers of two."""
  axis.axes.set(**{f"{axis.axis_name}scale": "log"})
  axis.set_major_locator(LogLocator(2))
  axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
  axis.set_minor_locator(NullLocator())


def paragraphs(sentences: Sequence[str]) -> str:
  """Returns sentences without their full stops as a text of one line each."""
  if not sentences:
    sentences = [NO_TIMES]
  return "\n".join(f"{sentence}." for sentence in sentences)


def make_table(
    title: str, lines: Sequence[dict[str, Any]], forms: dict[str, str] | None = None
) -> Table:
  """Returns the table of lines that are cells by header; all headers of any line."""
  headers = tuple(dict.fromkeys(name for line in lines for name in line))
  rows = tuple(tuple(line.get(name) for name in headers) for line in lines)
  return Table(title, headers, rows, forms or {})

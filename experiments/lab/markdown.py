"""The page as Markdown: texts and tables, without figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tabulate

from experiments.lab.answers import Answer, answers
from experiments.lab.rows import Row
from experiments.lab.tables import Table


def render(rows: Mapping[str, Sequence[Row]]) -> str:
  """Returns the answers to all questions that have rows."""
  parts = ["# The laboratory", "The figures are in lab.html."]
  parts += [_answer(answer) for answer in answers(rows)]
  return "\n\n".join(parts) + "\n"


def _answer(answer: Answer) -> str:
  parts = [
      f"## {answer.title}",
      f"**Question.** {answer.question}",
      f"**Expectation.** {answer.expectation}",
      f"**Finding.** {answer.finding}",
      *(f"**Failed.** {failure}" for failure in answer.failures),
      *(_table(table) for table in answer.tables if table.rows),
      f"Command: `{answer.command}`",
      "\n".join(f"- {run}" for run in answer.runs),
  ]
  return "\n\n".join(parts)


def _table(table: Table) -> str:
  cells = [
      [table.text(header, cell).replace("|", "\\|")
       for header, cell in zip(table.headers, row, strict=True)]
      for row in table.rows
  ]
  text = tabulate.tabulate(
      cells, table.headers, tablefmt="github", disable_numparse=True,
      colalign=[
          "right" if table.is_numeric(i) else "left" for i in range(len(table.headers))
      ],
  )
  return f"### {table.title}\n\n{text}"

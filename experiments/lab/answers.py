"""One question's part of the page: its texts, its finding, its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from experiments.lab.questions import QUESTIONS, texts
from experiments.lab.rows import Row
from experiments.lab.tables import Figure, Table

NO_FIGURES = "Its figures show times, and these rows have none."


@dataclasses.dataclass(frozen=True)
class Answer:
  """What the page shows of a question.

  Attributes:
    name, title: of the question.
    question, expectation, command: of its docstring.
    finding: computed from the rows.
    tables, figures: likewise.
    runs: where and when the rows were measured.
    failures: results that the gate rejected, in words.
  """

  name: str
  title: str
  question: str
  expectation: str
  command: str
  finding: str
  tables: tuple[Table, ...]
  figures: tuple[Figure, ...]
  runs: tuple[str, ...]
  failures: tuple[str, ...]


def answers(rows: Mapping[str, Sequence[Row]]) -> list[Answer]:
  """Returns the answers to the questions that have rows, in the order of the page."""
  everything = [row for of_question in rows.values() for row in of_question]
  found = []
  for name, module in QUESTIONS.items():
    if name not in rows:
      continue
    own, said = rows[name], texts(module)
    figures = module.figures(own)
    if hasattr(module, "figures_of_all"):
      figures += module.figures_of_all(everything)
    found.append(
        Answer(
            name, module.TITLE, said["Question"], said["Expectation"], said["Command"],
            module.finding(own), tuple(module.tables(own)), tuple(figures),
            tuple(dict.fromkeys(map(_run, own))),
            tuple(f"{x.name} as {x.variant}: {x.status}" for x in own if x.failed),
        )
    )
  return found


def _run(row: Row) -> str:
  found = row.provenance
  return (
      f"{found.device}, JAX {found.jax}, commit {found.commit}, {found.date}:"
      f" {found.command}"
  )

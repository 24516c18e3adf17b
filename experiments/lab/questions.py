"""The questions, in the order of the page."""

from __future__ import annotations

from types import ModuleType

from experiments.lab import (
  caching,
  dispatch,
  distribution,
  ladder,
  occupancy,
  sgemm,
  splits,
  stages,
)

QUESTIONS: dict[str, ModuleType] = {
    question.NAME: question for question in (
        ladder, caching, stages, splits, sgemm, occupancy, distribution, dispatch,
    )
}
_LABELS = ("Question", "Expectation", "Command")


def texts(question: ModuleType) -> dict[str, str]:
  """Returns the Question, Expectation and Command of a question's docstring.

  Raises:
    ValueError: one is missing.
  """
  found = {}
  for paragraph in (question.__doc__ or "").split("\n\n"):
    label, colon, text = paragraph.strip().partition(":")
    if colon and label in _LABELS:
      found[label] = " ".join(text.split())
  if missing := set(_LABELS) - set(found):
    raise ValueError(f"{question.__name__} has no {', '.join(sorted(missing))}")
  return found

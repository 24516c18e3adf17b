"""Counts the collectives of a compiled program."""

from __future__ import annotations

from collections import Counter
import re

_COLLECTIVE = re.compile(
    r"= ([^=\n]*?) (all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|collective-permute)(?:-start)?\("
)
_COMMENT = re.compile(r"/\*.*?\*/")  # Numbers of the results of many.
_DIMENSIONS = re.compile(r"\[([\d,]+)\]")

Collectives = Counter[tuple[str, tuple[int, ...]]]


def collectives(hlo_text: str) -> Collectives:
  """Returns how often each kind of collective has a result of which sizes.

  The sizes are sorted: of a transposed array the same bytes travel. Several results of
  one collective count each.

  Args:
    hlo_text: `jax.jit(f).lower(...).compile().as_text()`.
  """
  found: Collectives = Counter()
  for shape, kind in _COLLECTIVE.findall(_COMMENT.sub("", hlo_text)):
    for sizes in _DIMENSIONS.findall(shape):
      found[kind, tuple(sorted(map(int, sizes.split(","))))] += 1
  return found

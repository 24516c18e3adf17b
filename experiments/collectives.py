"""Counts the collectives of a compiled program."""

from __future__ import annotations

from collections import Counter
import re

_COLLECTIVE = re.compile(
    r"= ([^=\n]*?) (all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|collective-permute)(-start)?\("
)
_COMMENT = re.compile(r"/\*.*?\*/")  # Numbers of the results of many.
_ARRAY = re.compile(r"(\w+)\[([\d,]+)\]")

Collectives = Counter[tuple[str, tuple[int, ...]]]


def collectives(hlo_text: str, *, dtypes: bool = False) -> Collectives:
  """Returns how often each kind of collective has a result of which sizes.

  The sizes are sorted: of a transposed array the same bytes travel. Several results of
  one collective count each.

  Args:
    hlo_text: `jax.jit(f).lower(...).compile().as_text()`.
    dtypes: whether a kind is "all-reduce bf16" rather than "all-reduce". A CPU reduces
      no bfloat16: there all are float32.
  """
  found: Collectives = Counter()
  for shape, kind, start in _COLLECTIVE.findall(_COMMENT.sub("", hlo_text)):
    for dtype, sizes in _results(shape, kind, bool(start)):
      name = f"{kind} {dtype}" if dtypes else kind
      found[name, tuple(sorted(map(int, sizes.split(","))))] += 1
  return found


def _results(shape: str, kind: str, starts: bool) -> list[tuple[str, str]]:
  """(dtype, sizes) of the results alone: what starts one has the operands before them."""
  arrays = _ARRAY.findall(shape)
  if starts and kind == "collective-permute":  # Two numbers follow.
    return arrays[1:2]
  if starts and (kind == "all-gather" or shape.startswith("((")):
    return arrays[len(arrays) // 2 :]
  return arrays

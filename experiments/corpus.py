"""Real text at hand on every machine: the source of Python's standard library."""

from __future__ import annotations

from collections.abc import Iterator
import pathlib
import sysconfig

import numpy as np

MAX_BYTES = 8 << 20
# Not part of the library, or left out of some distributions of it.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def load(max_bytes: int = MAX_BYTES) -> np.ndarray:
  """Returns the library's .py files, one after the other, as [length] uint8.

  The files are in the order of their paths, each with a line that names it
  before it; what exceeds `max_bytes` is cut off.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  parts, length = [], 0
  for path in sorted(root.rglob("*.py")):
    relative = path.relative_to(root)
    if _SKIPPED.isdisjoint(relative.parts):
      parts.append(b"# %s\n%s\n" % (relative.as_posix().encode(), path.read_bytes()))
      length += len(parts[-1])
      if length >= max_bytes:
        break
  return np.frombuffer(b"".join(parts), np.uint8)[:max_bytes]


def batches(
    text: np.ndarray, *, steps: int, batch: int, sequence: int, seed: int
) -> Iterator[np.ndarray]:
  """Yields `steps` batches of random windows, the same ones for the same seed.

  Yields: [batch, sequence + 1] int32; the last token of a window is only a label.
  """
  rng = np.random.default_rng(seed)
  window = np.arange(sequence + 1)
  for _ in range(steps):
    starts = rng.integers(len(text) - sequence, size=batch)
    yield text[starts[:, None] + window].astype(np.int32)

"""The flags that every program of this package has."""

from __future__ import annotations

import pathlib

from absl import app, flags

SEED = flags.DEFINE_integer("seed", 0, "Seed of all that is random.", lower_bound=0)
OUTPUT = flags.DEFINE_string(
    "output", "results", "Folder of the files that the program writes."
)


def output_folder() -> pathlib.Path:
  """Returns the folder of --output, made if need be; UsageError if it cannot be."""
  folder = pathlib.Path(OUTPUT.value)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise app.UsageError(f"--output={OUTPUT.value} cannot be made: {error}") from error
  return folder

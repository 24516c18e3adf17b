"""The flags that every program of this package has."""

from __future__ import annotations

from absl import flags

SEED = flags.DEFINE_integer("seed", 0, "Seed of all that is random.")
OUTPUT = flags.DEFINE_string(
    "output", "results", "Folder of the files that the program writes."
)

"""A store from registers straight to memory, as each version of JAX has it."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store(ref: Any, value: Any) -> None:
  """Stores a warpgroup's value in GMEM, each thread what it holds."""
  if hasattr(plgpu, "store"):  # JAX 0.12, where an assignment must be coalesced.
    plgpu.store(ref, value, optimized=False)
  else:
    ref[...] = value

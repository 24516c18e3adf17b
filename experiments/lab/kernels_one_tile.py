"""one_tile: the warp-specialised kernel with as many CTAs as tiles, one tile each.

The library's persistent kernel with its first habit left off: a CTA ends with its tile,
and the next one of its SM sets up barriers and registers anew, fetches the descriptors,
and fills its ring from empty, while no tile is being stored.

Roles and barriers: those of pallas_kernels/persistent.py and pallas_kernels/ring.py.
Source: the non-persistent warp-specialised schedule of CUTLASS 3 (sm90).
"""

from __future__ import annotations

import jax

from pallas_kernels import persistent
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem

NAME = "lab_one_tile"
Config = PersistentConfig
_NO_LIMIT = 1 << 30

supports = persistent.supports
smem_bytes = persistent.smem_bytes


def launch(
    operands, problem: Problem, config: PersistentConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [batch, m, n]; operands as `problem` stores them."""
  del num_sms  # One CTA a tile, however many SMs there are.
  return persistent.launch(
      operands, problem, config, num_sms=_NO_LIMIT, interpret=interpret
  )

"""A layer of experts: jaxgemm.ragged_dot where jax.lax.ragged_dot was.

  python -m experiments.adoption.experts_layer
"""

from __future__ import annotations

from collections import Counter
import functools

import jax
from jax import lax

from experiments import experts
from experiments.adoption.compare import compare
import jaxgemm


def main() -> Counter:
  keys = iter(jax.random.split(jax.random.key(0), 5))
  params = {
      name: jax.random.normal(next(keys), shape) / 6
      for name, shape in experts.shapes(32, 48, 4).items()
  }
  x = jax.random.normal(next(keys), (24, 32))
  theirs, ours = (
      functools.partial(_model, ragged_dot=ragged_dot)
      for ragged_dot in (lax.ragged_dot, jaxgemm.ragged_dot)
  )
  return compare("experts", theirs, ours, params, x)


def _model(params, x, ragged_dot):
  return x + experts.layer(x, params, ragged_dot)


if __name__ == "__main__":
  main()

"""Any library: jaxgemm.accelerate, around a model, a loss or a whole step of training.

Nothing in the model says whose products it wants: what jit traces of it is rewritten,
with biases, activations and residuals in the products' kernels.

  python -m experiments.adoption.any_library
"""

from __future__ import annotations

from collections import Counter

from experiments.adoption import plain_jax
from experiments.adoption.compare import compare
import jaxgemm


def main() -> Counter:
  model = plain_jax.theirs
  accelerated = jaxgemm.accelerate(model)
  return compare("any library", model, accelerated, *plain_jax.draw())


if __name__ == "__main__":
  main()

"""Equinox: every eqx.nn.Linear of a model exchanged for one that runs on jaxgemm.

eqx.nn.Linear multiplies one vector; models vmap it. Ours is vmapped as well, and all
rows are one product: `jaxgemm.linear` folds the batch into the rows, weights lie as
Equinox has them, [out, in], and the bias is added before the result is stored.

  python -m experiments.adoption.equinox_layers
"""

from __future__ import annotations

from collections import Counter

import equinox as eqx
import jax

from experiments.adoption.compare import compare
import jaxgemm


class Linear(eqx.nn.Linear):
  """eqx.nn.Linear by one kernel."""

  def __call__(self, x, *, key=None):
    if "scalar" in (self.in_features, self.out_features):
      return super().__call__(x, key=key)
    return jaxgemm.linear(x, self.weight, self.bias, transposed=True)


def with_jaxgemm[T](model: T) -> T:
  """The model with each of its eqx.nn.Linear exchanged; the parameters are the same."""

  def is_linear(x) -> bool:
    return isinstance(x, eqx.nn.Linear)

  def exchanged(x):
    if not is_linear(x):
      return x
    new = object.__new__(Linear)
    for name, value in vars(x).items():
      object.__setattr__(new, name, value)
    return new

  return jax.tree.map(exchanged, model, is_leaf=is_linear)


def main() -> Counter:
  keys = jax.random.split(jax.random.key(0), 3)
  perceptron = eqx.nn.MLP(32, 16, 64, 2, activation=jax.nn.gelu, key=keys[0])
  params, static = eqx.partition(perceptron, eqx.is_inexact_array)
  x = jax.random.normal(keys[1], (8, 32))

  def theirs(params, x):
    return jax.vmap(eqx.combine(params, static))(x)

  def ours(params, x):
    return jax.vmap(with_jaxgemm(eqx.combine(params, static)))(x)

  return compare("equinox", theirs, ours, params, x)


if __name__ == "__main__":
  main()

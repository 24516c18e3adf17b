"""jaxgemm.ragged_dot: operands, and what its results must be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxgemm
from jaxgemm import reference
from pallas_kernels.configs import PersistentConfig
from tests.product_cases import normal

# Of 40 rows; a group of few, one of none, and 7 rows of nobody.
SIZES = (9, 0, 23, 1)
M, K, N = 40, 72, 48
SMALL = PersistentConfig(64, 16, 64, num_stages=3, consumers=1, swap=True)
PRIMITIVE = "jaxgemm_ragged"


def operands_of(rng, dtype="float32", *, transposed=False, sizes=SIZES):
  lhs = normal(rng, M, K, dtype=dtype)
  shape = (len(sizes), N, K) if transposed else (len(sizes), K, N)
  return lhs, normal(rng, *shape, dtype=dtype), jnp.asarray(sizes, jnp.int32)


def float64(*arrays):
  return [np.asarray(x).astype(np.float64) for x in arrays]


def ranges(sizes, rows: int) -> list[slice]:
  ends = np.minimum(np.cumsum(np.asarray(sizes, np.int64)), rows)
  return [slice(*x) for x in zip(np.append(0, ends[:-1]), ends, strict=True)]


def exact(lhs, rhs, sizes, *, transposed=False) -> np.ndarray:
  lhs, rhs = float64(lhs, rhs)
  rhs = rhs.swapaxes(1, 2) if transposed else rhs
  out = np.zeros((lhs.shape[0], rhs.shape[2]))
  for matrix, rows in zip(rhs, ranges(sizes, len(lhs)), strict=True):
    out[rows] = lhs[rows] @ matrix
  return out


def exact_gradients(lhs, rhs, sizes, ct, *, transposed=False):
  """Those of the operands as they are."""
  of_lhs = exact(ct, rhs, sizes, transposed=not transposed)
  lhs, ct = float64(lhs, ct)
  of_rhs = np.stack([lhs[rows].T @ ct[rows] for rows in ranges(sizes, len(lhs))])
  return of_lhs, of_rhs.swapaxes(1, 2) if transposed else of_rhs


def plain(lhs, rhs, sizes, *, transposed=False):
  """The same product of what JAX differentiates by itself."""
  ends = jnp.cumsum(sizes)
  row = jnp.arange(lhs.shape[0])
  of = (row[:, None] < ends) & (row[:, None] >= ends - sizes)
  of = of.astype(lhs.dtype)
  spec = "rk,gnk,rg->rn" if transposed else "rk,gkn,rg->rn"
  return jnp.einsum(spec, lhs, rhs, of, precision="highest")


def ragged(**fields):
  fields = dict(precision="highest") | fields
  return lambda *x: jaxgemm.ragged_dot(*x, **fields)


def check_close(found, wanted, limit=2e-6) -> None:
  for one, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert one.shape == want.shape and one.dtype == want.dtype
    assert reference.relative_error(one, want) < limit


def check_as_exact(found, xla, wanted) -> None:
  """At most twice as far off as XLA's."""
  for one, other, want in zip(found, xla, wanted, strict=True):
    assert one.dtype == other.dtype
    limit = 2 * reference.relative_error(other, want)
    assert reference.relative_error(one, want) <= limit


def shapes(m=4096, k=2048, n=1024, g=8, dtype="bfloat16"):
  return [
      jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((g, k, n), dtype),
      jax.ShapeDtypeStruct((g,), "int32"),
  ]

"""jaxgemm.einsum: jnp.einsum's results, of our products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

import jaxgemm
from jaxgemm import einsums, reference
from pallas_kernels.problem import BlockedConfig
from tests.product_cases import count_primitives, cuda_kernels, normal

CASES = {
    # subscripts: shapes, products
    "mk,kn->mn": (((3, 4), (4, 5)), 1),
    "mk,nk->nm": (((3, 4), (5, 4)), 1),
    "bqhd,bkhd->bhqk": (((2, 3, 4, 5), (2, 6, 4, 5)), 1),
    "bhqk,bkhd->bqhd": (((2, 4, 3, 6), (2, 6, 4, 5)), 1),
    "...d,df->...f": (((2, 3, 4), (4, 5)), 1),
    "ij,jk,kl": (((3, 4), (4, 5), (5, 2)), 2),
    "ab,ab->": (((2, 3), (2, 3)), 1),
    "iij->j": (((3, 3, 2),), 0),
    "a,b->ab": (((3,), (4,)), 1),
}


@pytest.mark.parametrize("subscripts", CASES)
def test_values_and_gradients(subscripts, rng):
  shapes, num_products = CASES[subscripts]
  operands = [normal(rng, *shape) for shape in shapes]
  run = lambda *x: jaxgemm.einsum(subscripts, *x, precision="highest")
  truth = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in operands))
  assert reference.relative_error(run(*operands), truth) < 1e-6
  assert count_primitives(run, *operands)["jaxgemm"] == num_products
  check_grads(run, operands, order=1, atol=2e-2, rtol=2e-2)


def test_subscripts_as_lists(rng):
  a, b = normal(rng, 3, 4), normal(rng, 4, 5)
  np.testing.assert_allclose(
      jaxgemm.einsum(a, [0, 1], b, [1, 2], [0, 2]), a @ b, 1e-5, 1e-5
  )


def test_runs_our_kernels():
  q = k = jax.ShapeDtypeStruct((4, 256, 8, 64), jnp.bfloat16)
  scores = lambda q, k: jaxgemm.einsum("bqhd,bkhd->bhqk", q, k)
  assert not cuda_kernels(scores, q, k)["xla"]


def test_the_same_call_compiles_once():
  """jnp.einsum's jit takes the function of its products as static."""
  first, second = (einsums._product("blocked", BlockedConfig()) for _ in range(2))
  assert first is second

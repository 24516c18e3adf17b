"""jaxgemm.einsum: jnp.einsum's results, of our products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

import jaxgemm
from jaxgemm import einsums, reference
from pallas_kernels.configs import BlockedConfig
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
  for result in ([[0, 2]], []):
    found = jaxgemm.einsum(a, [0, 1], b, [1, 2], *result)
    np.testing.assert_allclose(found, a @ b, 1e-5, 1e-5)
  found = jaxgemm.einsum(a, [0, 1], b, [1, 2], [2, 0])
  np.testing.assert_allclose(found, (a @ b).T, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "moved"),
    [
        ("td,edf->etf", ((64, 16), (8, 16, 32)), 0),  # Experts, of the same tokens.
        ("td,edf->tef", ((64, 16), (8, 16, 32)), 1),
        ("oi,bi->bo", ((32, 16), (64, 16)), 0),
        ("mk,kn->nm", ((32, 16), (16, 64)), 0),
        ("btm,mhd->bthd", ((2, 8, 16), (16, 4, 8)), 0),
        ("bthd,hdm->btm", ((2, 8, 4, 8), (4, 8, 16)), 0),
        # Grouped queries: both operands, not the scores, which are larger.
        ("btkgd,bskd->bkgts", ((2, 32, 2, 4, 8), (2, 32, 2, 8)), 2),
        ("...ij,...jk->...ik", ((2, 3, 4, 5), (2, 3, 5, 6)), 0),
    ],
)
def test_transposes_no_more_than_it_must(subscripts, shapes, moved, rng):
  operands = [normal(rng, *shape) for shape in shapes]
  run = lambda *x: jaxgemm.einsum(subscripts, *x)
  counts = count_primitives(run, *operands)
  assert counts["jaxgemm"] == 1 and counts["transpose"] == moved
  truth = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in operands))
  assert reference.relative_error(run(*operands), truth) < 1e-6


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij,jk->i", ((3, 4), (4, 5))), ("iij,jk->ik", ((3, 3, 4), (4, 5))),
        ("ij,jk->ijk", ((3, 4), (4, 5))), ("ij,kj", ((3, 4), (5, 4))),
        ("ij,jk->", ((3, 4), (4, 5))), ("i,j", ((3,), (4,))),
        ("...i,i", ((2, 3, 4), (4,))), (" ij , jk -> ik ", ((3, 4), (4, 5))),
    ],
)
def test_what_precedes_or_follows_a_product(subscripts, shapes, rng):
  operands = [normal(rng, *shape) for shape in shapes]
  found = jaxgemm.einsum(subscripts, *operands)
  truth = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in operands))
  assert found.shape == truth.shape
  assert reference.relative_error(found, truth) < 1e-6


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [("ij,jk", ((3, 4), (5, 6))), ("ij,jk->ix", ((3, 4), (4, 6))),
     ("ij,jk", ((3, 4, 2), (4, 6))), ("ij", ((3, 4), (4, 6))),
     ("ij,jk->ii", ((3, 4),) * 2)],
)
def test_errors_are_those_of_jax(subscripts, shapes, rng):
  operands = [normal(rng, *shape) for shape in shapes]
  with pytest.raises(Exception) as theirs:  # noqa: PT011, B017
    jnp.einsum(subscripts, *operands)
  with pytest.raises(theirs.type):
    jaxgemm.einsum(subscripts, *operands)


@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16"])
def test_dtypes_are_those_of_jax(dtype, rng):
  a, b = normal(rng, 3, 4).astype(dtype), normal(rng, 4, 5)
  weak = jnp.full((4, 5), 2.0)
  for operands in ((a, b), (a, b.astype(dtype)), (a, weak), (b.T, a.T), (weak.T, weak)):
    for preferred in (None, "float32"):
      found, wanted = (
          einsum("ij,jk", *operands, preferred_element_type=preferred)
          for einsum in (jaxgemm.einsum, jnp.einsum)
      )
      assert jax.typeof(found) == jax.typeof(wanted)


def test_runs_our_kernels():
  q = k = jax.ShapeDtypeStruct((4, 256, 8, 64), jnp.bfloat16)
  scores = lambda q, k: jaxgemm.einsum("bqhd,bkhd->bhqk", q, k)
  assert not cuda_kernels(scores, q, k)["xla"]


def test_the_same_call_compiles_once():
  """jnp.einsum's jit takes the function of its products as static."""
  first, second = (einsums._product("blocked", BlockedConfig()) for _ in range(2))
  assert first is second

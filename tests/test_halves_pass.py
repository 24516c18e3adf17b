"""The kernels that make float16 parts: the same bits as XLA's passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import halves, halves_of, halves_pass
from pallas_kernels.halves_of import ENDLESS, LOSES, SMALL
from tests import kernel_cases
from tests.kernel_cases import make_problem

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

SHAPES = [(1, 3, 128), (2, 8, 128), (2, 16, 256), (1, 32, 384), (3, 48, 1536)]


def operand(shape, seed=0) -> jax.Array:
  """Elements of many sizes, zeros and subnormals among them."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 3, shape))
  x[rng.random(shape) < 0.01] = 0.0
  x[:, 0] *= 2.0**-120
  x[:, -1] *= 2.0**100
  return jnp.asarray(x, jnp.float32)


def by_xla(x, axis):
  return jax.jit(halves._split, static_argnums=(1, 2))(x, axis, False)


def by_kernel(x, axis, **options):
  if axis == 2:
    parts, factors, marks = halves_pass.by_rows(x, **options)
  else:
    parts, factors, marks = halves_pass.by_cols(x, halves_of.largest_of(x, 1), **options)
  return parts, factors, jnp.max(marks)


def check(x, axis, **options):
  parts, factors, mark = by_kernel(x, axis, **options)
  expected, its_factors, its_mark = by_xla(x, axis)
  for part, other in zip(parts, expected, strict=True):
    np.testing.assert_array_equal(part, other)  # But for zeros' signs: XLA's vary.
  np.testing.assert_array_equal(factors, its_factors)
  assert int(mark) == int(its_mark)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [1, 2])
def test_same_bits_in_emulation(axis, shape):
  if not halves_pass.serves(shape, axis == 2):
    pytest.skip("rows go together")
  x = operand(shape)
  kernel_cases.compat.run_interpreted(lambda params: check(x, axis, interpret=params))


@pytest.mark.parametrize(
    ("value", "mark"),
    [(1.0, 0), (0.0, SMALL), (2.0**-29, LOSES), (-(2.0**-29), LOSES), (2.0**-27, 0),
     (np.inf, ENDLESS), (-np.inf, ENDLESS), (np.nan, ENDLESS)],
    ids=str,
)
@pytest.mark.parametrize("axis", [1, 2])
def test_marks(axis, value, mark):
  x = jnp.ones((1, 16, 128)).at[0, 3, 5].set(value)
  run = lambda params: by_kernel(x, axis, interpret=params)[2]
  assert int(kernel_cases.compat.run_interpreted(run)) == mark
  assert int(by_xla(x, axis)[2]) == mark


def test_what_they_serve():
  assert halves_pass.serves((1, 7, 4096), True)
  assert not halves_pass.serves((1, 7, 4096), False)  # 8 rows at a time.
  assert not halves_pass.serves((1, 16, 16512), True)  # Of a thread's registers.
  assert halves_pass.serves((1, 16, 16512), False)
  assert not halves_pass.serves((1, 16, 100), True)


@pytest.mark.parametrize(
    ("layouts", "rows", "cols"), [("NT", 2, 0), ("NN", 1, 1), ("TN", 0, 2)]
)
def test_which_kernels_run(layouts, rows, cols):
  problem = make_problem(256, 384, 512, layouts, "float32", algorithm="bf16_x6")
  types = [jax.ShapeDtypeStruct(s, jnp.float32)
           for s in (problem.lhs_shape, problem.rhs_shape)]
  split = jax.jit(lambda *x: halves.split(*x, problem, by_kernels=True))
  text = jax.export.export(split, platforms=["cuda"])(*types).mlir_module()
  assert text.count("custom_call @mosaic_gpu") == rows + cols
  assert ("jaxgemm_halves_rows" in text) == (rows > 0)
  assert ("jaxgemm_halves_cols" in text) == (cols > 0)
  assert "jaxgemm" not in jax.jit(lambda *x: halves.split(*x, problem)).lower(
      *types).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, (1, 4096, 4096), (1, 768, 6272), (1, 64, 16384),
     (70_000, 8, 128), (1, 560_000, 128)],  # More than 2**16 products, or bands of rows.
    ids=str,
)
@pytest.mark.parametrize("axis", [1, 2])
def test_gpu_same_bits_as_xla(axis, shape):
  if not halves_pass.serves(shape, axis == 2):
    pytest.skip("rows go together")
  check(operand(shape), axis)

"""Products of one row or column, which are planned as a row of k, however written."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from jaxgemm.autotune import tuner
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Epilogue
from tests.kernel_cases import LAYOUTS, make_problem
from tests.product_cases import normal

BIAS = Epilogue(has_bias=True)
CANONICAL = [
    # (m, n, layouts), as what: (m, n, layouts), and what is fused.
    ((64, 32, "TN"), (64, 32, "TN"), Epilogue()),
    ((64, 1, "NN"), (1, 64, "NT"), Epilogue()),
    ((64, 1, "NT"), (1, 64, "NT"), Epilogue(c_dtype="float32", beta=2.0)),
    ((64, 1, "TN"), (1, 64, "NN"), Epilogue()),
    ((64, 1, "TT"), (1, 64, "NN"), Epilogue()),
    ((1, 64, "TN"), (1, 64, "NN"), Epilogue()),
    ((1, 64, "TT"), (1, 64, "NT"), BIAS),
    ((1, 1, "TN"), (1, 1, "NT"), Epilogue()),
    # A bias lies along n, as do the factors of rows and columns, and both rhs.
    ((64, 1, "NN"), (64, 1, "NT"), BIAS),
    ((64, 1, "NN"), (64, 1, "NN"), Epilogue(gated=True, activation="silu")),
    ((64, 1, "NN"), (64, 1, "NN"), Epilogue(scaling="rows")),
]


@pytest.mark.parametrize(("given", "wanted", "epilogue"), CANONICAL, ids=str)
def test_canonical_form(given, wanted, epilogue):
  problem, canonical = (
      make_problem(m, n, 48, layouts, epilogue=epilogue, batch=3, lhs_batched=m == 64)
      for m, n, layouts in (given, wanted)
  )
  if given[:2] != wanted[:2]:  # The operands change places.
    canonical = dataclasses.replace(canonical, lhs_batched=True, rhs_batched=True)
  assert problem.canonical == canonical
  assert canonical.canonical == canonical


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_two_matrices_of_a_gated_product_change_places_too(layouts):
  epilogue = Epilogue(gated=True, activation="silu", saves=True)
  problem = make_problem(72, 136, 64, layouts, epilogue=epilogue)
  turned = problem.transposed
  assert (turned.product_m, turned.product_n) == (2 * 136, 72)
  assert (turned.flops, turned.num_bytes) == (problem.flops, problem.num_bytes)
  assert turned.transposed == problem
  assert turned.unfused == problem.unfused.transposed
  alone = dataclasses.replace(problem, epilogue=Epilogue())
  assert alone.transposed.product_m == 136


@pytest.mark.parametrize("rhs_batched", [False, True])
def test_what_is_shared_changes_places_too(rhs_batched):
  problem = make_problem(64, 1, 48, batch=3, rhs_batched=rhs_batched)
  assert problem.canonical.lhs_batched == rhs_batched
  assert problem.canonical.rhs_batched


def column(a_shape, b_shape, transposed):
  """A product, and the two operands that it takes."""
  multiply = lambda a, b: jaxgemm.matmul(a.swapaxes(-1, -2) if transposed else a, b)
  if transposed:
    a_shape = (*a_shape[:-2], a_shape[-1], a_shape[-2])
  return multiply, a_shape, b_shape


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_no_column_is_copied(layouts):
  """Neither padded nor transposed, where k lets TMA take it."""
  lhs_t, rhs_t = (letter == "T" for letter in layouts)
  multiply = lambda a, b: jaxgemm.matmul(a.T if lhs_t else a, b.T if rhs_t else b)
  for m, n in ((4096, 1), (1, 4096)):
    shapes = [(2048, m) if lhs_t else (m, 2048), (n, 2048) if rhs_t else (2048, n)]
    operands = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    with jaxgemm.target("NVIDIA H200"):
      exported = jax.export.export(jax.jit(multiply), platforms=["cuda"])(*operands)
    text = exported.mlir_module()
    assert "mosaic_gpu" in text and "stablehlo.dot" not in text
    assert "stablehlo.pad" not in text
    # What the caller transposes is transposed back, of which XLA makes nothing.
    assert text.count("stablehlo.transpose") == 2 * (lhs_t + rhs_t)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((72, 128), (128,)), ((3, 72, 128), (128, 1)), ((2, 72, 64), (2, 64, 1)),
     ((72, 67), (67, 1))],
    ids=str,
)
def test_columns(a_shape, b_shape, transposed, rng):
  multiply, a_shape, b_shape = column(a_shape, b_shape, transposed)
  a, b = normal(rng, *a_shape, dtype="bfloat16"), normal(rng, *b_shape, dtype="bfloat16")
  with jaxgemm.emulate():
    found = multiply(a, b)
  turned = a.swapaxes(-1, -2) if transposed else a
  exact = np.asarray(turned).astype(np.float64) @ np.asarray(b).astype(np.float64)
  assert found.shape == exact.shape
  assert reference.relative_error(found, exact) < 3.4e-3


def test_columns_with_c_bias_and_gradients(rng):
  a, b = normal(rng, 64, 128, dtype="bfloat16"), normal(rng, 128, 1, dtype="bfloat16")
  c = normal(rng, 64, 1)
  exact = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)
  with jaxgemm.emulate():
    found = jaxgemm.gemm(a, b, c, alpha=0.5, beta=2.0, preferred_element_type="float32")
    layer = jaxgemm.linear(a, b, jnp.ones((1,), a.dtype), activation="relu")
    total = lambda *x: jnp.sum(jaxgemm.matmul(*x).astype("float32"))
    grads = jax.grad(total, (0, 1))(a, b)
  wanted = 0.5 * exact + 2.0 * np.asarray(c, np.float64)
  assert reference.relative_error(found, wanted) < 1e-5
  assert reference.relative_error(layer, np.maximum(exact + 1.0, 0.0)) < 3.4e-3
  ones = np.ones((64, 1))
  wanted = ones @ np.asarray(b, np.float64).T, np.asarray(a, np.float64).T @ ones
  for grad, one in zip(grads, wanted, strict=True):
    assert grad.shape == one.shape and reference.relative_error(grad, one) < 3.4e-3


def test_a_config_is_of_the_dimensions_as_they_are():
  a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 128), (128, 1)))
  config = PersistentConfig(tile_m=128, tile_n=64, num_stages=3)
  with jaxgemm.target("NVIDIA H200"):
    given = jaxgemm.explain(a, b, config=config).problem
    chosen = jaxgemm.explain(a, b).problem
  assert (given.m, given.n) == (512, 1) and (chosen.m, chosen.n) == (1, 512)


def test_a_batch_invariant_row_is_as_it_is():
  """Where it is the only one it is not planned as another."""
  a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 128), (128, 1)))
  with jaxgemm.target("NVIDIA H200"), jaxgemm.batch_invariant():
    problem = jaxgemm.explain(a, b).problem
  assert (problem.m, problem.n, problem.rhs_layout) == (512, 1, "n-major")


def test_a_tuned_row_is_found_by_either_form(folder, monkeypatch):
  """What is tuned is what is planned."""
  seen = []
  monkeypatch.setattr(tuner, "make_job", lambda plan, *_: seen.append(plan.problem))
  column, row = make_problem(512, 1, 256), make_problem(1, 512, 256, "NT")
  tuner.tune(
      [column, row], jaxgemm.device.known_device("NVIDIA H200"), command="test",
      measure=lambda jobs, device: [],
  )
  assert seen == [row]


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((16384, 7168), (7168, 1)), ((1000, 4097), (4097,)),
     ((16, 256, 1024), (16, 1024, 1))],
    ids=str,
)
def test_columns_on_the_chip(a_shape, b_shape, transposed, rng):
  multiply, a_shape, b_shape = column(a_shape, b_shape, transposed)
  a, b = normal(rng, *a_shape, dtype="bfloat16"), normal(rng, *b_shape, dtype="bfloat16")
  turned = a.swapaxes(-1, -2) if transposed else a
  exact = np.asarray(turned).astype(np.float64) @ np.asarray(b).astype(np.float64)
  assert reference.relative_error(jax.jit(multiply)(a, b), exact) < 3.4e-3

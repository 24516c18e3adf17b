"""Products that one kernel adds up: the kernel, its plans, gradients of gated layers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import plan, reference, table
from jaxgemm.contexts import current_target
from jaxgemm.device import current_device, known_device
from jaxgemm.dims import fold
from jaxgemm.gradients import gradients
from jaxgemm.product import Product
from pallas_kernels import KERNELS, compat, persistent
from pallas_kernels.problem import Epilogue
from tests.kernel_cases import make_problem, mostly_slow, small_config
from tests.product_cases import count_primitives, normal

H200 = known_device("NVIDIA H200")
ALPHA = Epilogue(alpha=0.5)
# Fields of a config, and how many terms there are.
CONFIGS = {
    "cooperative": (dict(), 2),
    "turns": (dict(tile_m=64, wg_dim="tile", num_stages=2), 2),
    "transposed": (dict(tile_m=64, tile_n=72, consumers=1, swap=True), 3),
    "cluster": (dict(cluster_m=2), 2),
    "promoted": (dict(tile_m=64, consumers=1, promote=3), 4),
}


def operands(problem, seed=0):
  """lhs and rhs, each the arrays of all terms."""
  rng = np.random.default_rng(seed)
  return tuple(
      tuple(
          jnp.asarray(rng.standard_normal(shape), problem.dtype)
          for _ in range(problem.terms)
      )
      for shape in (problem.term.lhs_shape, problem.term.rhs_shape)
  )


def products(problem, lhs, rhs, dtype):
  """alpha times the product of each term [m, n], summed up in `dtype`."""
  found = []
  for a, b in zip(lhs, rhs, strict=True):
    a, b = (np.asarray(x[0], dtype) for x in (a, b))
    a = a if problem.lhs_layout == "k-major" else a.T
    b = b if problem.rhs_layout == "n-major" else b.T
    found.append(a @ b)
  return problem.epilogue.alpha * sum(found)


def check(problem, config, run):
  """At most as far off as the rounding of the result, by twice."""
  assert persistent.supports(problem, config) is None
  lhs, rhs = operands(problem)
  truth = products(problem, lhs, rhs, np.float64)
  rounded = np.asarray(jnp.asarray(truth, problem.out_dtype), np.float64)
  error = reference.relative_error(run(lhs, rhs)[0], truth)
  assert error <= 2 * reference.relative_error(rounded, truth)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layouts", mostly_slow(["NT", "NN", "TN", "TT"]))
def test_values(layouts, name):
  fields, terms = CONFIGS[name]
  config = small_config("persistent", **fields)
  problem = make_problem(200, 136, 128 * terms, layouts, terms=terms, epilogue=ALPHA)

  def run(lhs, rhs):
    return compat.run_interpreted(
        lambda params: persistent.launch(
            (lhs, rhs), problem, config, num_sms=2, interpret=params
        )
    )

  check(problem, config, run)


def test_each_term_counts():
  """No term is another's, and each is read at its own k."""
  problem = make_problem(64, 64, 256, "NT", terms=2)
  config = small_config("persistent", tile_m=64, tile_n=64, consumers=1)
  lhs, rhs = operands(problem)
  nothing = tuple(jnp.zeros_like(x) for x in rhs)
  for kept in range(2):
    some = tuple(x if i == kept else nothing[i] for i, x in enumerate(rhs))
    found = compat.run_interpreted(
        lambda params, some=some: persistent.launch(
            (lhs, some), problem, config, num_sms=1, interpret=params
        )
    )
    truth = products(problem, lhs[kept : kept + 1], some[kept : kept + 1], np.float64)
    assert reference.relative_error(found[0], truth) < 3e-3


@pytest.mark.gpu
def test_values_on_the_chip():
  num_sms = current_device().num_sms
  for layouts in ("NN", "NT", "TN", "TT"):
    for fields, terms in CONFIGS.values():
      config = small_config("persistent", **fields)
      problem = make_problem(
          1000, 904, 704 * terms, layouts, terms=terms, epilogue=ALPHA
      )
      launch = functools.partial(
          persistent.launch, problem=problem, config=config, num_sms=num_sms
      )
      check(problem, config, lambda lhs, rhs, f=launch: jax.jit(f)((lhs, rhs)))


@pytest.mark.parametrize(
    ("changes", "fields", "reason"),
    [
        (dict(k=192), {}, "k=192 of 2 terms: each has a multiple of tile_k=64"),
        ({}, dict(misaligned="loads", consumers=1, tile_m=64), "TMA brings the operands"),
        (dict(epilogue=Epilogue(gated=True)), {}, "terms=2 excludes two rhs"),
        (dict(norm_eps=1e-5), dict(tile_m=64, consumers=1), "and a norm"),
        (dict(dtype="float32", algorithm="tf32_f32"), dict(tile_k=32), "16-bit operands"),
        (dict(lhs_source="int8"), {}, "16-bit operands, not int8/bfloat16"),
    ],
)
def test_what_is_not_served(changes, fields, reason):
  config = small_config("persistent", **fields)
  refused = dataclasses.replace(make_problem(128, 128, 256, terms=2), **changes)
  assert reason in (persistent.supports(refused, config) or "it is")


@pytest.mark.parametrize("kernel", sorted(set(KERNELS) - {"persistent"}))
def test_no_other_kernel_adds_up(kernel):
  reason = KERNELS[kernel].supports(
      make_problem(1, 128, 512, terms=2), KERNELS[kernel].Config()
  )
  assert reason == "terms=2: only persistent adds up products"


# -- Plans -------------------------------------------------------------------------


def test_where_one_kernel_is_planned():
  """Of many rows; where k is shared out, each product has its own."""
  for m, n, k, one in (
      (8192, 4096, 28672, True), (512, 4096, 28672, True), (64, 2048, 16384, False),
      (8192, 4096, 2 * 14344, False),
  ):
    problem = make_problem(m, n, k, "NT", terms=2)
    found = plan.summed(problem, H200)
    assert (found is not None) == one, (m, n, k)
    if one:
      assert found.kernel == "persistent" and "2 terms" in str(found)
  assert plan.summed(make_problem(8192, 4096, 28672, "NT", terms=2), None) is None


def test_a_table_answers_by_the_product_of_as_long_a_k():
  problem = make_problem(8192, 4096, 28672, "NT", terms=2)
  assert table.alike(problem) == table.alike(dataclasses.replace(problem, terms=1))
  of_one_row = make_problem(1, 64, 256, "TN", terms=2)
  assert of_one_row.canonical == of_one_row  # Of arrays of their own.


# -- Layers ------------------------------------------------------------------------


def weights(rng, m, k, n):
  shapes = dict(x=(m, k), gate=(k, n), up=(k, n))
  return {
      name: jnp.asarray(normal(rng, *shape) / shape[0] ** 0.5, "bfloat16")
      for name, shape in shapes.items()
  }


def loss(v, **options):
  out = jaxgemm.gated_linear(v["x"], v["gate"], v["up"], **options)
  return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def plans(run, *operands):
  return [str(found.problem) for found in jaxgemm.explain(run, *operands)]


def test_what_the_gradient_of_x_is():
  """One kernel; two if it is named, or bits of rows must not depend on other rows."""
  v = {
      "x": jax.ShapeDtypeStruct((8192, 4096), "bfloat16"),
      **dict.fromkeys(("gate", "up"), jax.ShapeDtypeStruct((4096, 14336), "bfloat16")),
  }
  with jaxgemm.target("NVIDIA H200"):
    found = plans(jax.grad(loss), v)
    assert [text for text in found if "8192x4096x28672 NT" in text and "terms" in text]
    found = plans(jax.grad(functools.partial(loss, implementation="persistent")), v)
    assert not [text for text in found if "terms" in text]
    with jaxgemm.batch_invariant():
      assert not [text for text in plans(jax.grad(loss), v) if "terms" in text]


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed, rng):
  """As near to float64 as XLA's, of weights stored in either way."""
  v = weights(rng, 256, 128, 192)
  stored = {name: x.T if transposed and name != "x" else x for name, x in v.items()}
  run = jax.grad(functools.partial(loss, transposed=transposed))
  with jaxgemm.emulate():
    assert [text for text in plans(run, stored) if "2 terms" in text]
    found = jax.jit(run)(stored)

  def unfused(v):
    out = jax.nn.silu(v["x"] @ v["gate"]) * (v["x"] @ v["up"])
    return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, "float32"))))

  theirs = jax.grad(unfused)(v)
  with jax.enable_x64(True):
    truth = jax.grad(unfused)({name: x.astype("float64") for name, x in v.items()})
  ours = found["x"]
  error, baseline = (
      reference.relative_error(x, truth["x"]) for x in (ours, theirs["x"])
  )
  assert ours.dtype == "bfloat16" and error <= 2 * baseline


@pytest.mark.slow
def test_of_an_lhs_that_is_stored_transposed(rng):
  """Whose gradient has the cotangents in rhs's place."""
  lhs, *others = (
      jnp.asarray(normal(rng, *shape), "bfloat16")
      for shape in ((64, 136), (64, 192), (64, 192), (136, 192), (136, 192))
  )
  rhs, cts = others[:2], others[2:]
  dims = fold(("k", "m"), ("k", "n"), ("m", "n"), lhs.shape, rhs[0].shape).dims
  with jaxgemm.emulate():
    product = Product(dims, "bfloat16", "bf16_f32", target=current_target())
    run = lambda *x: gradients(x[0], x[1:3], x[3:], product)[0]
    assert [text for text in plans(run, lhs, *others) if "2 terms" in text]
    found = jax.jit(run)(lhs, *others)
  wide = [[np.asarray(x, np.float64) for x in each] for each in (rhs, cts)]
  truth = sum(w @ ct.T for w, ct in zip(*wide, strict=True))
  assert found.shape == lhs.shape
  assert reference.relative_error(found, truth) < 3e-3


def test_no_derivative_wants_it(rng):
  """Derivatives see products, as before: the sum is a matter of the lowering."""
  v = weights(rng, 64, 64, 64)
  counts = count_primitives(jax.grad(loss), v)
  assert counts["jaxgemm_gradients"] == 1 and not counts["jaxgemm_summed"]

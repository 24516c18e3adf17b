"""Batch invariance: a row has the same bits, whatever m is and wherever it stands."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxgemm
from jaxgemm import device, heuristics, invariance, plan
from pallas_kernels import parts, specialised
from pallas_kernels.configs import PersistentConfig, SplitKConfig
from pallas_kernels.problem import ALGORITHMS, Problem
from tests.product_cases import normal

H200 = device.known_device("NVIDIA H200")
ROWS = (1, 3, 16, 64, 100, 256, 1000, 4096)
KINDS = {  # dtype, out_dtype, algorithm
    "bfloat16": ("bfloat16", "bfloat16", "bf16_f32"),
    "float16 to float32": ("float16", "float32", "f16_f32"),
    "tf32": ("float32", "float32", "tf32_f32"),
    "highest": ("float32", "float32", "bf16_x6"),
    "high": ("float32", "float32", "bf16_x3"),
}


def problem_of(kind, m, n, k, layouts="NN") -> Problem:
  dtype, out_dtype, algorithm = KINDS[kind]
  return Problem(
      m, n, k, dtype=dtype, out_dtype=out_dtype, algorithm=algorithm,
      lhs_layout="k-major" if layouts[0] == "N" else "m-major",
      rhs_layout="n-major" if layouts[1] == "N" else "k-major",
  )


@pytest.mark.parametrize(
    "size", [(4096, 4096), (64, 16384), (1000, 77), (17, 33)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_sum_alike(kind, size):
  """No plan splits k, and all promote alike; each kind and size has one."""
  n, k = size
  promoted = set()
  for m in ROWS:
    problem = problem_of(kind, m, n, k)
    chosen = plan.make_plan(problem, H200, batch_invariant=True)
    assert chosen.config is not None and chosen.kernel != "split_k"
    assert not getattr(chosen.config, "float16_parts", False)
    assert not getattr(chosen.config, "split_lhs", False)
    # Smaller products of parts, too, are promoted in all plans or in none.
    overlaps = parts.is_split(problem) and specialised.overlaps(problem, chosen.config)
    promoted.add((chosen.config.promote, chosen.config.tile_k, overlaps))
  assert len(promoted) == 1


def test_plans_are_the_fastest_of_those():
  """Where the plan is batch invariant anyway it stays."""
  large = problem_of("bfloat16", 8192, 8192, 8192)
  assert plan.make_plan(large, H200, batch_invariant=True) == plan.make_plan(large, H200)
  deep = problem_of("bfloat16", 256, 256, 65536)
  assert plan.make_plan(deep, H200).kernel == "split_k"
  chosen = plan.make_plan(deep, H200, batch_invariant=True)
  found = [
      c for c in heuristics.candidates(deep, H200)
      if invariance.why_not(deep, c.config) is None
  ]
  assert (chosen.kernel, chosen.config) == (found[0].kernel, found[0].config)
  assert "batch invariant" in chosen.reason


@pytest.mark.parametrize(
    ("kind", "config", "named"),
    [("bfloat16", None, "XLA"), ("bfloat16", SplitKConfig(), "k is split"),
     ("float16 to float32", PersistentConfig(promote=1), "promote=1 is not 4"),
     ("highest", PersistentConfig(128, 128, promote=1, float16_parts=True), "other rows"),
     ("highest", PersistentConfig(128, 128, promote=1, split_lhs=True), "other rows"),
     ("highest", PersistentConfig(256, 128, promote=1), "rounding errors")],
)
def test_why_not(kind, config, named):
  assert named in invariance.why_not(problem_of(kind, 512, 512, 4096), config)


def test_lhs_may_come_skewed():
  problem = problem_of("bfloat16", 8192, 768, 50257)
  chosen = plan.make_plan(problem, H200, batch_invariant=True)
  assert chosen.config.misaligned == "skewed"
  assert invariance.why_not(problem, chosen.config) is None


def test_setting_and_argument(rng):
  a = normal(rng, 64, 65536, dtype="bfloat16")
  b = normal(rng, 65536, 64, dtype="bfloat16")

  def lowered(**options):
    run = jax.jit(lambda a, b: jaxgemm.matmul(a, b, **options))
    with jaxgemm.target("NVIDIA H200"):
      return jax.export.export(run, platforms=["cuda"])(a, b).mlir_module()

  assert "jaxgemm_split_k" in lowered()
  assert "jaxgemm_split_k" not in lowered(batch_invariant=True)
  with jaxgemm.batch_invariant():
    assert "jaxgemm_split_k" not in lowered()
    with jaxgemm.batch_invariant(False):
      assert "jaxgemm_split_k" in lowered()
    with jaxgemm.target("NVIDIA H200"):
      assert jaxgemm.explain(a, b).kernel != "split_k"


def test_gradients_of_lhs_inherit_it(rng):
  """That of rhs sums over all rows, and may be split."""
  x, w = normal(rng, 64, 64, dtype="bfloat16"), normal(rng, 64, 65536, dtype="bfloat16")
  loss = lambda x, w: jaxgemm.matmul(x, w, batch_invariant=True).astype("float32").sum()
  products = [
      eqn.params["product"] for eqn in jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).eqns
      if eqn.primitive.name == "jaxgemm"
  ]
  assert sorted(p.batch_invariant for p in products) == [False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(implementation="xla"), "batch_invariant: XLA's product is not"),
     (dict(implementation="split_k"), "split_k cannot serve .*: k is split"),
     (dict(dtype="int32"), "batch_invariant: .*int32")],
)
def test_what_cannot_be_raises(options, message, rng):
  a = normal(rng, 64, 4096).astype(options.pop("dtype", "float32"))
  run = jax.jit(lambda a: jaxgemm.matmul(a, a.T, batch_invariant=True, **options))
  with jaxgemm.target("NVIDIA H200"), pytest.raises(ValueError, match=message):
    jax.export.export(run, platforms=["cuda"])(a)


def test_a_device_without_kernels_raises(rng):
  """Not XLA's product in silence."""
  a = normal(rng, 64, 64)
  with pytest.raises(ValueError, match="batch_invariant: no kernel serves .*Hopper"):
    jaxgemm.matmul(a, a, batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("size", [(512, 4096), (65, 777), (4096, 14336)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_rows_have_the_same_bits(kind, size, layouts, rng):
  """Rows 0 .. m - 1 alone, and m rows at another place, against all of them."""
  n, k = size
  dtype, out_dtype, algorithm = KINDS[kind]
  assert algorithm in ALGORITHMS
  precision = kind if kind in ("high", "highest") else None
  a, b = normal(rng, ROWS[-1], k, dtype=dtype), normal(rng, k, n, dtype=dtype)
  b = b.T.copy() if layouts[1] == "T" else b
  numbers = ((int(layouts[0] == "N"),), (int(layouts[1] == "T"),)), ((), ())

  @jax.jit
  def product(a, b):
    with jaxgemm.batch_invariant():
      a = a.T if layouts[0] == "T" else a
      return jaxgemm.dot_general(a, b, numbers, precision, out_dtype)

  whole = np.asarray(product(a, b))
  for m in ROWS[:-1]:
    for first in (0, 129):
      some = np.asarray(product(a[first : first + m], b))
      np.testing.assert_array_equal(some, whole[first : first + m], err_msg=f"{m} rows")

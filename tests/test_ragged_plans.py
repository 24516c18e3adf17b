"""jaxgemm.ragged_dot: plans, what is left to XLA, and errors."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from jaxgemm.device import known_device
from jaxgemm.plan import make_plan
from jaxgemm.recording import recording
from pallas_kernels.configs import BlockedConfig, PersistentConfig
from pallas_kernels.problem import Epilogue, Problem
from tests.kernel_cases import more
from tests.product_cases import normal
from tests.ragged_cases import (
  SIZES,
  SMALL,
  K,
  M,
  N,
  check_close,
  exact,
  operands_of,
  plain,
  ragged,
  shapes,
)

# -- Plans, and what is left to XLA ------------------------------------------------


def test_explain_of_a_function(capsys):
  loss = lambda *x: jnp.sum(jnp.sin(jaxgemm.ragged_dot(*x).astype("float32")))
  with jaxgemm.target("NVIDIA H200"):
    found = jaxgemm.explain(jax.grad(loss, (0, 1)), *shapes())
  kernels = Counter(plan.kernel for plan in found)
  assert kernels == {"grouped_m": 2, "grouped_k": 1}
  assert {plan.problem.grouped for plan in found} == {"m", "k"}
  printed = capsys.readouterr().out
  assert "3 of 3 planned products on kernels of jaxgemm" in printed
  assert "in 8 groups of m" in printed and "in 8 groups of k" in printed
  assert "estimated for 8 groups of about 512 rows" in printed


@pytest.mark.parametrize(
    "options, dtype, why",
    [({}, "float32", "float32"), ({}, "int8", "int8"),
     (dict(preferred_element_type="float64"), "bfloat16", "float64"),
     (dict(implementation="xla"), "bfloat16", "implementation='xla'")],
)
def test_what_is_left_to_xla_says_why(options, dtype, why, capsys):
  run = lambda *x: jaxgemm.ragged_dot(*x, **options)
  with jaxgemm.target("NVIDIA H200"), jax.enable_x64(why == "float64"):
    (plan,) = jaxgemm.explain(run, *shapes(dtype=dtype))
  assert plan.kernel == "xla" and why in plan.reason
  assert "0 of 1 planned products" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "out", "kernel"),
    [more("float8_e4m3fn", "bfloat16", "grouped_m"),
     ("float8_e5m2", "float16", "grouped_m"), ("float8_e4m3fn", "float32", "xla"),
     pytest.param("int8", "int32", "grouped_m", marks=pytest.mark.slow),
     ("int8", "bfloat16", "xla"), ("float8_e4m3fn", None, "xla")],
)
def test_operands_in_8_bits(dtype, out, kernel, rng):
  """Results that the tensor cores sum up exactly enough are kernels'."""
  lhs, rhs = (normal(rng, *shape).astype(dtype) for shape in ((M, K), (4, N, K)))
  run = ragged(precision=None, transposed=True, preferred_element_type=out)
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    traced = jax.jit(run).trace(lhs, rhs, jnp.asarray(SIZES, "int32"))
    traced.lower(lowering_platforms=("cuda",))
  (plan,) = record.plans
  assert plan.kernel == kernel and plan.reason
  if kernel == "xla":
    return
  with jaxgemm.emulate():
    found = jax.jit(run)(lhs, rhs, jnp.asarray(SIZES, "int32"))
  wanted = exact(lhs, rhs, SIZES, transposed=True)
  assert found.dtype == out and reference.relative_error(found, wanted) < 2e-3


def test_float8_is_promoted_where_it_must_be():
  """Of float16 results each k tile, of bfloat16's long sums some, of blocks all."""
  for scaling, out, k, promote in (
      ("none", "float16", 512, 1), ("none", "bfloat16", 8192, 0),
      ("none", "bfloat16", 16384, 16), ("rows", "bfloat16", 16384, 16),
      ("rows", "float32", 512, 1), ("blocks", "bfloat16", 16384, 1),
  ):
    problem = Problem(
        512, 1024, k, 4, lhs_batched=False, rhs_layout="k-major", grouped="m",
        dtype="float8_e4m3fn", out_dtype=out, algorithm="e4m3_f32",
        epilogue=Epilogue(scaling=scaling),
    )
    plan = make_plan(problem, known_device("NVIDIA H200"))
    assert (plan.kernel, plan.config.promote) == ("grouped_m", promote)


@pytest.mark.parametrize("n", [1023, 1028])
def test_odd_columns_are_left_to_xla(n):
  with jaxgemm.target("NVIDIA H200"):
    (plan,) = jaxgemm.explain(jaxgemm.ragged_dot, *shapes(n=n))
    assert plan.kernel == "xla"
    named = lambda *x: jaxgemm.ragged_dot(*x, implementation="grouped_m")
    with pytest.raises(ValueError, match=f"n={n}"):
      jaxgemm.explain(named, *shapes(n=n))


def test_gradients_of_xla_stay_xlas():
  loss = lambda *x: jnp.sum(
      jaxgemm.ragged_dot(*x, implementation="xla").astype("float32") ** 2
  )
  with jaxgemm.target("NVIDIA H200"):
    found = jaxgemm.explain(jax.grad(loss, (0, 1)), *shapes())
  assert {plan.kernel for plan in found} == {"xla"}


@pytest.mark.slow
def test_a_named_kernel_and_its_config(rng):
  config = PersistentConfig(128, 128, 64, num_stages=3)
  for options in (dict(config=config), dict(config=config, implementation="grouped_m")):
    with jaxgemm.target("NVIDIA H200"):
      run = lambda *x: jaxgemm.ragged_dot(*x, **options)
      (plan,) = jaxgemm.explain(run, *shapes())
    assert (plan.kernel, plan.config, plan.source) == ("grouped_m", config, "override")
  loss = lambda *x: jnp.sum(jaxgemm.ragged_dot(*x, config=config).astype("float32") ** 2)
  with jaxgemm.target("NVIDIA H200"):
    found = jaxgemm.explain(jax.grad(loss, (0, 1)), *shapes())
  # Gradients are problems of their own.
  assert [plan.config == config for plan in found].count(True) == 1
  assert Counter(plan.kernel for plan in found) == {"grouped_m": 2, "grouped_k": 1}
  operands = operands_of(rng, "bfloat16")
  with jaxgemm.emulate():
    found = jaxgemm.ragged_dot(*operands, config=SMALL)
  assert reference.relative_error(found, exact(*operands)) < 3e-3


def test_symbolic_rows_are_left_to_xla(rng):
  scope = jax.export.SymbolicScope()
  _, rhs, sizes = operands_of(rng)
  lhs = jax.ShapeDtypeStruct(
      jax.export.symbolic_shape(f"m,{K}", scope=scope), jnp.float32
  )
  exported = jax.export.export(jax.jit(ragged()), platforms=["cpu", "cuda"])(
      lhs, rhs, sizes
  )
  x = normal(rng, 33, K)
  check_close(exported.call(x, rhs, sizes), plain(x, rhs, sizes))


# -- Batch invariance --------------------------------------------------------------


@pytest.mark.slow
def test_rows_have_the_same_bits(rng):
  """In other groups of rows, at another place, of another number of rows."""
  x = normal(rng, 30, K, dtype="bfloat16")
  rhs = normal(rng, 4, K, N, dtype="bfloat16")
  others = normal(rng, 200, K, dtype="bfloat16")
  with jaxgemm.emulate(), jaxgemm.batch_invariant():
    alone = jaxgemm.ragged_dot(x, rhs, jnp.array([0, 0, 30, 0]))
    among = jaxgemm.ragged_dot(
        jnp.concatenate([others[:77], x, others[77:]]), rhs, jnp.array([70, 3, 150, 7])
    )
  np.testing.assert_array_equal(alone, among[77:107])


def test_batch_invariance_is_planned_or_raises(rng):
  operands = operands_of(rng, "bfloat16")
  with jaxgemm.batch_invariant():
    with pytest.raises(ValueError, match="batch_invariant: no kernel serves .*Hopper"):
      jaxgemm.ragged_dot(*operands)
    with jaxgemm.target("NVIDIA H200"):
      with pytest.raises(ValueError, match="batch_invariant.*float32"):
        jaxgemm.ragged_dot(*operands_of(rng))
      with pytest.raises(ValueError, match="batch_invariant: XLA|batch_invariant: xla"):
        jaxgemm.ragged_dot(*operands, implementation="xla")
      wrong = PersistentConfig(128, 128, promote=1)
      with pytest.raises(ValueError, match="promote=1 is not 0"):
        jaxgemm.ragged_dot(*operands, config=wrong)
      (plan,) = jaxgemm.explain(jaxgemm.ragged_dot, *operands)
      assert plan.kernel == "grouped_m"
      loss = lambda *x: jaxgemm.ragged_dot(*x, operands[2]).astype("float32").sum()
      found = jaxgemm.explain(jax.grad(loss, (0, 1)), *operands[:2])
      assert {plan.kernel for plan in found} == {"grouped_m", "grouped_k"}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_batch_invariance_is_held_to_where_it_is_lowered(platform, rng):
  """No kernel is for another platform than was planned for, nor for symbolic sizes."""
  lhs, rhs, sizes = operands_of(rng, "bfloat16")
  where = "on this platform"
  if platform == "cuda":
    rows = jax.export.symbolic_shape(f"m,{K}")
    lhs, where = jax.ShapeDtypeStruct(rows, lhs.dtype), "symbolic sizes"
  with jaxgemm.target("NVIDIA H200"), jaxgemm.batch_invariant():
    with pytest.raises(ValueError, match=f"batch_invariant: no kernel serves {where}"):
      jax.export.export(jax.jit(jaxgemm.ragged_dot), platforms=[platform])(
          lhs, rhs, sizes
      )


# -- Errors ------------------------------------------------------------------------

LHS, RHS, GROUPS = np.ones((8, 16), "float16"), np.ones((3, 16, 8), "float16"), [1, 2, 3]
GROUPS = np.array(GROUPS)
BAD = {
    "lhs: a list": (([[1.0]], RHS, GROUPS), {}, TypeError, "lhs is of type list"),
    "rhs: None": ((LHS, None, GROUPS), {}, TypeError, "rhs is of type NoneType"),
    "sizes: a tuple": ((LHS, RHS, (1, 2, 3)), {}, TypeError, "group_sizes is of type"),
    "lhs: 3 dimensions": (
        (LHS[None], RHS, GROUPS), {}, TypeError, r"lhs has shape \(1, 8, 16\).*\[m, k\]"),
    "rhs: 2 dimensions": (
        (LHS, RHS[0], GROUPS), {}, TypeError, r"rhs has shape .*\[groups, k, n\]"),
    "rhs: 2, transposed": (
        (LHS, RHS[0], GROUPS), dict(transposed=True), TypeError,
        r"rhs has shape .*\[groups, n, k\]"),
    "sizes: a scalar": (
        (LHS, RHS, np.int32(3)), {}, TypeError, "group_sizes has shape"),
    "sizes: floats": (
        (LHS, RHS, np.ones(3)), {}, TypeError, "group_sizes is of dtype float"),
    "sizes: bools": (
        (LHS, RHS, np.ones(3, bool)), {}, TypeError, "group_sizes is of dtype bool"),
    "k": ((LHS[:, 1:], RHS, GROUPS), {}, TypeError, r"lhs has shape .*rhs.*dimension 1"),
    "k, transposed": (
        (LHS, RHS, GROUPS), dict(transposed=True), TypeError, "dimension 2 of rhs"),
    "groups": (
        (LHS, RHS, GROUPS[1:]), {}, TypeError, "group_sizes has shape .*each group"),
    "no common dtype": (
        (jnp.asarray(LHS, "float8_e4m3fn"), RHS, GROUPS), {}, ValueError,
        "ragged_dot: lhs is float8_e4m3fn and rhs float16, which JAX promotes to no"),
    "preferred_element_type": (
        (LHS, RHS, GROUPS), dict(preferred_element_type="no"), TypeError,
        "preferred_element_type='no'"),
    "an unknown kernel": (
        (LHS, RHS, GROUPS), dict(implementation="fast"), ValueError, "'fast' is unknown"),
    "another kernel": (
        (LHS, RHS, GROUPS), dict(implementation="persistent"), ValueError,
        "'persistent' cannot serve"),
    "the sums' kernel": (
        (LHS, RHS, GROUPS), dict(implementation="grouped_k"), ValueError,
        "'grouped_k' cannot serve"),
    "another's config": (
        (LHS, RHS, GROUPS), dict(config=BlockedConfig()), ValueError, "BlockedConfig"),
    "a config for xla": (
        (LHS, RHS, GROUPS), dict(config=SMALL, implementation="xla"), ValueError, "xla"),
    "a config of other types": (
        (LHS, RHS, GROUPS), dict(config=PersistentConfig(tile_m=64.0)), TypeError,
        "tile_m"),
    "no GPU": (
        (LHS, RHS, GROUPS), dict(implementation="grouped_m"), ValueError,
        "'grouped_m' cannot run.*Hopper.*jaxgemm.emulate"),
    "no GPU, a config": (
        (LHS, RHS, GROUPS), dict(config=SMALL), ValueError,
        "'grouped_m' cannot run.*Hopper"),
    "precision": (
        (LHS, RHS, GROUPS), dict(precision="good"), ValueError, "precision|good"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
  operands, options, error, message = BAD[name]
  with pytest.raises(error, match=message):
    jaxgemm.ragged_dot(*operands, **options)


@pytest.mark.parametrize(
    "options, dtype, message",
    [(dict(implementation="grouped_m"), "float32", "'grouped_m'.*float32"),
     (dict(config=PersistentConfig(tile_m=96)), "float16",
      "cannot serve .*tile_m=96 over"),
     (dict(config=PersistentConfig(cluster_m=2)), "float16",
      "cannot serve .*along rows"),
     (dict(config=SMALL, preferred_element_type="float32"), "float16",
      "cannot serve .*swap=True stores 16-bit")],
)
def test_errors_of_a_target(options, dtype, message):
  with jaxgemm.target("NVIDIA H200"), pytest.raises(ValueError, match=message):
    jaxgemm.ragged_dot(LHS.astype(dtype), RHS.astype(dtype), GROUPS, **options)


def test_other_products_take_no_groups():
  with pytest.raises(ValueError, match="grouped_m"):
    with jaxgemm.target("NVIDIA H200"):
      jaxgemm.matmul(LHS, LHS.T, implementation="grouped_m")

"""Sharded operands under jit, on four CPU devices.

Under `emulate` a CPU partitions a product as a GPU does, so its compiled text shows
the collectives that a GPU would run.
"""

from __future__ import annotations

from collections import Counter
import contextlib
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from jaxgemm.layouts import ShardedArray, choose_layout
from tests.product_cases import normal
from tests.sharding_cases import (
  BATCHES,
  FOLDED,
  MATRICES,
  SHARED,
  collectives_of,
  loss_of,
  make_mesh,
)

# Shapes, shardings of lhs and rhs; what the product of the shards must reduce.
AGREEING = {
    "replicated": (MATRICES, P(), P(), []),
    "m": (MATRICES, P("x"), P(), []),
    "n": (MATRICES, P(), P(None, "x"), []),
    "m and n": (MATRICES, P("x"), P(None, "y"), []),
    "k": (MATRICES, P(None, "x"), P("x"), [(32, 64)]),
    "m and k": (MATRICES, P("y", "x"), P("x"), [(32, 32)]),
    "n and k": (MATRICES, P(None, "x"), P("x", "y"), [(16, 64)]),
    "m twice": (MATRICES, P(("x", "y")), P(), []),
    "k twice": (MATRICES, P(None, ("x", "y")), P(("x", "y")), [(32, 64)]),
    "batch": (BATCHES, P("x"), P("x"), []),
    "batch and m": (BATCHES, P("x", "y"), P("x"), []),
    "batch and k": (BATCHES, P("x", None, "y"), P("x", "y"), [(2, 16, 32)]),
    "two m": (FOLDED, P("x", "y"), P(), []),
    "first m and n": (FOLDED, P("x"), P(None, "y"), []),
    "first m and k": (FOLDED, P("x", None, "y"), P("y"), [(2, 16, 32)]),
    "batch of rhs": (SHARED, P("y"), P("x"), []),
}


@pytest.mark.parametrize("name", AGREEING)
def test_collectives_are_those_of_xlas_dot(name):
  """No operand is gathered; only a sharded k communicates, once."""
  shapes, lhs_spec, rhs_spec, reduced = AGREEING[name]
  mesh = make_mesh()
  args = [
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
      for shape, spec in zip(shapes, (lhs_spec, rhs_spec), strict=True)
  ]
  theirs = collectives_of(jnp.matmul, *args)
  with jaxgemm.emulate():
    lowered = jax.jit(jaxgemm.matmul).lower(*args).as_text()
    ours = collectives_of(jaxgemm.matmul, *args)
  assert "CustomSPMDPartitioning" in lowered
  assert ours == theirs == Counter({("all-reduce", shape): 1 for shape in reduced})


@pytest.mark.parametrize("name", AGREEING)
def test_weights_in_8_bits(name):
  """They, the larger operand, lie as what they are converted to, and are not gathered."""
  shapes, *specs, reduced = AGREEING[name]
  mesh, dtypes = make_mesh(), [jnp.bfloat16, jnp.bfloat16]
  dtypes[math.prod(shapes[1]) > math.prod(shapes[0])] = jnp.int8

  def convert(library):
    return lambda *x: library.matmul(*(each.astype("bfloat16") for each in x))

  args = [
      jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
      for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
  ]
  rng = np.random.default_rng(0)
  values = [
      jax.device_put(jnp.asarray(rng.integers(-9, 9, x.shape), x.dtype), x.sharding)
      for x in args
  ]
  theirs = collectives_of(convert(jnp), *args)
  with jaxgemm.emulate():
    jaxpr = jax.make_jaxpr(convert(jaxgemm))(*values)
    (product,) = (e for e in jaxpr.eqns if e.primitive.name == "jaxgemm")
    ours = collectives_of(convert(jaxgemm), *args)
    found = jax.jit(convert(jaxgemm))(*values)
  assert [x.aval.dtype.name for x in product.invars][2:] == ["int8"]
  assert ours == theirs == Counter({("all-reduce", shape): 1 for shape in reduced})
  xla, exact = jax.jit(convert(jnp))(*values), reference.matmul(*values)
  limit = 2 * reference.relative_error(xla, exact)
  assert reference.relative_error(found, exact) <= limit


@pytest.mark.parametrize("name", AGREEING)
def test_collectives_of_the_gradients(name):
  shapes, lhs_spec, rhs_spec, _ = AGREEING[name]
  mesh = make_mesh()
  args = [
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
      for shape, spec in zip(shapes, (lhs_spec, rhs_spec), strict=True)
  ]
  # The loss is a sum, so that cotangents are sharded as the results are.
  options = dict(out_shardings=tuple(x.sharding for x in args))
  theirs = collectives_of(jax.grad(loss_of(jnp.matmul), (0, 1)), *args, **options)
  with jaxgemm.emulate():
    ours = collectives_of(jax.grad(loss_of(jaxgemm.matmul), (0, 1)), *args, **options)
  # XLA reduces the gradient of a folded batch in two steps; one is better.
  assert ours <= theirs
  assert not any(kind == "all-gather" for kind, _ in ours)


@pytest.mark.parametrize("name", AGREEING)
def test_values_of_sharded_products(name, rng):
  shapes, lhs_spec, rhs_spec, _ = AGREEING[name]
  mesh = make_mesh()
  args = [
      jax.device_put(normal(rng, *shape), NamedSharding(mesh, spec))
      for shape, spec in zip(shapes, (lhs_spec, rhs_spec), strict=True)
  ]
  with jaxgemm.emulate():
    result = jax.jit(jaxgemm.matmul)(*args)
    ours = jax.jit(jax.grad(loss_of(jaxgemm.matmul), (0, 1)))(*args)
  assert reference.relative_error(result, reference.matmul(*args)) < 1e-6
  theirs = jax.grad(loss_of(jnp.matmul), (0, 1))(*map(np.asarray, args))
  for x, y in zip(ours, theirs, strict=True):
    assert reference.relative_error(x, y) < 1e-5


@pytest.mark.parametrize(
    "out_spec, scattered", [(P("x"), (32, 32)), (P(None, "x"), (16, 64))], ids=str
)
def test_a_sum_that_is_wanted_in_parts_is_scattered(out_spec, scattered, rng):
  """Half of what an all-reduce moves."""
  mesh = make_mesh()
  a = jax.device_put(normal(rng, 64, 128), NamedSharding(mesh, P(None, "x")))
  b = jax.device_put(normal(rng, 128, 32), NamedSharding(mesh, P("x")))
  options = dict(out_shardings=NamedSharding(mesh, out_spec))
  with jaxgemm.emulate():
    assert collectives_of(jaxgemm.matmul, a, b, **options) == Counter(
        {("reduce-scatter", scattered): 1}
    )
    result = jax.jit(jaxgemm.matmul, **options)(a, b)
  assert reference.relative_error(result, reference.matmul(a, b)) < 1e-6


def test_weights_that_are_sharded_along_k_are_gathered(rng):
  """One axis cuts the rows of lhs and the k of rhs: the smaller one moves."""
  mesh = make_mesh()
  x = jax.device_put(normal(rng, 512, 128), NamedSharding(mesh, P("x")))
  w = jax.device_put(normal(rng, 128, 32), NamedSharding(mesh, P("x")))
  with jaxgemm.emulate():
    assert collectives_of(jaxgemm.matmul, x, w) == Counter({("all-gather", (32, 128)): 1})
    result = jax.jit(jaxgemm.matmul)(x, w)
  assert reference.relative_error(result, reference.matmul(x, w)) < 1e-6


def test_partial_sums_travel_in_the_dtype_of_the_result(rng):
  """Also where a residual is added to their sum: float32 ones would take twice as long.

  A CPU reduces bfloat16 in float32, and says so in the name of the addition.
  """
  mesh = make_mesh()
  x, w, residual = (
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
      for shape, spec in (((64, 128), P(None, "x")), ((128, 32), P("x")), ((64, 32), P()))
  )
  layer = jax.jit(lambda x, w, residual: jaxgemm.linear(x, w, residual=residual))
  with jaxgemm.emulate():
    text = layer.lower(x, w, residual).compile().as_text()
  (reduction,) = (line for line in text.splitlines() if " all-reduce(" in line)
  assert re.search(r"to_apply=%\S*promoted", reduction), reduction


@pytest.mark.parametrize("c_spec", [P(), P("x"), P(None, "y"), P("y", "x")], ids=str)
@pytest.mark.parametrize("specs", [(P("x"), P(None, "y")), (P(None, "x"), P("x"))],
                         ids=["m and n", "k"])
def test_gemm_adds_c_once(specs, c_spec, rng):
  mesh = make_mesh()
  a, b, c = (
      jax.device_put(normal(rng, *shape), NamedSharding(mesh, spec))
      for shape, spec in zip(
          ((64, 128), (128, 32), (64, 32)), (*specs, c_spec), strict=True
      )
  )
  f = jax.jit(lambda a, b, c: jaxgemm.gemm(a, b, c, alpha=2.0, beta=-1.0))
  with jaxgemm.emulate():
    result = f(a, b, c)
  truth = reference.matmul(a, b, c, alpha=2.0, beta=-1.0)
  assert reference.relative_error(result, truth) < 1e-6


def test_an_uneven_k_is_right(rng):
  mesh = make_mesh(shape=(4,))
  a, b = normal(rng, 8, 30), normal(rng, 30, 8)

  @jax.jit
  def f(a, b):
    a = jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(None, "x")))
    b = jax.lax.with_sharding_constraint(b, NamedSharding(mesh, P("x")))
    return jaxgemm.matmul(a, b)

  with jaxgemm.emulate():
    result = f(a, b)
  assert reference.relative_error(result, reference.matmul(a, b)) < 1e-6


@pytest.mark.parametrize("k, shards", [(30, {}), (32, {"k0": ("x",)})])
def test_only_an_even_k_is_cut(k, shards):
  lhs = ShardedArray({"m0": 8, "k0": k}, {"k0": ("x",)}, 2)
  rhs = ShardedArray({"k0": k, "n0": 8}, {"k0": ("x",)}, 2)
  out = ShardedArray({"m0": 8, "n0": 8}, {}, 2)
  layout = choose_layout([lhs, rhs], [out], {"x": 4})
  (reduction,) = layout.reductions
  assert layout.parts == shards
  assert reduction.summed == tuple(axis for axes in shards.values() for axis in axes)


def test_layouts_gather_nothing_without_a_conflict(rng):
  """Over random shardings: an axis that cuts one dimension keeps cutting it."""
  mesh_shape = {"x": 2, "y": 4}
  names = (("b0", "m0", "k0"), ("b0", "k0", "n0"), ("b0", "m0", "n0"))
  sizes = {"b0": 8, "m0": 64, "n0": 32, "k0": 16}
  for _ in range(300):
    arrays = []
    for array_names in names:
      parts, axes = {}, ["x", "y"]
      for name in rng.permutation(array_names):
        if axes and rng.random() < 0.5:
          parts[str(name)] = (axes.pop(rng.integers(len(axes))),)
      arrays.append(ShardedArray({n: sizes[n] for n in array_names}, parts, 2))
    lhs, rhs, out = arrays
    layout = choose_layout([lhs, rhs], [out], mesh_shape)
    (reduction,) = layout.reductions
    used = [axis for axes in layout.parts.values() for axis in axes]
    assert len(used) == len(set(used))
    for axis in mesh_shape:
      cut = {n for x in (lhs, rhs) for n, axes in x.parts.items() if axis in axes}
      if len(cut) == 1:
        assert axis in layout.parts[cut.pop()]
    reduced = {*reduction.summed, *sum(reduction.scattered.values(), ())}
    assert reduced == set(layout.parts.get("k0", ()))


def test_export():
  """XLA cannot call back into this process from another; what needs it says so."""
  mesh = make_mesh()
  a, b = (
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
      for shape, spec in ((MATRICES[0], P("x")), (MATRICES[1], P()))
  )

  def text(function) -> str:
    with jaxgemm.target("NVIDIA H200"):
      exported = jax.export.export(jax.jit(function), platforms=["cuda"])(a, b)
    return exported.mlir_module()

  with pytest.raises(NotImplementedError, match="4 devices.*jax.shard_map, or name impl"):
    text(jaxgemm.matmul)
  by_xla = text(lambda a, b: jaxgemm.matmul(a, b, implementation="xla"))
  assert "dot_general" in by_xla and "mosaic_gpu" not in by_xla
  shared_out = jax.shard_map(
      lambda a, b: jaxgemm.linear(a, b, activation="gelu"),
      mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"),
  )
  assert "mosaic_gpu" in text(shared_out)


def test_one_device_needs_no_partitioning(rng):
  a = normal(rng, 256, 256).astype("bfloat16")
  with jaxgemm.target("NVIDIA H200"):
    traced = jax.jit(jaxgemm.matmul).trace(a, a)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "CustomSPMDPartitioning" not in text and "mosaic_gpu" in text


@pytest.mark.gpu
@pytest.mark.parametrize("specs", [(P("x"), P()), (P(None, "x"), P("x"))], ids=["m", "k"])
def test_gpu_kernels_run_on_shards(specs, rng):
  gpus = jax.devices("gpu")
  if len(gpus) < 2:
    pytest.skip("needs two GPUs")
  mesh = jax.sharding.Mesh(np.array(gpus[:2]), ("x",))
  a, b = (
      jax.device_put(normal(rng, *shape).astype("bfloat16"), NamedSharding(mesh, spec))
      for shape, spec in zip(((1024, 2048), (2048, 512)), specs, strict=True)
  )
  for f in (jaxgemm.matmul, jax.grad(loss_of(jaxgemm.matmul), (0, 1))):
    text = jax.jit(f).lower(a, b).compile().as_text()
    assert "mosaic_gpu" in text and "all-gather" not in text
  result = jax.jit(jaxgemm.matmul)(a, b)
  assert reference.relative_error(result, reference.matmul(a, b)) < 5e-3


@pytest.mark.parametrize(("of_w", "of_bias"), [(P(None, "y"), P()), (P(), P("y"))])
@pytest.mark.parametrize("emulated", [False, True])
def test_a_bias_may_lie_in_another_way_than_columns(emulated, of_w, of_bias, rng):
  mesh = make_mesh(AxisType.Explicit)
  values = [normal(rng, *shape) for shape in ((8, 8), (8, 8), (8,))]
  loss = lambda *x: jnp.sum(jnp.sin(jaxgemm.linear(*x, activation="gelu")))
  wanted = jax.grad(loss, (0, 1, 2))(*values)
  with jax.set_mesh(mesh):
    operands = [
        jax.reshard(x, spec)
        for x, spec in zip(values, (P("x"), of_w, of_bias), strict=True)
    ]
    with jaxgemm.emulate() if emulated else contextlib.nullcontext():
      found = jax.jit(jax.grad(loss, (0, 1, 2)))(*operands)
    for one, operand, want in zip(found, operands, wanted, strict=True):
      assert jax.typeof(one) == jax.typeof(operand)
      np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of_c", [P(), P("x"), P("x", "y")], ids=str)
@pytest.mark.parametrize(
    "run",
    [lambda x, w, c: jaxgemm.gemm(x, w, c, beta=2.0),
     lambda x, w, c: jaxgemm.linear(x, w, residual=c, activation="gelu"),
     lambda x, w, c: jaxgemm.mlp(x, w, w, residual=c)],
    ids=["gemm", "linear", "mlp"],
)
def test_c_may_lie_in_another_way_than_the_result(run, of_c, rng):
  mesh = make_mesh(AxisType.Explicit)
  values = [normal(rng, *shape) for shape in ((8, 8), (8, 8), (8, 8))]
  loss = lambda *x: jnp.sum(jnp.sin(run(*x)))
  wanted = jax.grad(loss, (0, 1, 2))(*values)
  with jax.set_mesh(mesh):
    specs = (P("x"), P(), of_c)
    operands = [jax.reshard(x, spec) for x, spec in zip(values, specs, strict=True)]
    found = jax.grad(loss, (0, 1, 2))(*operands)
    for one, operand, want in zip(found, operands, wanted, strict=True):
      assert jax.typeof(one) == jax.typeof(operand)
      np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5)


def test_accelerate_gathers_nothing(rng):
  """A layer under jit, its weights cut in columns, then in rows: one sum, as XLA's."""
  mesh = make_mesh(shape=(4,))
  x, up, down = (normal(rng, *s) for s in ((64, 128), (128, 256), (256, 128)))
  layer = lambda x, up, down: x + jax.nn.silu(x @ up) @ down
  cut = [P(), P(None, "x"), P("x")]
  operands = [
      jax.device_put(a, NamedSharding(mesh, spec))
      for a, spec in zip((x, up, down), cut, strict=True)
  ]
  with jaxgemm.emulate(), jax.default_matmul_precision("highest"):
    found = collectives_of(jaxgemm.accelerate(layer), *operands)
  assert found == collectives_of(layer, *operands)

"""Sharded operands: under jit on four CPU devices, on explicit meshes, in shard_map.

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

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from jaxgemm.layouts import ShardedArray, choose_layout
from pallas_kernels.problem import BlockedConfig
from tests.product_cases import normal, products


def _mesh(axis_type=AxisType.Auto, shape=(2, 2)) -> jax.sharding.Mesh:
  devices = np.array(jax.devices("cpu")[:4]).reshape(shape)
  names = ("x", "y")[: len(shape)]
  return jax.sharding.Mesh(devices, names, axis_types=(axis_type,) * len(shape))


def _collectives(function, *args, **options) -> Counter:
  """Kinds and sorted shapes of the collectives in the compiled text."""
  return collectives(jax.jit(function, **options).lower(*args).compile().as_text())


def _loss(matmul):
  return lambda a, b: jnp.sum(jnp.sin(matmul(a, b)))


MATRICES = ((64, 128), (128, 32))
BATCHES = ((4, 16, 128), (4, 128, 32))
FOLDED = ((4, 16, 128), (128, 32))
SHARED = ((16, 128), (4, 128, 32))
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
  mesh = _mesh()
  args = [
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
      for shape, spec in zip(shapes, (lhs_spec, rhs_spec), strict=True)
  ]
  theirs = _collectives(jnp.matmul, *args)
  with jaxgemm.emulate():
    lowered = jax.jit(jaxgemm.matmul).lower(*args).as_text()
    ours = _collectives(jaxgemm.matmul, *args)
  assert "CustomSPMDPartitioning" in lowered
  assert ours == theirs == Counter({("all-reduce", shape): 1 for shape in reduced})


@pytest.mark.parametrize("name", AGREEING)
def test_weights_in_8_bits(name):
  """They, the larger operand, lie as what they are converted to, and are not gathered."""
  shapes, *specs, reduced = AGREEING[name]
  mesh, dtypes = _mesh(), [jnp.bfloat16, jnp.bfloat16]
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
  theirs = _collectives(convert(jnp), *args)
  with jaxgemm.emulate():
    jaxpr = jax.make_jaxpr(convert(jaxgemm))(*values)
    (product,) = (e for e in jaxpr.eqns if e.primitive.name == "jaxgemm")
    ours = _collectives(convert(jaxgemm), *args)
    found = jax.jit(convert(jaxgemm))(*values)
  assert [x.aval.dtype.name for x in product.invars][2:] == ["int8"]
  assert ours == theirs == Counter({("all-reduce", shape): 1 for shape in reduced})
  xla, exact = jax.jit(convert(jnp))(*values), reference.matmul(*values)
  limit = 2 * reference.relative_error(xla, exact)
  assert reference.relative_error(found, exact) <= limit


@pytest.mark.parametrize("name", AGREEING)
def test_collectives_of_the_gradients(name):
  shapes, lhs_spec, rhs_spec, _ = AGREEING[name]
  mesh = _mesh()
  args = [
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
      for shape, spec in zip(shapes, (lhs_spec, rhs_spec), strict=True)
  ]
  # The loss is a sum, so that cotangents are sharded as the results are.
  options = dict(out_shardings=tuple(x.sharding for x in args))
  theirs = _collectives(jax.grad(_loss(jnp.matmul), (0, 1)), *args, **options)
  with jaxgemm.emulate():
    ours = _collectives(jax.grad(_loss(jaxgemm.matmul), (0, 1)), *args, **options)
  # XLA reduces the gradient of a folded batch in two steps; one is better.
  assert ours <= theirs
  assert not any(kind == "all-gather" for kind, _ in ours)


@pytest.mark.parametrize("name", AGREEING)
def test_values_of_sharded_products(name, rng):
  shapes, lhs_spec, rhs_spec, _ = AGREEING[name]
  mesh = _mesh()
  args = [
      jax.device_put(normal(rng, *shape), NamedSharding(mesh, spec))
      for shape, spec in zip(shapes, (lhs_spec, rhs_spec), strict=True)
  ]
  with jaxgemm.emulate():
    result = jax.jit(jaxgemm.matmul)(*args)
    ours = jax.jit(jax.grad(_loss(jaxgemm.matmul), (0, 1)))(*args)
  assert reference.relative_error(result, reference.matmul(*args)) < 1e-6
  theirs = jax.grad(_loss(jnp.matmul), (0, 1))(*map(np.asarray, args))
  for x, y in zip(ours, theirs, strict=True):
    assert reference.relative_error(x, y) < 1e-5


@pytest.mark.parametrize(
    "out_spec, scattered", [(P("x"), (32, 32)), (P(None, "x"), (16, 64))], ids=str
)
def test_a_sum_that_is_wanted_in_parts_is_scattered(out_spec, scattered, rng):
  """Half of what an all-reduce moves."""
  mesh = _mesh()
  a = jax.device_put(normal(rng, 64, 128), NamedSharding(mesh, P(None, "x")))
  b = jax.device_put(normal(rng, 128, 32), NamedSharding(mesh, P("x")))
  options = dict(out_shardings=NamedSharding(mesh, out_spec))
  with jaxgemm.emulate():
    assert _collectives(jaxgemm.matmul, a, b, **options) == Counter(
        {("reduce-scatter", scattered): 1}
    )
    result = jax.jit(jaxgemm.matmul, **options)(a, b)
  assert reference.relative_error(result, reference.matmul(a, b)) < 1e-6


def test_weights_that_are_sharded_along_k_are_gathered(rng):
  """One axis cuts the rows of lhs and the k of rhs: the smaller one moves."""
  mesh = _mesh()
  x = jax.device_put(normal(rng, 512, 128), NamedSharding(mesh, P("x")))
  w = jax.device_put(normal(rng, 128, 32), NamedSharding(mesh, P("x")))
  with jaxgemm.emulate():
    assert _collectives(jaxgemm.matmul, x, w) == Counter({("all-gather", (32, 128)): 1})
    result = jax.jit(jaxgemm.matmul)(x, w)
  assert reference.relative_error(result, reference.matmul(x, w)) < 1e-6


def test_partial_sums_travel_in_the_dtype_of_the_result(rng):
  """Also where a residual is added to their sum: float32 ones would take twice as long.

  A CPU reduces bfloat16 in float32, and says so in the name of the addition.
  """
  mesh = _mesh()
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
  mesh = _mesh()
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
  mesh = _mesh(shape=(4,))
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


# -- Explicit meshes ---------------------------------------------------------------


def _put(rng, mesh, shape, *spec):
  return jax.device_put(normal(rng, *shape), NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(
    "shapes, specs, out_spec",
    [
        (MATRICES, (("x", None), (None, "y")), None),
        (MATRICES, ((None, "x"), ("x", "y")), P(None, "y")),
        (MATRICES, (("y", "x"), ("x", None)), P("y", None)),
        (BATCHES, (("x", "y", None), ("x", None, None)), None),
        (FOLDED, (("x", "y", None), (None, None)), None),
        (SHARED, (("y", None), ("x", None, None)), None),
    ],
    ids=str,
)
def test_explicit_meshes(shapes, specs, out_spec, emulated, rng):
  """Types, values and gradients are those of lax, and its error where it has one."""
  mesh = _mesh(AxisType.Explicit)
  with jax.set_mesh(mesh):
    a, b = (_put(rng, mesh, s, *spec) for s, spec in zip(shapes, specs, strict=True))
    if out_spec is not None:
      with pytest.raises(Exception, match="Contracting dimensions are sharded"):
        jaxgemm.matmul(a, b)
    ours = lambda a, b: jaxgemm.matmul(a, b, out_sharding=out_spec)
    if shapes is SHARED:
      # jnp.matmul gives out_sharding to a dot whose result it transposes then.
      theirs = lambda a, b: jnp.matmul(a, b)
    else:
      theirs = lambda a, b: jnp.matmul(a, b, out_sharding=out_spec)
    truths = (jax.jit(theirs)(a, b), *jax.jit(jax.grad(_loss(theirs), (0, 1)))(a, b))
    with jaxgemm.emulate() if emulated else jaxgemm.target("NVIDIA H200"):
      results = (jax.jit(ours)(a, b), *jax.jit(jax.grad(_loss(ours), (0, 1)))(a, b))
      text = jax.jit(ours).lower(a, b).as_text()
  # The product's own result is annotated, not only what jit returns.
  assert "sdy.sharding_constraint" in text
  for result, truth in zip(results, truths, strict=True):
    assert jax.typeof(result) == jax.typeof(truth)
    assert reference.relative_error(result, truth) < 1e-5


def test_out_sharding_of_a_result_that_is_transposed(rng):
  mesh = _mesh(AxisType.Explicit)
  numbers = (((1,), (1,)), ((), ()))
  with jax.set_mesh(mesh):
    a = _put(rng, mesh, (2, 128), None, "x")
    b = _put(rng, mesh, (8, 128, 4), None, "x", None)
    f = lambda dot: lambda a, b: dot(a, b, numbers, out_sharding=P(None, "y", None))
    ours, theirs = (f(dot) for dot in (jaxgemm.dot_general, jax.lax.dot_general))
    (product,) = products(ours, a, b)
    assert product.dims.shared == "lhs"  # Its result is [8, 2, 4].
    for emulated in (False, True):
      with jaxgemm.emulate() if emulated else jaxgemm.target("NVIDIA H200"):
        result = jax.jit(ours)(a, b)
      assert jax.typeof(result) == jax.typeof(jax.jit(theirs)(a, b))
      assert reference.relative_error(result, jax.jit(theirs)(a, b)) < 1e-6


def test_explicit_meshes_under_vmap(rng):
  mesh = _mesh(AxisType.Explicit)
  with jax.set_mesh(mesh):
    a = _put(rng, mesh, (4, 8, 16), "x", None, None)
    b = _put(rng, mesh, (16, 8), None, None)
    f = lambda matmul: jax.jit(jax.vmap(
        lambda a, b: matmul(a, b, out_sharding=P("y", None)), (0, None)))
    ours, theirs = f(jaxgemm.matmul)(a, b), f(jnp.matmul)(a, b)
    assert jax.typeof(ours) == jax.typeof(theirs)
    assert reference.relative_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("size", [(8, 16), (8, 16, 4)], ids=str)
def test_a_batch_that_shares_an_operand(size, axis_type, emulated, rng):
  """Of vectors or matrices, over devices: one sum of the shared operand's gradient."""
  mesh = _mesh(axis_type)
  values = normal(rng, 24, 16), normal(rng, *size)
  of = lambda matmul: lambda a, x: jax.vmap(matmul, (None, 0))(a, x)
  grads = lambda matmul: jax.jit(jax.grad(_loss(of(matmul)), (0, 1)))
  wanted = grads(jnp.matmul)(*values)
  with jax.set_mesh(mesh):
    specs = P(), P("x", *[None] * (len(size) - 1))
    operands = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(values, specs, strict=True)
    ]
    with jaxgemm.emulate() if emulated else contextlib.nullcontext():
      run = grads(jaxgemm.matmul)
      found = run(*operands)
      text = run.lower(*operands).compile().as_text()
  kinds = Counter(kind for kind, _ in collectives(text).elements())
  assert kinds == {"all-reduce": 1}
  for one, want, operand in zip(found, wanted, operands, strict=True):
    assert reference.relative_error(one, want) < 1e-5
    if axis_type == AxisType.Explicit:
      assert jax.typeof(one) == jax.typeof(operand)


# -- shard_map ---------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma, jit, rng):
  """Also where only one operand varies, and with a psum over k."""
  mesh = _mesh(shape=(4,))
  a, b = normal(rng, 64, 128), normal(rng, 128, 32)
  wrap = lambda f: jax.jit(f) if jit else f

  def rows(matmul):
    return wrap(jax.shard_map(
        matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"),
        check_vma=check_vma,
    ))

  def sums(matmul):
    return wrap(jax.shard_map(
        lambda a, b: jax.lax.psum(matmul(a, b), "x"), mesh=mesh,
        in_specs=(P(None, "x"), P("x")), out_specs=P(), check_vma=check_vma,
    ))

  for f in (rows, sums):
    assert reference.relative_error(f(jaxgemm.matmul)(a, b), a @ b) < 1e-6
    ours = jax.grad(_loss(f(jaxgemm.matmul)), (0, 1))(a, b)
    theirs = jax.grad(_loss(jnp.matmul), (0, 1))(a, b)
    for x, y in zip(ours, theirs, strict=True):
      assert reference.relative_error(x, y) < 1e-5


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_runs_kernels(check_vma, rng):
  """Each device its own, forward and backward; emulated, and lowered for CUDA."""
  mesh = _mesh(shape=(4,))
  a, b = normal(rng, 64, 64), normal(rng, 64, 64)
  a, b = a.astype("bfloat16"), b.astype("bfloat16")
  matmul = lambda a, b: jaxgemm.matmul(a, b, config=BlockedConfig(64, 64, 64))
  f = jax.shard_map(
      matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma
  )
  with jaxgemm.emulate():
    result = jax.jit(f)(a, b)
  assert reference.relative_error(result, reference.matmul(a, b)) < 5e-3
  loss = lambda a, b: jnp.sum(jnp.sin(f(a, b).astype("float32")))
  with jaxgemm.target("NVIDIA H200"):
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(a, b)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
  assert len(calls) == 3 and all("jaxgemm_" in call for call in calls)
  assert "dot_general" not in text


def test_a_mesh_that_is_manual_in_part(rng):
  """XLA partitions its own dot over the other axes."""
  mesh = _mesh()
  a, b = normal(rng, 64, 128), normal(rng, 128, 32)
  f = jax.jit(jax.shard_map(
      jaxgemm.matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"),
      axis_names={"x"},
  ))
  a = jax.device_put(a, NamedSharding(mesh, P("x", "y")))
  b = jax.device_put(b, NamedSharding(mesh, P("y")))
  with jaxgemm.emulate():
    assert reference.relative_error(f(a, b), reference.matmul(a, b)) < 1e-6
    ours = jax.grad(_loss(f), (0, 1))(a, b)
  theirs = jax.grad(_loss(jnp.matmul), (0, 1))(np.asarray(a), np.asarray(b))
  for x, y in zip(ours, theirs, strict=True):
    assert reference.relative_error(x, y) < 1e-5


def test_export():
  """XLA cannot call back into this process from another; what needs it says so."""
  mesh = _mesh()
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
  for f in (jaxgemm.matmul, jax.grad(_loss(jaxgemm.matmul), (0, 1))):
    text = jax.jit(f).lower(a, b).compile().as_text()
    assert "mosaic_gpu" in text and "all-gather" not in text
  result = jax.jit(jaxgemm.matmul)(a, b)
  assert reference.relative_error(result, reference.matmul(a, b)) < 5e-3


@pytest.mark.parametrize(("of_w", "of_bias"), [(P(None, "y"), P()), (P(), P("y"))])
@pytest.mark.parametrize("emulated", [False, True])
def test_a_bias_may_lie_in_another_way_than_columns(emulated, of_w, of_bias, rng):
  mesh = _mesh(AxisType.Explicit)
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
  mesh = _mesh(AxisType.Explicit)
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


@pytest.mark.parametrize("multiply", [jnp.matmul, jaxgemm.matmul])
def test_accelerate_keeps_types_on_explicit_meshes(multiply, rng):
  """And values: what lies in another way is not fused, nor XLA's products ours."""
  mesh = _mesh(AxisType.Explicit)
  with jax.set_mesh(mesh):
    w = jax.device_put(normal(rng, 64, 64), NamedSharding(mesh, P()))
    r = jax.device_put(normal(rng, 64, 64), NamedSharding(mesh, P(None, "x")))
    function = lambda w, r: multiply(w, w) + r
    accelerated = jaxgemm.accelerate(function)
    found, wanted = (jax.jit(f).eval_shape(w, r) for f in (accelerated, function))
    assert found.sharding == wanted.sharding
    with jax.default_matmul_precision("highest"):
      found, wanted = (jax.jit(f)(w, r) for f in (accelerated, function))
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_accelerate_gathers_nothing(rng):
  """A layer under jit, its weights cut in columns, then in rows: one sum, as XLA's."""
  mesh = _mesh(shape=(4,))
  x, up, down = (normal(rng, *s) for s in ((64, 128), (128, 256), (256, 128)))
  layer = lambda x, up, down: x + jax.nn.silu(x @ up) @ down
  cut = [P(), P(None, "x"), P("x")]
  operands = [
      jax.device_put(a, NamedSharding(mesh, spec))
      for a, spec in zip((x, up, down), cut, strict=True)
  ]
  with jaxgemm.emulate(), jax.default_matmul_precision("highest"):
    found = _collectives(jaxgemm.accelerate(layer), *operands)
  assert found == _collectives(layer, *operands)

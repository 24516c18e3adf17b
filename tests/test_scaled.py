"""Quantisation, and products of 8-bit operands with scales."""

from __future__ import annotations

from collections import Counter
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from jaxgemm.recording import recording
from tests.kernel_cases import LAYOUTS
from tests.product_cases import cuda_kernels, equations
from tests.scaled_cases import E4M3, E5M2, normal, of, wide

BLOCKS = {
    "tensor": ((-1, -1), (-1, -1)),
    "rows": ((1, -1), (-1, 1)),
    "blocks": ((128, 128), (128, 128)),
    "fine": ((1, 128), (128, 128)),
}


def quantised(x, block) -> tuple[jax.Array, jax.Array]:
  return jaxgemm.quantise(x, block=block)


# -- Quantisation ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("block", "shape"),
    [((-1, -1), (2, 1, 1)), ((1, -1), (2, 200, 1)), ((-1, 1), (2, 1, 300)),
     ((1, 128), (2, 200, 3)), ((128, 128), (2, 2, 3))],
)
def test_quantise(block, shape, dtype, rng):
  x = normal(rng, 2, 200, 300) * 1e4
  values, scale = jaxgemm.quantise(x, dtype, block=block)
  assert values.dtype == dtype and scale.dtype == jnp.float32 and scale.shape == shape
  step = float(jnp.finfo(dtype).eps) / 2
  largest = float(jnp.finfo(dtype).max)
  assert float(jnp.abs(values.astype(jnp.float32)).max()) == largest
  bound = step * np.abs(wide(x)) * 1.0001 + np.max(wide(scale)) * 2.0**-9
  assert np.all(np.abs(of(values, np.asarray(scale)) - wide(x)) <= bound)
  np.testing.assert_allclose(
      jaxgemm.dequantise(values, scale), of(values, np.asarray(scale)), rtol=1e-6
  )


def test_quantise_zeros():
  values, scale = jaxgemm.quantise(jnp.zeros((4, 4)), block=(1, -1))
  assert not np.any(wide(values)) and np.all(np.asarray(scale) == 1.0)


# -- scaled_matmul -----------------------------------------------------------------


@pytest.mark.parametrize(
    "emulated", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", BLOCKS)
def test_scaled_matmul(kind, emulated, rng):
  x, w = normal(rng, 2, 70, 300), normal(rng, 300, 200)
  (q, s), (r, u) = map(quantised, (x, w), BLOCKS[kind])
  truth = of(q, np.asarray(s)) @ of(r, np.asarray(u))
  call = lambda **fields: jax.jit(
      lambda *a: jaxgemm.scaled_matmul(*a, preferred_element_type=jnp.float32, **fields)
  )(q, r, s, u)
  if emulated:
    with jaxgemm.emulate():
      out = call(implementation="persistent")
  else:
    out = call()
  assert out.shape == (2, 70, 200) and out.dtype == jnp.float32
  assert reference.relative_error(out, truth) < 6e-7
  assert reference.relative_error(out, wide(x) @ wide(w)) < 0.05


def test_every_matrix_of_a_batch_has_its_scales(rng):
  x, w = normal(rng, 3, 40, 260), normal(rng, 3, 260, 72)
  (q, s), (r, u) = jaxgemm.quantise(x, block=(1, 128)), jaxgemm.quantise(w, E5M2)
  truth = of(q, np.asarray(s)) @ of(r, np.asarray(u))
  call = lambda *a: jaxgemm.scaled_matmul(*a, preferred_element_type=jnp.float32)
  assert reference.relative_error(call(q, r, s, u), truth) < 3e-7
  assert reference.relative_error(jax.vmap(call)(q, r, s, u), truth) < 3e-7
  shared = jax.vmap(call, in_axes=(0, None, 0, None))(q, r[0], s, u[0])
  truth = of(q, np.asarray(s)) @ of(r[0], np.asarray(u[0]))
  assert reference.relative_error(shared, truth) < 3e-7


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_transposed_operands_are_transposed_once(layouts, rng):
  """What a user transposes and what wgmma wants cancel out."""
  lhs, rhs = (512, 384), (384, 256)
  shapes = [
      shape[::-1] if layout == "T" else shape
      for shape, layout in zip((lhs, rhs), layouts, strict=True)
  ]

  def f(a, b):
    a, b = (a.T if layouts[0] == "T" else a), (b.T if layouts[1] == "T" else b)
    return jaxgemm.scaled_matmul(a, b, implementation="persistent")

  types = [jax.ShapeDtypeStruct(shape, E4M3) for shape in shapes]
  with jaxgemm.target("NVIDIA H200"):
    text = jax.export.export(jax.jit(f), platforms=["cuda"])(*types).mlir_module()
  assert "jaxgemm_persistent" in text
  wanted = (layouts[0] == "T") + (layouts[1] == "T") + 1  # rhs is wanted [n, k].
  assert text.count("stablehlo.transpose") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("cotangent_dtype", [None, E5M2])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_pass_straight_through(batch, kind, cotangent_dtype, rng):
  x, w, ct = normal(rng, *batch, 150, 300), normal(rng, 300, 200), normal(
      rng, *batch, 150, 200
  )
  scales = [quantised(a, block)[1] for a, block in zip((x, w), BLOCKS[kind], strict=True)]

  def f(x, w):
    return jaxgemm.scaled_matmul(
        x, w, *scales, preferred_element_type=jnp.float32,
        cotangent_dtype=cotangent_dtype,
    )

  out, pull = jax.vjp(f, x, w)
  grads = pull(ct)
  truths = (
      wide(ct) @ wide(w).T,
      wide(x).reshape(-1, 300).T @ wide(ct).reshape(-1, 200),
  )
  assert reference.relative_error(out, wide(x) @ wide(w)) < 0.05
  for grad, truth, operand in zip(grads, truths, (x, w), strict=True):
    assert grad.shape == operand.shape and grad.dtype == operand.dtype
    error = reference.relative_error(grad, truth)
    assert error < (0.04 if cotangent_dtype is None else 0.09)
    if cotangent_dtype is not None:
      assert error > 0.04  # e5m2 has two bits.


def test_gradients_of_a_batch_of_rhs_and_of_8_bit_values(rng):
  x, w, ct = normal(rng, 2, 40, 260), normal(rng, 2, 260, 72), normal(rng, 2, 40, 72)
  (_, s), (r, u) = jaxgemm.quantise(x), jaxgemm.quantise(w, block=(128, 128))
  for cotangent_dtype, bound in ((None, 1e-2), (E5M2, 0.08)):
    out, pull = jax.vjp(
        lambda x, r: jaxgemm.scaled_matmul(
            x, r, s, u, preferred_element_type=jnp.float32,
            cotangent_dtype=cotangent_dtype,
        ), x, r,
    )
    dx, dr = pull(ct)
    truth = wide(ct) @ of(r, np.asarray(u)).swapaxes(1, 2)
    assert reference.relative_error(dx, truth) < bound
    assert dr.dtype == r.dtype and np.isfinite(wide(dr)).all()


# -- matmul of 8-bit operands ------------------------------------------------------


def test_matmul_of_int8(rng):
  shapes = (70, 300), (300, 200)
  a, b = (jnp.asarray(rng.integers(-128, 128, s), jnp.int8) for s in shapes)
  truth = np.asarray(a).astype(np.int64) @ np.asarray(b).astype(np.int64)
  f = lambda **fields: jaxgemm.matmul(a, b, preferred_element_type=jnp.int32, **fields)
  np.testing.assert_array_equal(f(), truth)
  with jaxgemm.emulate():
    np.testing.assert_array_equal(f(implementation="persistent"), truth)
  np.testing.assert_array_equal(jaxgemm.matmul(a, b), jnp.matmul(a, b))


def test_matmul_of_float8_and_its_gradients(rng):
  x, w = (normal(rng, *shape).astype(E4M3) for shape in ((70, 300), (300, 200)))
  sums = {
      name: jax.value_and_grad(
          lambda *a, f=f: f(*a, preferred_element_type=jnp.float32).sum(), (0, 1)
      )(x, w)
      for name, f in (("ours", jaxgemm.matmul), ("jax", jnp.matmul))
  }
  (ours, our_grads), (theirs, their_grads) = sums["ours"], sums["jax"]
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)
  for grad, other in zip(our_grads, their_grads, strict=True):
    assert grad.dtype == other.dtype
    np.testing.assert_array_equal(wide(grad), wide(other))
  with pytest.raises(ValueError, match="precision"):
    jaxgemm.matmul(x, w, precision="highest", implementation="persistent",
                   preferred_element_type=jnp.float32)


@pytest.mark.parametrize("cotangent_dtype", [None, E5M2])
@pytest.mark.parametrize(
    "blocks",
    [((1, 128), (-1, 1)), ((128, 128), (128, 1)), ((-1, -1), (128, 1)),
     ((1, -1), (128, 128)), ((128, 128), (-1, -1))],
    ids=str,
)
def test_gradients_of_mixed_scales(blocks, cotangent_dtype, rng):
  """A scale of each column of rhs lies along what its gradient's product sums."""
  x, w, ct = normal(rng, 130, 140), normal(rng, 140, 130), normal(rng, 130, 130)
  (_, x_scale), (_, w_scale) = map(quantised, (x, w), blocks)

  def loss(x, w):
    out = jaxgemm.scaled_matmul(
        x, w, x_scale, w_scale, preferred_element_type=jnp.float32,
        cotangent_dtype=cotangent_dtype,
    )
    return jnp.sum(out * ct)

  for found, wanted in zip(
      jax.grad(loss, (0, 1))(x, w), (ct @ w.T, x.T @ ct), strict=True
  ):
    assert reference.relative_error(found, wanted) < 0.08


@pytest.mark.parametrize("cotangent_dtype", [None, E5M2])
@pytest.mark.parametrize("m, n, k", [(2, 3, 0), (0, 3, 4), (2, 0, 4)])
def test_empty_products(m, n, k, cotangent_dtype):
  x, w = jnp.ones((m, k)), jnp.ones((k, n))
  run = lambda x, w: jaxgemm.scaled_matmul(
      x, w, preferred_element_type=jnp.float32, cotangent_dtype=cotangent_dtype
  )
  np.testing.assert_array_equal(run(x, w), np.zeros((m, n)))
  grads = jax.grad(lambda *x: run(*x).sum(), (0, 1))(x, w)
  for found, operand in zip(grads, (x, w), strict=True):
    np.testing.assert_array_equal(found, np.zeros(operand.shape))


@pytest.mark.slow
def test_data_parallel_gradients(rng):
  """Of shards, and of operands that lie so on a mesh with explicit axes."""
  devices = np.array(jax.devices("cpu")[:4])
  x, w = normal(rng, 8, 128), normal(rng, 128, 16)

  def loss(x, w):
    out = jaxgemm.scaled_matmul(x, w, preferred_element_type=jnp.float32)
    return jnp.sum(out**2)

  wanted = jax.grad(loss, (0, 1))(x, w)
  mesh = jax.sharding.Mesh(devices, ("i",))
  rows, whole = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()
  shared = jax.shard_map(
      lambda x, w: jax.lax.psum(loss(x, w), "i"), mesh=mesh, in_specs=(rows, whole),
      out_specs=whole,
  )
  explicit = jax.sharding.Mesh(
      devices, ("i",), axis_types=(jax.sharding.AxisType.Explicit,)
  )
  with jax.set_mesh(explicit):
    lying = jax.grad(loss, (0, 1))(jax.reshard(x, rows), jax.reshard(w, whole))
  for found in (jax.grad(shared, (0, 1))(x, w), lying):
    for one, want in zip(found, wanted, strict=True):
      np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-3)


def test_batch_invariance_is_kept():
  x, w = jnp.ones((4, 128)), jnp.ones((128, 8))
  with jaxgemm.batch_invariant():
    with pytest.raises(ValueError, match="batch_invariant: no kernel serves"):
      jaxgemm.scaled_matmul(x, w)
    with jaxgemm.target("NVIDIA H200"):
      run = jax.jit(jaxgemm.scaled_matmul)
      text = jax.export.export(run, platforms=["cuda"])(x, w).mlir_module()
  assert "jaxgemm_persistent" in text


def test_gradients_are_planned_as_the_call():
  """Whatever is set where they are traced; but a sum over all rows may be split."""
  x, w = jnp.ones((64, 128)), jnp.ones((128, 256))
  for cotangent_dtype in (None, E5M2):
    run = functools.partial(jaxgemm.scaled_matmul, cotangent_dtype=cotangent_dtype)
    gradients = lambda x, w, ct, run=run: jax.vjp(run, x, w)[1](ct)
    with jaxgemm.target("NVIDIA H200"), jaxgemm.batch_invariant():
      found = jax.make_jaxpr(gradients)(x, w, jnp.ones((64, 256), "bfloat16")).jaxpr
    names = ("jaxgemm", "jaxgemm_scaled")
    ours = [eqn for eqn in equations(found) if eqn.primitive.name in names]
    facts = [eqn.params.get("product", eqn.params.get("facts")) for eqn in ours]
    assert [each.batch_invariant for each in facts] == [True, True, False]
    assert all(each.target is not None for each in facts)


@pytest.mark.parametrize("cotangent_dtype", [None, E5M2])
def test_an_implementation_of_xla_holds_for_gradients(cotangent_dtype):
  run = functools.partial(
      jaxgemm.scaled_matmul, cotangent_dtype=cotangent_dtype, implementation="xla"
  )
  loss = lambda *x: run(*x).astype("float32").sum()
  operands = jnp.ones((64, 128)), jnp.ones((128, 256))
  assert cuda_kernels(jax.grad(loss, (0, 1)), *operands) == {"xla": 2}


def exact(values, scale) -> np.ndarray:
  return wide(jaxgemm.dequantise(values, scale))


@pytest.mark.parametrize("kind", BLOCKS)
def test_vmap_is_one_product(kind, rng):
  """And explain counts what is run."""
  x, w = normal(rng, 3, 64, 256), normal(rng, 256, 128)
  x, of_x = quantised(x, BLOCKS[kind][0])
  w, of_w = quantised(w, BLOCKS[kind][1])
  run = lambda x, s: jaxgemm.scaled_matmul(x, w, s, of_w)
  found = jax.vmap(run)(x, of_x)
  assert reference.relative_error(found, exact(x, of_x) @ exact(w, of_w)) < 3.4e-3
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(jax.vmap(run)).trace(x, of_x).lower(lowering_platforms=("cuda",))
  ((plan, count),) = record.plans.items()
  assert count == 1 and plan.kernel == "persistent"
  assert (plan.problem.batch, plan.problem.m) == (1, 3 * 64)  # Of one rhs.
  several = jnp.stack([w, w, -w])
  found = jax.vmap(lambda x, s, w: jaxgemm.scaled_matmul(x, w, s, of_w))(x, of_x, several)
  wanted = exact(x, of_x) @ (exact(w, of_w) * np.array([1, 1, -1])[:, None, None])
  assert reference.relative_error(found, wanted) < 3.4e-3


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_vmap_over_a_sharded_axis(kind, rng):
  """Of a mesh with explicit axes: each device has its own, and all of rhs."""
  mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
  x, of_x = quantised(normal(rng, 4, 8, 256), BLOCKS[kind][0])
  w, of_w = quantised(normal(rng, 256, 128), BLOCKS[kind][1])
  run = jax.vmap(jaxgemm.scaled_matmul, (0, None, 0, None))
  with jax.set_mesh(mesh):
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    operands = put(x, "x"), put(w, None), put(of_x, "x"), put(of_w, None)
    out = jax.jit(run)(*operands)
  assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 3)
  assert reference.relative_error(out, exact(x, of_x) @ exact(w, of_w)) < 3.4e-3


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_symbolic_sizes_are_left_to_xla(platform, rng):
  scope = jax.export.SymbolicScope()
  rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("m,128", scope=scope), E4M3)
  w, scale = quantised(normal(rng, 128, 64), (-1, 1))
  run = lambda x: jaxgemm.scaled_matmul(
      x, w, 2.0, scale, preferred_element_type="float32"
  )
  with jaxgemm.target("NVIDIA H200"):
    exported = jax.export.export(jax.jit(run), platforms=[platform])(rows)
  if platform == "cpu":
    x = normal(rng, 5, 128).astype(E4M3)
    np.testing.assert_allclose(
        exported.call(x), 2 * wide(x) @ exact(w, scale), rtol=1e-5, atol=1e-4
    )


SHARDS = {
    # Of lhs and rhs, and the collectives, none of them of an operand.
    "rows": (P("x"), P(), {}),
    "columns": (P(), P(None, "x"), {}),
    "rows and columns": (P("x"), P(None, "y"), {}),
    "sums": (P(None, "x"), P("x"), {"all-reduce": 1}),
}


@pytest.mark.parametrize("kind", ["rows", "blocks", "fine"])
@pytest.mark.parametrize("name", SHARDS)
def test_shards_are_products_of_their_own(name, kind, rng):
  *specs, wanted = SHARDS[name]
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  x, of_x = quantised(normal(rng, 128, 512), BLOCKS[kind][0])
  w, of_w = quantised(normal(rng, 512, 512), BLOCKS[kind][1])
  run = jax.jit(functools.partial(
      jaxgemm.scaled_matmul, preferred_element_type="float32"
  ))
  with jaxgemm.emulate():
    operands = put(x, specs[0]), put(w, specs[1]), put(of_x, P()), put(of_w, P())
    text = run.lower(*operands).compile().as_text()
    assert Counter(kind for kind, _ in collectives(text).elements()) == wanted
    found = run(*operands)
  assert reference.relative_error(found, exact(x, of_x) @ exact(w, of_w)) < 1e-5


def test_blocks_are_not_cut(rng):
  """Of 192 columns a half has one and a half."""
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
  x, of_x = quantised(normal(rng, 128, 192), BLOCKS["fine"][0])
  w, of_w = quantised(normal(rng, 192, 192), BLOCKS["fine"][1])
  for specs in ((P(), P(None, "x")), (P(None, "x"), P("x"))):
    operands = [
        jax.device_put(each, NamedSharding(mesh, spec))
        for each, spec in zip((x, w, of_x, of_w), (*specs, P(), P()), strict=True)
    ]
    with jaxgemm.emulate():
      found = jax.jit(jaxgemm.scaled_matmul)(*operands)
    assert reference.relative_error(found, exact(x, of_x) @ exact(w, of_w)) < 3.4e-3

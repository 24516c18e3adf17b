"""Layers whose kernels normalise their rows: each thread, the kernels, plans, layers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxgemm
from jaxgemm import operand_passes, plan
from jaxgemm.device import known_device
from pallas_kernels import norm_registers, norms, persistent
from pallas_kernels.problem import Epilogue
from tests import gpu_cases, kernel_cases
from tests.kernel_cases import check, lowered, make_problem, small_config
from tests.product_cases import assert_as_good, count_primitives, in_float64, normal

H200 = known_device("NVIDIA H200")
FIELDS = dict(tile_m=64, tile_n=64, consumers=1)
SHARING_K = FIELDS | dict(consumers=2, wg_dim="k")
FUSED = Epilogue(beta=1.0, c_dtype="bfloat16", has_bias=True)
GATED = Epilogue(gated=True, activation="silu")


def problem(m, n, k, layouts="NN", **fields):
  return make_problem(m, n, k, layouts, **(dict(norm_eps=1e-2) | fields))


# -- Threads -----------------------------------------------------------------------


def test_threads_name_each_unit_once(monkeypatch):
  """Of a slot as TMA swizzles it: 16 bytes by the row's place among eight.

  ldmatrix gives the matrices in the order in which wgmma has its registers.
  """
  kernel_cases.compute_in_integers(monkeypatch, norm_registers)
  for thread in range(128):
    row, turned = norm_registers.unit_of(thread)
    warp, matrix, within = thread // 32, thread % 32 // 8, thread % 8
    assert row == 128 * (16 * warp + 8 * (matrix % 2) + within)
    for step in range(4):
      unit = 2 * step + matrix // 2
      assert (turned ^ step << 5) // 16 == unit ^ within


# -- Kernels -----------------------------------------------------------------------

# (m, n, k, slots, fields): one tile of k, several tiles a CTA, several k tiles at once,
# those of an odd number in turn.
SIZES = (
    (1, 64, 64, 2, {}),
    (70, 200, 200, 4, {}),
    (5, 100, 328, 8, dict(out_dtype="float16")),
    (33, 520, 576, 10, dict(epilogue=FUSED)),
    (40, 136, 448, 4, dict(out_dtype="float32")),
)


@pytest.mark.parametrize("layouts", ["NN", "NT"])
@pytest.mark.parametrize("sharing", [FIELDS, SHARING_K], ids=["one", "two"])
def test_values(layouts, sharing):
  for m, n, k, slots, fields in SIZES:
    promote = 2 * (fields.get("out_dtype") == "float32")
    config = small_config("persistent", **sharing, num_stages=slots, promote=promote)
    check("persistent", problem(m, n, k, layouts, **fields), config, num_sms=2)


def test_lowers_for_cuda():
  for m, epilogue, fields in (
      (8, Epilogue(), SHARING_K), (64, GATED, FIELDS | dict(tile_n=256)),
  ):
    config = small_config("persistent", **fields, num_stages=4)
    text = lowered("persistent", problem(m, 512, 264, epilogue=epilogue), config)
    assert "ldmatrix" in text and "mul.rn.bf16x2" in text


@pytest.mark.parametrize(
    ("changes", "fields", "reason"),
    [
        ({}, dict(swap=True), "swap=True: norm takes False"),
        ({}, dict(consumers=2, tile_m=128), "consumers=2: norm takes 1"),
        ({}, dict(wg_dim="k"), "consumers=1: norm takes 2"),
        ({}, SHARING_K | dict(num_stages=5), "each consumer has half"),
        ({}, SHARING_K | dict(tile_n=40), "tile_n=40: with wg_dim='k' a multiple of 32"),
        (dict(norm_eps=None), SHARING_K, "wg_dim='k': consumers share out k where they"),
        ({}, dict(cluster_n=2), "cluster_n=2: norm takes 1"),
        (dict(lhs_layout="m-major"), {}, "norm: lhs is one array [m, k]"),
        (dict(batch=2), {}, "norm: lhs is one array [m, k]"),
        (dict(dtype="float16", algorithm="f16_f32"), {}, "operands are bfloat16, not"),
        (dict(k=2**17), {}, "norm: the weights of k=131072 do not fit"),
        (dict(epilogue=Epilogue(slopes=1, c_dtype="bfloat16")), {}, "norm excludes"),
        (dict(k=2**16), dict(num_stages=8), "bytes of shared memory exceed"),
    ],
)
def test_what_is_not_served(changes, fields, reason):
  config = small_config("persistent", **(FIELDS | dict(num_stages=4) | fields))
  refused = dataclasses.replace(problem(8, 64, 128), **changes)
  assert reason in (persistent.supports(refused, config) or "it is")


@pytest.mark.parametrize("kernel", sorted(set(kernel_cases.KERNELS) - {"persistent"}))
def test_no_other_kernel_normalises(kernel):
  module = kernel_cases.KERNELS[kernel]
  reason = module.supports(problem(1, 128, 512), module.Config())
  assert reason == "norm: only persistent normalises lhs"


@pytest.mark.gpu
def test_values_on_the_chip():
  for m, n, k, slots, fields in (
      *SIZES, (100, 1000, 4096, 10, {}), (16, 512, 5000, 10, dict(epilogue=FUSED)),
  ):
    for layouts, sharing in (("NN", FIELDS), ("NT", FIELDS), ("NN", SHARING_K)):
      config = small_config("persistent", **sharing, num_stages=slots)
      gpu_cases.check("persistent", problem(m, n, k, layouts, **fields), config)


# -- Plans -------------------------------------------------------------------------


def test_a_pass_over_weights_counts():
  """Of a k that is no whole number of rows in shared memory."""
  config = small_config("persistent", **FIELDS, num_stages=4)
  for k, found in ((4096, ()), (4104, (("padding", "the norm's weights", 16416),))):
    assert operand_passes.passes(problem(8, 64, k), config) == found
    assert norms.prepare(jnp.ones(k))[norms.WEIGHTS].size == k + 248 * len(found)


def test_what_a_kernel_normalises():
  """Few rows, and not where others read rhs faster."""
  for m, n, k, epilogue, normalises in (
      (1, 14336, 4096, GATED, True), (64, 14336, 4096, GATED, True),
      (8, 6144, 4096, Epilogue(), True), (64, 6144, 4096, Epilogue(), True),
      (1, 512, 14336, Epilogue(), False),
  ):
    found = plan.normed(problem(m, n, k, epilogue=epilogue), H200)
    assert (found is not None) == normalises, (m, n, k)
    assert found is None or found.kernel == "persistent"
  of_floats = problem(8, 6144, 4096, out_dtype="float32")
  assert plan.normed(of_floats, H200).config.promote > 0
  for elsewhere in (None, known_device("NVIDIA A100-SXM4-80GB")):
    assert plan.normed(problem(1, 14336, 4096, epilogue=GATED), elsewhere) is None


# -- Layers ------------------------------------------------------------------------


def operands(rng, dtype="bfloat16", batch=(2, 3), k=128, n=128):
  shapes = dict(
      x=(*batch, k), weights=(k,), w=(k, n), u=(k, n), down=(n, k), bias=(n,),
      residual=(*batch, k),
  )
  return {name: jnp.asarray(normal(rng, *shape), dtype) for name, shape in shapes.items()}


def norm_of(v):
  return jaxgemm.RMSNorm(v["weights"], 1e-2)


LAYERS = {
    "linear": lambda v, x, **o: jaxgemm.linear(
        x, v["w"], v["bias"], activation="gelu", scale=0.5, **o
    ),
    "added": lambda v, x, **o: jaxgemm.linear(
        x, v["w"], v["bias"], residual=v["residual"], **o
    ),
    "scaled": lambda v, x, **o: jaxgemm.linear(x, v["w"], scale=v["bias"][:1], **o),
    "transposed": lambda v, x, **o: jaxgemm.linear(x, v["w"].T, transposed=True, **o),
    "gated": lambda v, x, **o: jaxgemm.gated_linear(x, v["w"], v["u"], **o),
    "packed": lambda v, x, **o: jaxgemm.gated_linear(
        x, jnp.concatenate([v["w"], v["u"]], 1), **o
    ),
    "mlp": lambda v, x, **o: jaxgemm.mlp(
        x, v["w"], v["down"], v["bias"], residual=v["residual"], **o
    ),
    "gated_mlp": lambda v, x, **o: jaxgemm.gated_mlp(
        x, v["w"], v["u"], v["down"], residual=v["residual"], **o
    ),
}


def both(name, v):
  """The layer of a norm, and of what is normalised."""
  layer, norm = LAYERS[name], norm_of(v)
  return layer(v, v["x"], norm=norm), layer(v, norm(v["x"]))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_normalised_rows(name, rng):
  for dtype, batch in (
      ("bfloat16", (2, 3)), ("bfloat16", (65,)), ("float16", (4,)), ("float32", (4,)),
  ):
    v = operands(rng, dtype, batch)
    found, wanted = both(name, v)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == wanted.dtype
    counts = count_primitives(lambda v: both(name, v)[0], v)
    # A factor that is an array multiplies normalised rows.
    may = dtype == "bfloat16" and batch == (2, 3) and name != "scaled"
    assert counts["jaxgemm_normed"] == may


@pytest.mark.parametrize("name", ["linear", "gated", "mlp", "gated_mlp"])
def test_a_pass_before_rows_are_widened(name, rng):
  """x of bfloat16 is normalised as such, then multiplied in float32."""
  v = operands(rng)
  v |= {key: v[key].astype("float32") for key in ("w", "u", "down")}
  found, wanted = both(name, v)
  np.testing.assert_array_equal(found, wanted)
  assert found.dtype == "float32"
  assert not count_primitives(lambda v: both(name, v)[0], v)["jaxgemm_normed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["added", "gated", "packed"])
def test_the_kernels_layers(name, rng):
  """Of weights that the memory bounds, so that kernels normalise."""
  v = operands(rng, k=1024 if name == "added" else 256, n=6144)
  v["residual"] = jnp.asarray(normal(rng, 2, 3, 6144), "bfloat16")
  run = lambda v: LAYERS[name](v, v["x"], norm=norm_of(v))
  with jaxgemm.emulate():
    found = run(v)
    (planned,) = jaxgemm.explain(run, v)
  assert "lhs normalised" in str(planned.problem)
  after = lambda v: both(name, v)[1]
  assert_as_good(found, after(v), in_float64(after, v))


@pytest.mark.parametrize("name", ["linear", "gated", "mlp", "gated_mlp"])
def test_derivatives(name, rng):
  """Those of normalised rows, backward and forward."""
  v, dots = operands(rng), operands(rng)

  def gradients(v, i):
    def loss(v):
      out = both(name, v)[i]
      return jnp.sum(jnp.square(out.astype(jnp.promote_types(out.dtype, "float32"))))

    return jax.grad(loss)(v)

  def tangent(v, dots, i):
    return jax.jvp(lambda v: both(name, v)[i], (v,), (dots,))[1]

  for function, of in ((gradients, (v,)), (tangent, (v, dots))):
    ours, theirs = (functools.partial(function, i=i) for i in range(2))
    assert_as_good(ours(*of), theirs(*of), in_float64(theirs, *of))


@pytest.mark.parametrize(
    "mapped", [("x",), ("x", "residual"), ("x", "weights"), ("w",)], ids=str
)
def test_vmap(mapped, rng):
  """Rows that are mapped alone are rows of one product, also more than a kernel takes."""
  for size in (3, 20):
    v = operands(rng, batch=(5,))
    many = {name: jnp.stack([v[name] + i for i in range(size)]) for name in mapped}
    for name in ("linear", "gated", "added"):
      run = lambda some, name=name, v=v: both(name, v | some)
      after = lambda many, v, name=name: jax.vmap(
          lambda some: both(name, v | some)[1]
      )(many)
      found, wanted = jax.vmap(run)(many)
      assert_as_good(found, wanted, in_float64(after, many, v))
      counts = count_primitives(jax.vmap(lambda some, run=run: run(some)[0]), many)
      within = mapped[0] == "x" and "weights" not in mapped and size * 5 <= 64
      assert counts["jaxgemm_normed"] == int(within)


def test_a_pass_where_bits_must_not_depend_on_other_rows(rng):
  v = operands(rng)
  with jaxgemm.batch_invariant():
    counts = count_primitives(lambda v: both("linear", v)[0], v)
  assert not counts["jaxgemm_normed"]


def test_shards(rng):
  """Over several devices a pass normalises, and nothing is gathered."""
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("d",))
  v = operands(rng, batch=(4, 2))
  after = lambda v: both("linear", v)[1]
  wanted, truth = after(v), in_float64(after, v)
  specs = dict(w=P(None, "d"), bias=P("d"))
  v = {
      name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
      for name, x in v.items()
  }
  with jaxgemm.emulate():
    compiled = jax.jit(lambda v: both("linear", v)[0]).lower(v).compile()
  assert "all-gather" not in compiled.as_text()
  assert_as_good(compiled(v), wanted, truth)


def test_in_a_shard_map(rng):
  """Each device's product of its own columns; the norm's weights are all devices'."""
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
  v = operands(rng)
  run = jax.shard_map(
      lambda x, w, weights: jaxgemm.linear(x, w, norm=jaxgemm.RMSNorm(weights, 1e-2)),
      mesh=mesh, in_specs=(P(), P(None, "d"), P()), out_specs=P(None, None, "d"),
  )
  of = [v[name] for name in ("x", "w", "weights")]
  wanted = lambda x, w, weights: jaxgemm.linear(jaxgemm.RMSNorm(weights, 1e-2)(x), w)
  np.testing.assert_array_equal(jax.jit(run)(*of), wanted(*of))

  def gradients(f, *of):
    wide = lambda out: out.astype(jnp.promote_types(out.dtype, "float32"))
    return jax.grad(lambda *of: wide(f(*of)).sum(), (0, 1, 2))(*of)

  truth = in_float64(functools.partial(gradients, wanted), *of)
  assert_as_good(gradients(jax.jit(run), *of), gradients(wanted, *of), truth)


@pytest.mark.parametrize("name", ["linear", "gated", "gated_mlp"])
def test_explicit_axes(name, rng):
  """The result lies as that of normalised rows."""
  v = operands(rng, batch=(4, 2))
  after = lambda v: both(name, v)[1]
  wanted, truth = after(v), in_float64(after, v)
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
  with jax.set_mesh(mesh):
    rows = {"x", "residual"}
    v = {key: jax.device_put(x, P("d" if key in rows else None)) for key, x in v.items()}
    found, other = jax.jit(lambda v: both(name, v))(v)
  assert found.sharding.spec == other.sharding.spec == P("d", None, None)
  assert_as_good(found, wanted, truth)


def test_a_pass_where_a_product_leaves_the_range(rng):
  """Of a float16 times a weight; a row of it is brought back by its factor."""
  v = operands(rng, "float16") | dict(bias=jnp.zeros(128, "float16"))
  v["x"], v["weights"] = v["x"] * 1e4, v["weights"] * 10
  with jaxgemm.emulate():
    found = both("linear", v)[0]
  assert np.isfinite(found).all()


def test_a_norm_is_a_pytree_and_a_function(rng):
  v = operands(rng)
  norm = norm_of(v)
  assert jax.tree.leaves(norm)[0] is norm.weights and len(jax.tree.leaves(norm)) == 1
  found = jax.jit(lambda norm, x: norm(x))(norm, v["x"])
  x, weights = (np.asarray(v[name], np.float64) for name in ("x", "weights"))
  truth = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-2) * weights
  assert found.dtype == v["x"].dtype
  assert_as_good(found, jnp.asarray(truth, found.dtype), truth)  # Rounded once, as here.
  grads = jax.grad(lambda norm: norm(v["x"]).astype("float32").sum())(norm)
  assert grads.weights.shape == norm.weights.shape


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 64])
def test_layers_on_the_chip(m, rng):
  v = operands(rng, batch=(m,), k=1024, n=4096)
  for name in ("linear", "gated", "packed", "gated_mlp"):
    found, unfused = jax.jit(lambda v, name=name: both(name, v))(v)
    truth = in_float64(lambda v, name=name: both(name, v)[1], v)
    assert_as_good(found, unfused, truth)

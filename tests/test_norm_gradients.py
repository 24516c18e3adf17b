"""The pass behind a layer of normalised rows, and what layers make of a residual."""

from __future__ import annotations

import functools

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
import numpy as np
import pytest

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from jaxgemm.device import current_device
from jaxgemm.layouts import ShardedArray
from pallas_kernels import compat
from pallas_kernels import norm_gradients as kernel
from pallas_kernels.norm_gradients import NormGradients
from tests.product_cases import assert_as_good, count_primitives, in_float64, normal

EPS = 1e-2


def normalised(x, weights):
  return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * weights


def truth_of(x, weights, dy, plus):
  """dx and dw in float64."""
  with jax.enable_x64(True):
    x, weights, dy, plus = (
        jnp.asarray(np.asarray(v, np.float64)) for v in (x, weights, dy, plus)
    )
    dx, dw = jax.vjp(normalised, x, weights)[1](dy)
    return np.asarray(dx + plus), np.asarray(dw)


def check(facts, run, weights_dtype="bfloat16"):
  """At most twice the rounding of dx, and the error of XLA's dw in float32, or 1e-7."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), facts.dtype)
  x, dy, plus = (draw(facts.rows, facts.cols) for _ in range(3))
  weights = draw(facts.cols).astype(weights_dtype)
  dx, dw = run([3 * x, weights, dy, plus])
  of_dx, of_dw = truth_of(3 * x, weights, dy, plus)
  assert dx.dtype == facts.dtype and dw.dtype == "float32"
  rounded = np.asarray(jnp.asarray(of_dx, facts.dtype), np.float64)
  rounding = reference.relative_error(rounded, of_dx)
  assert reference.relative_error(dx, of_dx) <= 2 * rounding
  wide = (v.astype("float32") for v in (3 * x, weights))
  _, baseline = jax.vjp(normalised, *wide)[1](dy.astype("float32"))
  limit = max(2 * reference.relative_error(baseline, of_dw), 1e-7)
  assert reference.relative_error(dw, of_dw) <= limit


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "num_sms"),
    [
        (37, 256, "bfloat16", 1), (3, 512, "float16", 2), (10, 1024, "bfloat16", 1),
        (5, 4608, "bfloat16", 2),
    ],
)
def test_values(rows, cols, dtype, num_sms):
  """Also of rows that are not loaded ahead; CTAs with a row more than others, or one."""
  facts = NormGradients(rows, cols, dtype, EPS)

  def run(operands):
    return compat.run_interpreted(
        lambda params: kernel.launch(
            operands, facts, num_sms=num_sms, interpret=params
        )
    )

  check(facts, run, "float32" if rows == 3 else "bfloat16")


@pytest.mark.gpu
def test_values_on_the_chip():
  num_sms = current_device().num_sms
  for rows, cols in ((8192, 4096), (4097, 768), (1031, 1024), (999, 5120), (300, 8192)):
    for dtype in ("bfloat16", "float16"):
      facts = NormGradients(rows, cols, dtype, EPS)
      launch = functools.partial(kernel.launch, facts=facts, num_sms=num_sms)
      check(facts, jax.jit(launch))


def test_lowers_for_cuda():
  for cols in (256, 512, 4096, 8192):
    facts, of = NormGradients(8192, cols, "bfloat16", EPS), jax.ShapeDtypeStruct
    row = of((8192, cols), "bfloat16")
    launch = functools.partial(kernel.launch, facts=facts, num_sms=132)
    operands = [row, of((cols,), "float32"), row, row]
    exported = jax.export.export(jax.jit(launch), platforms=["cuda"])(operands)
    assert "jaxgemm_norm_gradients" in exported.mlir_module()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(dtype="float32"), "16 bits"), (dict(cols=4096 + 128), "4224"),
        (dict(cols=8448), "up to 8192"), (dict(rows=8), "8x4096"),
    ],
)
def test_supports(fields, named):
  facts = dict(rows=8192, cols=4096, dtype="bfloat16", eps=EPS)
  assert kernel.supports(NormGradients(**facts)) is None
  assert named in kernel.supports(NormGradients(**(facts | fields)))


# -- Layers ------------------------------------------------------------------------


def operands(rng, dtype="float32", batch=(2, 35), k=32, n=48):
  shapes = dict(
      x=(*batch, k), weights=(k,), w=(k, n), u=(k, n), down=(n, k), square=(k, k)
  )
  return {
      name: jnp.asarray(normal(rng, *shape) / (shape[0] ** 0.5 if name != "x" else 1),
                        dtype)
      for name, shape in shapes.items()
  }


def norm_of(v):
  return jaxgemm.RMSNorm(v["weights"], EPS)


def attention(v, x):
  """A layer, something in between, and a second layer with the residual."""
  found, x = jaxgemm.linear(x, v["square"], norm=norm_of(v), returns_x=True)
  return jaxgemm.linear(jnp.sin(found), v["square"], residual=x)


def gated_attention(v, x):
  found, x = jaxgemm.gated_linear(x, v["w"], v["u"], norm=norm_of(v), returns_x=True)
  return jaxgemm.linear(found, v["down"], residual=x)


OURS = {
    "attention": attention,
    "gated": gated_attention,
    "mlp": lambda v, x: jaxgemm.mlp(
        x, v["w"], v["down"], norm=norm_of(v), residual=x
    ),
    "gated_mlp": lambda v, x: jaxgemm.gated_mlp(
        x, v["w"], v["u"], v["down"], norm=norm_of(v), residual=x
    ),
}


def _gated(v, x):
  y = normalised(x, v["weights"])
  return (jax.nn.silu(y @ v["w"]) * (y @ v["u"])) @ v["down"] + x


PLAIN = {
    "attention": lambda v, x: (
        jnp.sin(normalised(x, v["weights"]) @ v["square"]) @ v["square"] + x
    ),
    "gated": _gated,
    "mlp": lambda v, x: (
        jax.nn.gelu(normalised(x, v["weights"]) @ v["w"]) @ v["down"] + x
    ),
    "gated_mlp": _gated,
}


def assert_as(found, plain, *operands):
  """As good as plain layers' result for the operands."""
  assert_as_good(found, plain(*operands), in_float64(plain, *operands))


def loss(layers, name):
  def run(v):
    x = v["x"] * 1  # Which no argument is.
    out = layers[name](v, x)
    return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, "float32"))))

  return run


@pytest.mark.parametrize("name", OURS)
def test_gradients_and_tangents(name, rng):
  """Those of the plain layers; the cotangents meet in one pass."""
  v, dots = operands(rng), operands(rng)
  ours, theirs = loss(OURS, name), loss(PLAIN, name)
  many = {key: jnp.stack([x, 2 * x]) for key, x in v.items()}
  tangent = lambda f: lambda v, dots: jax.jvp(f, (v,), (dots,))[1]
  for of, *at in (
      (jax.grad, v), (tangent, v, dots), (lambda f: tangent(jax.grad(f)), v, dots),
      (lambda f: jax.vmap(jax.grad(f)), many),
  ):
    assert_as(of(ours)(*at), of(theirs), *at)
  counts = count_primitives(jax.grad(ours), v)
  assert counts["jaxgemm_norm_gradients"] == 1
  # Under vmap x has further rows, and the weights one gradient.
  batched = lambda f: lambda v: jnp.sum(
      jax.vmap(lambda x: f(v | {"x": x}))(jnp.stack([v["x"], 2 * v["x"]]))
  )
  assert_as(jax.grad(batched(ours))(v), jax.grad(batched(theirs)), v)
  counts = count_primitives(jax.grad(batched(ours)), v)
  assert counts["jaxgemm_norm_gradients"] == 1
  for key in ("x", "weights"):
    some = lambda x, key=key: ours(v | {key: x})
    assert_as(jax.grad(some)(v[key]), lambda v, key=key: jax.grad(theirs)(v)[key], v)
    assert count_primitives(jax.grad(some), v[key])["jaxgemm_norm_gradients"] == (
        key == "x"
    )


def test_second_order(rng):
  v = operands(rng, batch=(3,), k=8, n=8)
  run = lambda x, w: jnp.sin(attention(v | {"weights": w}, x))
  check_grads(run, (v["x"], v["weights"]), 2, atol=2e-2, rtol=2e-2)


def test_only_where_the_residual_is_x(rng):
  """Else the residual's cotangent is another array's."""
  v = operands(rng)
  run = lambda v: jnp.sum(jaxgemm.mlp(
      v["x"], v["w"], v["down"], norm=norm_of(v), residual=2 * v["x"]
  ))
  assert not count_primitives(jax.grad(run), v)["jaxgemm_norm_gradients"]
  # Nor where nothing else becomes of x.
  alone = lambda v: jnp.sum(
      jaxgemm.linear(v["x"], v["w"], norm=norm_of(v), returns_x=True)[0]
  )
  assert not count_primitives(jax.grad(alone), v)["jaxgemm_norm_gradients"]
  wanted = lambda v: jnp.sum(normalised(v["x"], v["weights"]) @ v["w"])
  assert_as(jax.grad(alone)(v), jax.grad(wanted), v)


def test_a_factor_that_is_an_array(rng):
  """Of normalised rows: what comes back is x."""
  v = operands(rng)

  def run(v, x):
    found, x = jaxgemm.linear(
        x, v["square"], norm=norm_of(v), scale=v["square"][0, 0], returns_x=True
    )
    return jnp.sum(jnp.sin(found) + jnp.sin(x))

  def plain(v, x):
    y = normalised(x, v["weights"]) @ v["square"] * v["square"][0, 0]
    return jnp.sum(jnp.sin(y) + jnp.sin(x))

  assert_as(jax.grad(run, (0, 1))(v, v["x"]), jax.grad(plain, (0, 1)), v, v["x"])
  counts = count_primitives(jax.grad(run, (0, 1)), v, v["x"])
  assert counts["jaxgemm_norm_gradients"] == 1


def test_xlas_layers_leave_it_to_xla(rng):
  v = operands(rng)

  def run(v):
    found, x = jaxgemm.linear(
        v["x"], v["square"], norm=norm_of(v), returns_x=True, implementation="xla"
    )
    return jnp.sum(jnp.sin(found) + jnp.sin(x))

  assert not count_primitives(jax.grad(run), v)["jaxgemm_norm_gradients"]


def test_float64(rng):
  """Whose gradients are as exact."""
  with jax.enable_x64(True):
    v = {key: x.astype("float64") for key, x in operands(rng).items()}
    ours, theirs = (jax.grad(loss(each, "attention"))(v) for each in (OURS, PLAIN))
    for key, wanted in theirs.items():
      assert ours[key].dtype == "float64"
      np.testing.assert_allclose(ours[key], wanted, rtol=1e-11, atol=1e-12)


def test_few_rows_are_the_kernels(rng):
  """x comes back from a layer whose kernel normalises, too."""
  v = operands(rng, "bfloat16", (4,), 128, 128)
  for run in (
      lambda v, x: jaxgemm.linear(x, v["w"], norm=norm_of(v), returns_x=True),
      lambda v, x: jaxgemm.gated_linear(
          x, v["w"], v["u"], norm=norm_of(v), returns_x=True
      ),
  ):
    _, x = run(v, v["x"])
    np.testing.assert_array_equal(x, v["x"])
    assert count_primitives(lambda v, run=run: run(v, v["x"]), v)["jaxgemm_normed"] == 1


def test_the_norm_saves_its_arguments_alone(rng, capsys):
  """So that it is one pass forward: derivatives find the factors of rows again."""
  v = operands(rng)
  jax.ad_checkpoint.print_saved_residuals(
      lambda x, w: jaxgemm.RMSNorm(w, EPS)(x), v["x"], v["weights"]
  )
  saved = capsys.readouterr().out.splitlines()
  assert saved and all("from the argument" in line for line in saved)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "gated_mlp"])
def test_by_the_kernel(name, monkeypatch, rng):
  """Emulated: gradients as near to float64 as those of plain layers, by twice."""
  monkeypatch.setattr(kernel, "LEAST_ELEMENTS", 0)
  v = operands(rng, "bfloat16", (2, 49), 256, 64)
  with jaxgemm.emulate():
    text = jax.jit(jax.grad(loss(OURS, name))).lower(v).as_text()
    ours = jax.jit(jax.grad(loss(OURS, name)))(v)
  assert "callback" in text
  theirs = jax.grad(loss(PLAIN, name))(v)
  with jax.enable_x64(True):
    wide = {key: x.astype("float64") for key, x in v.items()}
    truth = jax.grad(loss(PLAIN, name))(wide)
  for key in ("x", "weights"):
    error, baseline = (
        reference.relative_error(x[key], truth[key]) for x in (ours, theirs)
    )
    assert error <= 2 * baseline, key


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a"), P(None, None, "a")], ids=str)
def test_shards(spec, rng):
  """XLA's, on several devices, however x lies; nothing is gathered but what k needs."""
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("a",))
  v = operands(rng, batch=(2, 36))
  specs = {"x": spec}
  placed = {
      key: jax.device_put(x, NamedSharding(mesh, specs.get(key, P())))
      for key, x in v.items()
  }
  with jaxgemm.emulate():
    step = jax.jit(jax.grad(loss(OURS, "attention"))).lower(placed).compile()
  if spec[2:] != ("a",):
    assert not [kind for kind, _ in collectives(step.as_text()) if "gather" in kind]
  assert_as(step(placed), jax.grad(loss(PLAIN, "attention")), v)


def test_rows_that_devices_share_unevenly_lie_whole():
  x = ShardedArray({0: 6, 1: 8, 2: 64}, {0: ("a",), 1: ("b", "c")}, 2)
  assert x.even_parts({"a": 4, "b": 2, "c": 2}) == {1: ("b", "c")}
  assert x.even_parts({"a": 3, "b": 2, "c": 3}) == {0: ("a",)}


def test_in_a_shard_map(rng):
  """Rows of each device; the weights' gradient is a sum over devices."""
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
  v = operands(rng, batch=(4, 20))
  specs = {key: P("d") if key == "x" else P() for key in v}
  run = jax.shard_map(
      lambda v: OURS["gated_mlp"](v, v["x"]), mesh=mesh, in_specs=(specs,),
      out_specs=P("d"),
  )
  ours = jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(run(v)))))(v)
  assert_as(ours, jax.grad(loss(PLAIN, "gated_mlp")), v)


def test_explicit_axes(rng):
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
  v = operands(rng, batch=(4, 20))
  with jax.set_mesh(mesh):
    placed = {
        key: jax.device_put(x, NamedSharding(mesh, P("d") if key == "x" else P()))
        for key, x in v.items()
    }
    ours = jax.jit(jax.grad(loss(OURS, "mlp")))(placed)
  assert_as(ours, jax.grad(loss(PLAIN, "mlp")), v)

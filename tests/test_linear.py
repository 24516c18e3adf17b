"""jaxgemm.linear: values, derivatives, transformations and shards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from pallas_kernels import activations
from tests import kernel_cases
from tests.product_cases import count_primitives, cuda_kernels, normal

NAMES = ("x", "w", "bias", "residual")


def operands(rng, dtype="float32", batch=(3, 10), k=64, n=40):
  shapes = (*batch, k), (k, n), (n,), (*batch, n)
  return {
      name: jnp.asarray(normal(rng, *shape), dtype)
      for name, shape in zip(NAMES, shapes, strict=True)
  }


def layer(activation, precision="highest", **options):
  """linear as a function of a dict of operands."""
  def run(values):
    return jaxgemm.linear(
        values["x"], values["w"], values.get("bias"), residual=values.get("residual"),
        activation=activation, precision=precision, **options,
    )

  return run


def unfused(activation, values):
  """The same in float64, of float64 operands."""
  out = values["x"] @ values["w"]
  if "bias" in values:
    out = out + values["bias"]
  out = activations.apply(activation or "none", out)
  return out + values["residual"] if "residual" in values else out


def in_float64(function, values):
  with jax.enable_x64(True):
    wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in values.items()}
    return jax.tree.map(np.asarray, function(wide))


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("names", [NAMES, NAMES[:2], NAMES[:3]], ids=len)
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_values(activation, names, emulated, rng):
  values = {name: x for name, x in operands(rng, "bfloat16").items() if name in names}
  truth = in_float64(functools.partial(unfused, activation), values)
  run = layer(activation, precision=None)
  if emulated:
    with jaxgemm.emulate():
      out = run(values)
  else:
    out = run(values)
  assert out.dtype == jnp.bfloat16 and out.shape == (3, 10, 40)
  assert reference.relative_error(out, truth) < 5e-3


@pytest.mark.parametrize("transposed", [False, True])
def test_one_kernel_does_all(transposed, rng):
  """In the module for a GPU there is nothing beside it, and w is not transposed."""
  values = operands(rng, "bfloat16", (4, 128), 256, 512)
  if transposed:
    values["w"] = values["w"].T
  run = layer("gelu", precision=None, transposed=transposed)
  flat = lambda *args: run(dict(zip(NAMES, args, strict=True)))
  found = cuda_kernels(flat, *(values[name] for name in NAMES))
  assert found.total() == 1 and not found["xla"]
  with jaxgemm.target("NVIDIA H200"):
    text = jax.export.export(jax.jit(run), platforms=["cuda"])(values).mlir_module()
  for operation in ("dot_general", "transpose", "logistic", "add", "convert"):
    assert f"stablehlo.{operation}" not in text


@pytest.mark.parametrize("save", ["preactivation", "nothing"])
@pytest.mark.parametrize("activation", [None, *activations.NAMES])
def test_derivatives(activation, save, rng):
  values = operands(rng, batch=(3,), k=5, n=4)
  run = layer(activation, save=save)
  check_grads(run, (values,), order=2, modes=("fwd", "rev"), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("save", ["preactivation", "nothing"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_gradients_against_float64(activation, dtype, save, rng):
  values = operands(rng, dtype)
  ct = np.asarray(normal(rng, 3, 10, 40), np.float32)
  loss = lambda run: lambda values: jnp.sum(run(values).astype("float32") * ct)
  ours = jax.grad(loss(layer(activation, save=save)))(values)
  wide = lambda values: jnp.sum(unfused(activation, values) * ct.astype(np.float64))
  theirs = in_float64(jax.grad(wide), values)
  bound = 2e-6 if dtype == "float32" else 8e-3
  for name in NAMES:
    assert ours[name].dtype == dtype
    assert reference.relative_error(ours[name], theirs[name]) < bound, name


@pytest.mark.slow
def test_gradients_in_emulation(rng):
  values = operands(rng, "bfloat16", (70,), 136, 72)
  loss = lambda run: lambda values: jnp.sum(jnp.square(run(values).astype("float32")))
  with jaxgemm.emulate():
    ours = jax.grad(loss(layer("silu", precision=None)))(values)
  theirs = jax.grad(loss(functools.partial(unfused, "silu")))(
      {name: x.astype(jnp.float32) for name, x in values.items()}
  )
  for name in NAMES:
    assert reference.relative_error(ours[name], theirs[name]) < 2e-2, name


def test_what_the_forward_pass_saves(rng):
  """What entered the activation, in the result's dtype; or operands alone."""
  values = operands(rng, "bfloat16")
  for save, count in (("preactivation", 1), ("nothing", 0)):
    run = layer("gelu", precision=None, save=save)
    _, backward = jax.vjp(run, values)
    saved = [x.shape for x in jax.tree.leaves(backward)]
    assert saved.count((3, 10, 40)) == count
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(backward))


def test_activations_of_the_backward_pass_are_computed_once(rng):
  values = operands(rng)
  found = count_primitives(jax.grad(lambda v: layer("tanh")(v).sum()), values)
  names = ("jaxgemm_linear", "jaxgemm_gradients", "jaxgemm_cotangents", "jaxgemm")
  assert [found[name] for name in names] == [1, 1, 1, 0]


@pytest.mark.parametrize("names", [("x",), ("x", "residual"), ("w",), NAMES], ids=str)
def test_vmap(names, rng):
  values = operands(rng)
  several = {
      name: jnp.stack([x, 2 * x]) if name in names else x for name, x in values.items()
  }
  axes = {name: 0 if name in names else None for name in values}
  run = layer("silu")
  out = jax.vmap(run, (axes,))(several)
  for i in range(2):
    one = {name: x[i] if name in names else x for name, x in several.items()}
    np.testing.assert_allclose(out[i], run(one), 1e-5, 1e-5)
  fused = names in (("x",), ("x", "residual"))
  found = count_primitives(jax.vmap(run, (axes,)), several)
  assert found["jaxgemm_linear"] == int(fused)


def test_checkpoint_policies_save_what_enters_the_activation(rng):
  values = operands(rng)
  policy = jaxgemm.checkpoint_policies.products_saveable
  run = jax.checkpoint(layer("gelu"), policy=policy)
  found = count_primitives(jax.grad(lambda v: run(v).sum()), values)
  assert found["jaxgemm_linear"] == 1


def test_scale_may_be_traced(rng):
  values = operands(rng)
  f = lambda scale: layer("relu", scale=scale)(values).sum()
  np.testing.assert_allclose(f(0.5), jax.jit(f)(jnp.float32(0.5)), 1e-5)
  check_grads(f, (0.5,), order=1, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", ["float64", "int32", "float16"])
def test_other_dtypes(dtype, rng):
  with jax.enable_x64(True):
    values = {
        name: jnp.asarray(np.asarray(x) * 4, dtype) for name, x in operands(rng).items()
    }
    out = layer("relu", precision=None)(values)
    assert out.dtype == dtype
    truth = in_float64(functools.partial(unfused, "relu"), values)
  assert reference.relative_error(out, truth) < 2e-3


@pytest.mark.parametrize(
    ("specs", "reduced"),
    [
        (dict(x=P("x"), w=P(None, "y"), bias=P("y"), residual=P("x", None, "y")), 0),
        (dict(x=P("x", None, "y"), w=P("y"), bias=P(), residual=P("x")), 1),
    ],
    ids=["columns", "k"],
)
def test_shards(specs, reduced, rng):
  """As XLA's own: k alone is reduced, and nothing is gathered."""
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
  values = operands(rng, batch=(4, 8))
  run = layer("gelu")
  wanted = run(values)
  values = {
      name: jax.device_put(x, NamedSharding(mesh, specs[name]))
      for name, x in values.items()
  }
  with jaxgemm.emulate():
    compiled = jax.jit(run).lower(values).compile()
  text = compiled.as_text()
  assert "all-gather" not in text and text.count(" all-reduce(") == reduced
  np.testing.assert_allclose(compiled(values), wanted, 1e-5, 1e-5)


# -- Gated layers ------------------------------------------------------------------


def gated_operands(rng, dtype="float32", batch=(3, 10), k=64, n=40):
  values = operands(rng, dtype, batch, k, n)
  others = operands(rng, dtype, batch, k, n)
  return dict(
      x=values["x"], w_gate=values["w"], w_up=others["w"], bias_gate=values["bias"],
      bias_up=others["bias"], residual=values["residual"],
  )


def gated(values, precision="highest", **options):
  return jaxgemm.gated_linear(**values, precision=precision, **options)


def gated_unfused(values):
  gate = values["x"] @ values["w_gate"] + values.get("bias_gate", 0.0)
  up = values["x"] @ values["w_up"] + values.get("bias_up", 0.0)
  return activations.apply("silu", gate) * up + values.get("residual", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("names", [("x", "w_gate", "w_up"), None], ids=["plain", "all"])
def test_gated_values(names, emulated, rng):
  values = gated_operands(rng, "bfloat16")
  values = {name: values[name] for name in names or values}
  truth = in_float64(gated_unfused, values)
  if emulated:
    with jaxgemm.emulate():
      out = gated(values, None)
  else:
    out = gated(values, None)
  assert reference.relative_error(out, truth) < 1e-2


def test_one_kernel_does_all_of_a_gated_layer(rng):
  values = gated_operands(rng, "bfloat16", (4, 128), 256, 512)
  flat = lambda *args: gated(dict(zip(values, args, strict=True)), None)
  found = cuda_kernels(flat, *values.values())
  assert found.total() == 1 and not found["xla"]


@pytest.mark.parametrize("save", ["preactivation", "nothing"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_gated_derivatives(activation, save, rng):
  values = gated_operands(rng, batch=(3,), k=5, n=4)
  run = functools.partial(gated, activation=activation, save=save)
  check_grads(run, (values,), order=2, modes=("fwd", "rev"), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_gradients_against_float64(dtype, rng):
  values = gated_operands(rng, dtype)
  ct = np.asarray(normal(rng, 3, 10, 40), np.float32)
  ours = jax.grad(lambda v: jnp.sum(gated(v).astype("float32") * ct))(values)
  wide = lambda v: jnp.sum(gated_unfused(v) * ct.astype(np.float64))
  theirs = in_float64(jax.grad(wide), values)
  for name in values:
    error = reference.relative_error(ours[name], theirs[name])
    assert error < (2e-6 if dtype == "float32" else 1e-2), name


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("packed", ["concatenated", "interleaved"])
def test_two_weights_in_one_array(packed, transposed, rng):
  values = gated_operands(rng)
  apart = gated(values)
  weights = [values.pop(name) for name in ("w_gate", "w_up")]
  if packed == "concatenated":
    values["w_gate"] = jnp.concatenate(weights, 1)
  else:
    values["w_gate"] = jnp.stack(weights, 2).reshape(64, 80)
  if transposed:
    values["w_gate"] = values["w_gate"].T
  together = gated(values, packed=packed, transposed=transposed)
  np.testing.assert_allclose(together, apart, 1e-4, 1e-4)


def concatenated(values):
  values = dict(values)
  weights = [values.pop(name) for name in ("w_gate", "w_up")]
  return values | {"w_gate": jnp.concatenate(weights, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", kernel_cases.mostly_more([40, 64]))
def test_a_kernel_reads_both_weights_from_one_array(n, transposed, rng):
  values = gated_operands(rng, "bfloat16", (200,), 96, n)
  wanted = in_float64(gated_unfused, values)
  values = concatenated(values)
  if transposed:
    values["w_gate"] = values["w_gate"].T
  with jaxgemm.emulate():
    out = gated(values, None, transposed=transposed, implementation="persistent")
  assert reference.relative_error(out, wanted) < 1e-2


@pytest.mark.parametrize(("n", "count"), [(512, 0), (200, 2)])
def test_concatenated_weights_are_not_cut_out(n, count, rng):
  values = concatenated(gated_operands(rng, "bfloat16", (512,), 256, n))
  run = jax.jit(lambda v: gated(v, None, implementation="persistent"))
  with jaxgemm.target("NVIDIA H200"):
    text = jax.export.export(run, platforms=["cuda"])(values).mlir_module()
  assert text.count("stablehlo.slice") == count and "jaxgemm_persistent" in text


@pytest.mark.parametrize("save", ["preactivation", "nothing"])
def test_derivatives_of_concatenated_weights(save, rng):
  values = gated_operands(rng, batch=(3,), k=5, n=4)
  ct = jnp.asarray(rng.standard_normal((3, 4)), "float32")
  loss = lambda v: jnp.sum(gated(v, save=save) * ct)
  apart, together = jax.grad(loss)(values), jax.grad(loss)(concatenated(values))
  for name, wanted in concatenated(apart).items():
    np.testing.assert_allclose(together[name], wanted, 1e-4, 1e-4)
  run = functools.partial(gated, save=save)
  check_grads(run, (concatenated(values),), 2, ["fwd", "rev"], 2e-2, 2e-2)
  # Only some operands move.
  values = concatenated(values)
  moving = {"x": values.pop("x")}
  check_grads(lambda v: run(v | values), (moving,), 1, ["fwd", "rev"], 2e-2, 2e-2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["x", "w_gate"])
def test_gated_vmap(name, packed, rng):
  values = gated_operands(rng)
  values = concatenated(values) if packed else values
  several = values | {name: jnp.stack([values[name], 2 * values[name]])}
  axes = dict.fromkeys(values) | {name: 0}
  out = jax.vmap(gated, (axes,))(several)
  for i in range(2):
    one = gated(several | {name: several[name][i]})
    np.testing.assert_allclose(out[i], one, 1e-4, 1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_gated_shards(packed, rng):
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
  values = gated_operands(rng, batch=(4, 8))
  values = concatenated(values) if packed else values
  wanted = gated(values)
  specs = dict(x=P("x", None, "y"), w_gate=P("y"), w_up=P("y"), residual=P("x"))
  values = {
      name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
      for name, x in values.items()
  }
  with jaxgemm.emulate():
    compiled = jax.jit(gated).lower(values).compile()
  assert "all-gather" not in compiled.as_text()
  np.testing.assert_allclose(compiled(values), wanted, 1e-5, 1e-5)

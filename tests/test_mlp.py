"""jaxgemm.mlp and gated_mlp: two layers whose derivatives share a kernel."""

from __future__ import annotations

from collections import Counter
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
import numpy as np
import pytest

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from pallas_kernels import activations
from tests.kernel_cases import more
from tests.product_cases import count_primitives, cuda_kernels, normal

PLAIN = ("x", "up", "down", "up_bias", "down_bias", "residual")
GATED = ("x", "up", "down", "gate", "residual")


def operands(rng, dtype="float32", batch=(2, 40), k=64, hidden=136, n=48):
  shapes = dict(
      x=(*batch, k), up=(k, hidden), gate=(k, hidden), down=(hidden, n),
      up_bias=(hidden,), down_bias=(n,), residual=(*batch, n),
  )
  return {
      name: jnp.asarray(
          normal(rng, *shape) / (shape[0] ** 0.5 if len(shape) == 2 else 1.0), dtype
      )
      for name, shape in shapes.items()
  }


def together(v, **options):
  """The function of both layers, of a dict of operands; gated, if there is a gate."""
  options = dict(residual=v.get("residual"), bias_down=v.get("down_bias")) | options
  if "gate" in v:
    return jaxgemm.gated_mlp(v["x"], v["gate"], v["up"], v["down"], **options)
  return jaxgemm.mlp(v["x"], v["up"], v["down"], v.get("up_bias"), **options)


def apart(v, activation=None, **options):
  """Two layers that do not know of each other."""
  if "gate" in v:
    hidden = jaxgemm.gated_linear(
        v["x"], v["gate"], v["up"], activation=activation or "silu", **options
    )
  else:
    hidden = jaxgemm.linear(
        v["x"], v["up"], v.get("up_bias"), activation=activation or "gelu", **options
    )
  return jaxgemm.linear(
      hidden, v["down"], v.get("down_bias"), residual=v.get("residual"), **options
  )


def unfused(v, activation=None):
  """The same by operations of JAX alone."""
  gated = "gate" in v
  z = v["x"] @ v["gate" if gated else "up"] + v.get("up_bias", 0)
  hidden = activations.apply(activation or ("silu" if gated else "gelu"), z)
  if gated:
    hidden = hidden * (v["x"] @ v["up"])
  return hidden @ v["down"] + v.get("down_bias", 0) + v.get("residual", 0)


def in_float64(function, values):
  with jax.enable_x64(True):
    wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in values.items()}
    return jax.tree.map(np.asarray, function(wide))


def gradients(run, ct):
  loss = lambda v: jnp.sum(run(v).astype(ct.dtype) * ct)
  return jax.value_and_grad(loss)


def pick(values, names):
  return {name: values[name] for name in names}


@pytest.mark.parametrize("names", [PLAIN, GATED, PLAIN[:3]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_against_float64(dtype, names, rng):
  values = pick(operands(rng, dtype), names)
  ct = np.asarray(normal(rng, 2, 40, 48), np.float32)
  run = functools.partial(together, precision="highest")
  loss, ours = gradients(run, ct)(values)
  wide, theirs = in_float64(gradients(unfused, ct.astype(np.float64)), values)
  with jax.default_matmul_precision("highest"):
    baseline_loss, baseline = gradients(unfused, ct)(values)
  room = 1e-7 * np.abs(ct).sum()  # A sum may happen to be exact.
  assert abs(loss - wide) <= 2 * abs(baseline_loss - wide) + room
  for name in names:
    assert ours[name].dtype == dtype
    error, its = (
        reference.relative_error(x[name], theirs[name]) for x in (ours, baseline)
    )
    assert error <= 2 * its, (name, error, its)


@pytest.mark.slow
@pytest.mark.parametrize("names", [more(PLAIN), GATED], ids=str)
def test_gradients_in_emulation(names, rng):
  values = pick(operands(rng, "bfloat16"), names)
  ct = np.asarray(normal(rng, 2, 40, 48), np.float32)
  with jaxgemm.emulate():
    _, ours = jax.jit(gradients(together, ct))(values)
  _, theirs = in_float64(gradients(unfused, ct.astype(np.float64)), values)
  for name in names:
    assert reference.relative_error(ours[name], theirs[name]) < 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "products"), [more(PLAIN[:3], 5), (GATED, 6)], ids=str
)
def test_nothing_lies_between_the_backward_products(names, products, rng):
  """hidden, dz, d down, and of x and of up; only the gradient of a bias takes a pass."""
  values = operands(rng, "bfloat16", (4, 512), 512, 1024, 512)
  args = [values[name] for name in names]

  def kernels(run):
    loss = lambda *args: jnp.sum(run(dict(zip(names, args, strict=True))))
    wanted = [i for i, name in enumerate(names) if name != "gate"]
    return cuda_kernels(jax.grad(loss, wanted), *args)

  found, otherwise = kernels(together), kernels(apart)
  assert not found["cotangents"] and otherwise["cotangents"] == 1
  for one in (found, otherwise):
    assert one.total() - one["cotangents"] == products and not one["xla"]


@pytest.mark.parametrize(
    ("activation", "names"), [("relu", PLAIN), ("tanh", GATED), (jnp.sin, PLAIN[:3])],
    ids=["relu", "tanh, gated", "a function"],
)
def test_derivatives(activation, names, rng):
  values = pick(operands(rng, "float32", (3,), 5, 6, 4), names)
  run = functools.partial(together, activation=activation, precision="highest")
  check_grads(run, (values,), order=2, modes=("fwd", "rev"), atol=3e-2, rtol=3e-2)


def test_only_what_moves_is_differentiated(rng):
  values = pick(operands(rng), PLAIN)

  def found(name):
    loss = lambda x: jnp.sum(together(values | {name: x}))
    counts = count_primitives(jax.grad(loss), values[name])
    return counts["jaxgemm_linear"], counts["jaxgemm"]

  assert found("x") == (3, 1)  # Both layers, dz; dx.
  assert found("down") == (2, 1)
  assert found("residual") == (2, 0)


@pytest.mark.parametrize("names", [PLAIN, GATED], ids=str)
def test_transformations(names, rng):
  values = pick(operands(rng), names)
  run = functools.partial(together, precision="highest")
  batched = jnp.stack([values["x"], 2 * values["x"]])
  of_x = lambda run: lambda x: run(values | {"x": x})
  np.testing.assert_allclose(
      jax.vmap(of_x(run))(batched), jax.vmap(of_x(unfused))(batched), 1e-4, 1e-4
  )
  loss = lambda run: lambda up, x: jnp.sum(jnp.sin(run(values | {"x": x, "up": up})))
  each = lambda run: jax.vmap(jax.grad(loss(run)), (None, 0))(values["up"], batched)
  np.testing.assert_allclose(each(run), each(unfused), 1e-3, 1e-3)
  again = jax.checkpoint(
      lambda v: jnp.sum(jnp.sin(run(v))),
      policy=jaxgemm.checkpoint_policies.products_saveable,
  )
  plain = jax.grad(lambda v: jnp.sum(jnp.sin(unfused(v))))(values)
  for name, x in jax.grad(again)(values).items():
    np.testing.assert_allclose(x, plain[name], 1e-3, 1e-3)
  found = count_primitives(jax.grad(again), values)
  assert found["jaxgemm_linear"] <= 3  # Nothing is multiplied twice.


@pytest.mark.parametrize("names", [PLAIN, GATED], ids=str)
def test_shards(names, rng):
  """Tensor-parallel: the collectives, and the gradients, of layers of XLA's."""
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("d",))
  specs = dict(up=P(None, "d"), gate=P(None, "d"), up_bias=P("d"), down=P("d"))
  values = {
      name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
      for name, x in pick(operands(rng), names).items()
  }
  ct = np.asarray(normal(rng, 2, 40, 48), np.float32)
  shardings = jax.tree.map(lambda x: x.sharding, values)
  found = {}
  for run in (functools.partial(together, precision="highest"), unfused):
    step = jax.jit(
        lambda v, run=run: gradients(run, ct)(v)[1], out_shardings=shardings
    )
    with jaxgemm.emulate():
      compiled = step.lower(values).compile()
    found[run] = compiled(values), collectives(compiled.as_text())
  (ours, had), (theirs, needed) = found.values()
  if "gate" in names:  # The sums of two products, of which XLA on a CPU makes two.
    needed -= Counter({("all-reduce", (2, 40, 64)): 1})
  assert had == needed
  for name in names:
    assert reference.relative_error(ours[name], theirs[name]) < 1e-5, name


def test_what_no_kernel_serves(rng):
  """Complex ones are XLA's; of mixed dtypes each layer has its own rules."""
  values = pick(operands(rng), PLAIN)
  wide = {name: x.astype("complex64") for name, x in values.items()}
  run = functools.partial(together, activation="tanh", precision="highest")
  np.testing.assert_allclose(run(wide), unfused(values, "tanh"), 1e-4, 1e-4)
  mixed = values | {name: values[name].astype("bfloat16") for name in ("x", "up")}
  out = together(mixed, precision="highest")
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, unfused(values), 5e-2, 5e-2)


def test_an_odd_packed_weight_is_refused():
  x, down = jnp.ones((2, 6)), jnp.ones((2, 6))
  with pytest.raises(TypeError, match="gated_mlp: w_gate .*dimension 1 holds two"):
    jaxgemm.gated_mlp(x, jnp.ones((6, 5)), None, down)

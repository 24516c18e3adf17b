"""gradients_p: the gradients of a layer's operands, on one device and on several."""

from __future__ import annotations

from collections import Counter
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from jaxgemm.layouts import ShardedArray, choose_layout
from tests.product_cases import count_primitives, normal

NAMES = ("x", "gate", "up")


def operands(rng, dtype="float32", m=(32,), k=64, n=128):
  shapes = dict(x=(*m, k), gate=(k, n), up=(k, n))
  return {
      name: jnp.asarray(normal(rng, *shape) / shape[0] ** 0.5, dtype)
      for name, shape in shapes.items()
  }


def gated(v, **options):
  return jaxgemm.gated_linear(v["x"], v["gate"], v["up"], **options)


def unfused(v):
  return jax.nn.silu(v["x"] @ v["gate"]) * (v["x"] @ v["up"])


def one(v, **options):
  return jaxgemm.linear(v["x"], v["up"], activation="tanh", **options)


def one_unfused(v):
  return jnp.tanh(v["x"] @ v["up"])


def loss(layer):
  return lambda v: jnp.sum(jnp.sin(layer(v).astype(jnp.float32)))


def test_one_primitive_where_all_move(rng):
  values = operands(rng)
  for layer in (gated, one):
    counts = count_primitives(jax.grad(loss(layer)), values)
    assert counts["jaxgemm_gradients"] == 1 and counts["jaxgemm"] == 0
  for name, products in (("x", 2), ("up", 1)):
    some = lambda x, name=name: loss(gated)(values | {name: x})
    counts = count_primitives(jax.grad(some), values[name])
    assert counts["jaxgemm_gradients"] == 0 and counts["jaxgemm"] == products
  # A cotangent of another dtype.
  wide = functools.partial(one, preferred_element_type="float32")
  counts = count_primitives(jax.grad(loss(wide)), operands(rng, "bfloat16"))
  assert counts["jaxgemm_gradients"] == 0 and counts["jaxgemm"] == 2


def test_the_second_product_adds_the_first(rng):
  """No kernel of XLA's adds what two products give; other layers as before."""
  values = operands(rng, "bfloat16", (1024,), 512, 1024)
  grad = jax.grad(loss(gated))
  with jaxgemm.target("NVIDIA H200"):
    text = jax.jit(grad).trace(values).lower(lowering_platforms=("cuda",)).as_text()
  assert "stablehlo.dot_general" not in text
  adds = [line for line in text.splitlines() if "stablehlo.add" in line]
  assert not [line for line in adds if "1024x512" in line]
  assert [line for line in text.splitlines() if "1024x512" in line]


def test_what_xla_multiplies_it_adds_in_their_dtype(rng):
  """A float32 sum would take twice the memory's time."""
  values = operands(rng, "bfloat16", (8,), 24, 16)
  grad = jax.jit(jax.grad(loss(gated)))  # No GPU is known, so no kernel serves.
  text = grad.trace(values).lower(lowering_platforms=("cuda",)).as_text()
  adds = [line for line in text.splitlines() if "stablehlo.add" in line]
  sums = [line for line in adds if "8x24" in line]
  assert len(sums) == 1 and "bf16" in sums[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("bfloat16", 1.5e-2), ("float32", 2e-6)])
def test_emulated(dtype, bound, rng):
  values = operands(rng, dtype, (2, 33), 72, 136)
  precision = None if dtype == "bfloat16" else "highest"
  with jaxgemm.emulate():
    ours = jax.grad(loss(functools.partial(gated, precision=precision)))(values)
  wide = {name: np.asarray(x, np.float32) for name, x in values.items()}
  theirs = jax.grad(loss(unfused))(wide)
  for name in NAMES:
    assert ours[name].dtype == dtype and ours[name].shape == values[name].shape
    assert reference.relative_error(ours[name], theirs[name]) < bound, name


@pytest.mark.slow
def test_derivatives_of_gradients(rng):
  values = operands(rng, m=(3,), k=5, n=4)
  run = functools.partial(gated, precision="highest")
  directions = jax.tree.map(jnp.sin, values)
  for of in (
      lambda f: jax.jvp(jax.grad(loss(f)), (values,), (directions,))[1],
      lambda f: jax.grad(
          lambda v: sum(jnp.vdot(x, x) for x in jax.tree.leaves(jax.grad(loss(f))(v)))
      )(values),
      lambda f: jax.vmap(jax.grad(loss(f)))(
          jax.tree.map(lambda x: jnp.stack([x, 2 * x]), values)
      ),
  ):
    ours, theirs = of(run), of(unfused)
    for name in NAMES:
      np.testing.assert_allclose(ours[name], theirs[name], 1e-4, 1e-4)


# -- Several devices ---------------------------------------------------------------


def _mesh():
  return jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("a", "b"))


# How x and the weights lie, and what travels of x's gradient and of each weight's.
LAYOUTS = {
    "rows": (P("a"), P(), [], [(64, 128)]),
    "columns": (P(), P(None, "a"), [(32, 64)], []),
    "rows and columns": (P("a"), P(None, "b"), [(16, 64)], [(64, 64)]),
    "k": (P(None, "a"), P("a"), [], []),
    "k and columns": (P(None, "b"), P("b", "a"), [(32, 32)], []),
    "rows of both": (P(("a", "b")), P(), [], [(64, 128)]),
}


def sharded_step(values, specs, layer):
  """The compiled gradients, which lie as the operands do."""
  mesh = _mesh()
  shardings = {
      name: NamedSharding(mesh, specs[0] if name == "x" else specs[1]) for name in NAMES
  }
  values = {name: jax.device_put(values[name], shardings[name]) for name in NAMES}
  step = jax.jit(jax.grad(loss(layer)), out_shardings=shardings)
  with jaxgemm.emulate():
    return step.lower(values).compile(), values


@pytest.mark.parametrize("name", LAYOUTS)
def test_shares(name, rng):
  """Values, and one sum for both products of x's gradient."""
  x_spec, w_spec, of_x, of_w = LAYOUTS[name]
  values = operands(rng)
  run = functools.partial(gated, precision="highest")
  step, values = sharded_step(values, (x_spec, w_spec), run)
  wanted = Counter(("all-reduce", shape) for shape in (*of_x, *of_w, *of_w))
  found = collectives(step.as_text())
  if x_spec[-1:] in (("a",), ("b",)) and "k" in name:  # Forward, k is what is summed.
    found -= Counter({each: 2 for each in found if each[1][0] == 32 and 128 in each[1]})
    found = Counter({e: n for e, n in found.items() if e[1] in (*of_x, *of_w)})
  assert found == wanted
  ours, theirs = step(values), jax.grad(loss(unfused))(values)
  for key in NAMES:
    assert reference.relative_error(ours[key], theirs[key]) < 1e-5, key


def test_weights_that_lie_along_rows_as_x_does(rng):
  """One axis cuts the rows of x and a weight: what moves is smaller than x."""
  values = operands(rng, m=(512,), k=64, n=32)
  run = functools.partial(gated, precision="highest")
  step, values = sharded_step(values, (P("a"), P("a")), run)
  moved = [shape for kind, shape in collectives(step.as_text()) if "gather" in kind]
  assert moved and all(max(shape) < 512 for shape in moved)
  ours, theirs = step(values), jax.grad(loss(unfused))(values)
  for key in NAMES:
    assert reference.relative_error(ours[key], theirs[key]) < 1e-5, key


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_what_waits_for_the_sum_waits_for_the_other_products(name, monkeypatch, rng):
  seen = []
  barrier = lax.optimization_barrier

  def told(arrays):
    seen.append([x.shape for x in arrays])
    return barrier(arrays)

  monkeypatch.setattr("jaxgemm.partitioning.lax.optimization_barrier", told)
  # Sizes of their own: what is partitioned once is not again.
  sharded_step(operands(rng, n=136), LAYOUTS[name][:2], gated)
  assert seen == ([[(32, 64), (64, 68), (64, 68)]] if name == "columns" else [])


def test_in_shard_map(rng):
  """Each device's own; the sum is where the caller puts it."""
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("d",))
  values = operands(rng)
  specs = {"x": P(), "gate": P(None, "d"), "up": P(None, "d")}

  def total(layer):
    def run(v):
      part = jnp.sum(jnp.sin(layer(v)))
      return jax.lax.psum(part, "d")

    return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P())

  ours = jax.jit(jax.grad(total(functools.partial(gated, precision="highest"))))(values)
  theirs = jax.grad(loss(unfused))(values)
  for key in NAMES:
    assert reference.relative_error(ours[key], theirs[key]) < 1e-5, key


def test_layouts_of_several_results():
  """Each has sums of its own, and is left in parts where it is wanted so."""
  lhs = ShardedArray({"m0": 8, "k0": 16}, {"m0": ("x",)}, 2)
  rhs = ShardedArray({"k0": 16, "n0": 32}, {"n0": ("y",)}, 2)
  ct = ShardedArray({"m0": 8, "n0": 32}, {"m0": ("x",), "n0": ("y",)}, 2)
  of_rhs = ShardedArray({"k0": 16, "n0": 32}, {"n0": ("y",), "k0": ("x",)}, 2)
  layout = choose_layout([lhs, rhs, ct], [lhs, of_rhs], {"x": 2, "y": 4})
  assert layout.parts == {"m0": ("x",), "n0": ("y",)}
  first, second = layout.reductions
  assert (first.summed, first.scattered) == (("y",), {})
  assert (second.summed, second.scattered) == ((), {"k0": ("x",)})
  assert layout.result_parts(1) == {"m0": ("x",), "n0": ("y",), "k0": ("x",)}

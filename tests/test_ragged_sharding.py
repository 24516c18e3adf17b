"""jaxgemm.ragged_dot over several devices: shards, explicit meshes, shard_map, export."""

from __future__ import annotations

from collections import Counter
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from tests.kernel_cases import more
from tests.product_cases import normal
from tests.ragged_cases import (
  K,
  M,
  N,
  check_close,
  operands_of,
  plain,
  ragged,
  shapes,
)


def mesh_of(axis_type=AxisType.Auto) -> jax.sharding.Mesh:
  devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
  return jax.sharding.Mesh(devices, ("x", "y"), axis_types=(axis_type,) * 2)


def put(mesh, x, spec):
  return jax.device_put(x, NamedSharding(mesh, spec))


SHARDS = {
    # Of lhs and rhs, and the collectives: their kinds and sizes.
    "replicated": (P(), P(), {}),
    "n": (P(), P(None, None, "x"), {}),
    "n twice": (P(), P(None, None, ("x", "y")), {}),
    "k": (P(None, "x"), P(None, "x"), {("all-reduce", M * N): 1}),
    "k and n": (P(None, "x"), P(None, "x", "y"), {("all-reduce", M * N // 2): 1}),
    "rows": (P("x"), P(), {("all-gather", M * K): 1}),
    "groups": (P(), P("y"), {("all-gather", 4 * K * N): 1}),
}


def kinds_and_sizes(function, *args) -> Counter:
  text = jax.jit(function).lower(*args).compile().as_text()
  found = Counter()
  for (kind, shape), count in collectives(text).items():
    found[kind, math.prod(shape)] += count
  return found


@pytest.mark.parametrize("name", SHARDS)
def test_shards_are_products_of_their_own(name, rng):
  lhs_spec, rhs_spec, wanted = SHARDS[name]
  lhs, rhs, sizes = operands_of(rng)
  mesh = mesh_of()
  placed = put(mesh, lhs, lhs_spec), put(mesh, rhs, rhs_spec), put(mesh, sizes, P())
  loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x, sizes)))
  with jaxgemm.emulate():
    assert kinds_and_sizes(ragged(), *placed) == wanted
    found = jax.jit(ragged())(*placed)
    grads = jax.jit(jax.grad(loss(ragged()), (0, 1)))(*placed[:2])
  check_close(found, plain(lhs, rhs, sizes))
  check_close(grads, jax.grad(loss(plain), (0, 1))(lhs, rhs), 1e-5)


@pytest.mark.parametrize("name", ["n", "k", "k and n"])
def test_gradients_gather_no_operand(name, rng):
  lhs_spec, rhs_spec, _ = SHARDS[name]
  mesh, (lhs, rhs, sizes) = mesh_of(), operands_of(rng)
  placed = put(mesh, lhs, lhs_spec), put(mesh, rhs, rhs_spec)
  loss = lambda *x: jnp.sum(jnp.sin(ragged()(*x, sizes)))
  with jaxgemm.emulate():
    run = jax.jit(
        jax.grad(loss, (0, 1)), out_shardings=tuple(x.sharding for x in placed)
    )
    text = run.lower(*placed).compile().as_text()
  assert not any(kind == "all-gather" for kind, _ in collectives(text))


def test_transposed_shards(rng):
  lhs, rhs, sizes = operands_of(rng, transposed=True)
  mesh, run = mesh_of(), ragged(transposed=True)
  for spec, wanted in ((P(None, "x"), {}), (P(None, None, "x"), {"all-reduce": 1})):
    of_lhs = P(None, "x") if wanted else P()
    placed = put(mesh, lhs, of_lhs), put(mesh, rhs, spec), put(mesh, sizes, P())
    with jaxgemm.emulate():
      found = kinds_and_sizes(run, *placed)
      assert Counter(kind for kind, _ in found.elements()) == wanted
      check_close(jax.jit(run)(*placed), plain(lhs, rhs, sizes, transposed=True))


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(
    "spec, out", [(P(None, None, "x"), P(None, "x")), (P(), P()), (P("x"), P())]
)
def test_explicit_meshes(spec, out, emulated, rng):
  mesh, (lhs, rhs, sizes) = mesh_of(AxisType.Explicit), operands_of(rng)
  loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x, sizes)))
  wanted = plain(lhs, rhs, sizes), *jax.grad(loss(plain), (0, 1))(lhs, rhs)
  with jax.set_mesh(mesh):
    placed = put(mesh, lhs, P(None, None)), put(mesh, rhs, spec)
    sizes = put(mesh, sizes, P(None))
    with jaxgemm.emulate() if emulated else jaxgemm.target("NVIDIA H200"):
      found = jax.jit(ragged())(*placed, sizes)
      grads = jax.jit(jax.grad(loss(ragged()), (0, 1)))(*placed)
  assert found.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
  for one, want in zip((found, *grads), wanted, strict=True):
    assert reference.relative_error(one, want) < 1e-5
  for one, operand in zip(grads, placed, strict=True):
    assert jax.typeof(one) == jax.typeof(operand)


@pytest.mark.parametrize("multiply", [jaxgemm.ragged_dot, jaxgemm.matmul])
def test_emulated_shards_are_not_batch_invariant(multiply, rng):
  """They are XLA's, which an error says before XLA's partitioner finds out."""
  mesh, (lhs, rhs, sizes) = mesh_of(), operands_of(rng, "bfloat16")
  operands = [put(mesh, lhs, P()), put(mesh, rhs, P(None, None, "x")), sizes]
  if multiply is jaxgemm.matmul:
    operands = [operands[0], operands[1][0]]
  with jaxgemm.emulate(), jaxgemm.batch_invariant():
    with pytest.raises(ValueError, match="over 4 devices, XLA .*in a jax.shard_map"):
      jax.jit(multiply).lower(*operands)


def test_vmap_over_a_sharded_axis_says_what_to_do(rng):
  mesh, (_, rhs, sizes) = mesh_of(AxisType.Explicit), operands_of(rng)
  with jax.set_mesh(mesh):
    lhs, rhs, sizes = (
        put(mesh, x, P(*spec)) for x, spec in
        ((normal(rng, 4, M, K), ["x"]), (rhs, []), (sizes, [None]))
    )
    with pytest.raises(ValueError, match="float32.4@x,40,72.*'x'.*jax.shard_map"):
      jax.vmap(jaxgemm.ragged_dot, (0, None, None))(lhs, rhs, sizes)


@pytest.mark.parametrize(
    "emulated, check_vma",
    [(False, False), (False, True), more(True, True), more(True, False)],
)
def test_shard_map(emulated, check_vma, rng):
  """Each device has rows of its own, in groups of its own, and all matrices."""
  dtype = "bfloat16" if emulated else "float32"
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
  lhs, rhs, _ = operands_of(rng, dtype)
  sizes = jnp.array([(3, 0, 7, 0), (10, 0, 0, 0), (0, 0, 1, 2), (0, 9, 1, 0)], "int32")

  def over(multiply):
    return jax.shard_map(
        lambda lhs, rhs, sizes: multiply(lhs, rhs, sizes[0]), mesh=mesh,
        in_specs=(P("x"), P(), P("x")), out_specs=P("x"), check_vma=check_vma,
    )

  def one_by_one(lhs, rhs, sizes):
    parts = zip(jnp.split(lhs, 4), sizes, strict=True)
    return jnp.concatenate([plain(x, rhs, s) for x, s in parts])

  loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x, sizes).astype("float32") / 9))
  wide = lhs.astype("float32"), rhs.astype("float32")
  wanted = one_by_one(*wide, sizes), *jax.grad(loss(one_by_one), (0, 1))(*wide)
  ours = over(ragged(precision=None) if emulated else ragged())
  with jaxgemm.emulate() if emulated else jaxgemm.batch_invariant(False):
    found = jax.jit(ours)(lhs, rhs, sizes)
    grads = jax.jit(jax.grad(loss(ours), (0, 1)))(lhs, rhs)
  for one, want in zip((found, *grads), wanted, strict=True):
    assert one.shape == want.shape and one.dtype == dtype
    assert reference.relative_error(one, want) < (1e-2 if emulated else 1e-5)


def test_shard_map_lowers_kernels(rng):
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
  lhs, rhs, sizes = operands_of(rng, "bfloat16")
  run = jax.shard_map(
      jaxgemm.ragged_dot, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x")
  )
  loss = lambda *x: jnp.sum(jnp.sin(run(*x, sizes).astype("float32")))
  with jaxgemm.target("NVIDIA H200"):
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(lhs, rhs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "jaxgemm_grouped_m" in text and "jaxgemm_grouped_k" in text
  assert "dot_general" not in text


def test_export_over_devices_says_what_to_do(rng):
  mesh = mesh_of()
  specs = P(), P(None, None, "x"), P()
  operands = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
      for x, spec in zip(shapes(), specs, strict=True)
  ]
  with jaxgemm.target("NVIDIA H200"), pytest.raises(NotImplementedError, match="devices"):
    jax.export.export(jax.jit(jaxgemm.ragged_dot), platforms=["cuda"])(*operands)

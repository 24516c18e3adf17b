"""Which problems the tuner finds in a function."""

from __future__ import annotations

import dataclasses
import functools
import importlib

from autotune_cases import (
  H200,
  NN,
  NT,
  TN,
  A,
  B,
  collected,
  loss,
  shape,
)
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import pytest

import jaxgemm
from jaxgemm import lowering, primitive
from jaxgemm.autotune import tuner
from pallas_kernels.configs import BlockedConfig
from pallas_kernels.problem import Problem

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_product_is_found_once(wrap):
  fn = wrap(lambda a, b: jaxgemm.matmul(a, b) + jaxgemm.matmul(a * 2, b))
  assert collected(fn, A, B) == [NN]
  assert collected(fn, A, B) == [NN]  # Though JAX has traced and lowered it before.


def test_gradients_are_found():
  found = collected(jax.jit(jax.grad(loss, (0, 1))), A, B)
  assert sorted(found, key=str) == sorted([NN, NT, TN], key=str)


def test_arguments_may_be_arrays_and_nothing_runs():
  def fn(a, b):
    jax.debug.callback(ran.append, a)
    return jaxgemm.matmul(a, b)

  ran = []
  a, b = jnp.ones((64, 96), "bfloat16"), jnp.ones((96, 128), "bfloat16")
  with jaxgemm.emulate():  # Lowered for this CPU, as the callback needs.
    assert tuner.collect(fn, a, b, device=H200) == [NN]
    assert tuner.collect(functools.partial(fn, b=b), a, device=H200) == [NN]
  assert not ran


def test_control_flow_is_looked_into():
  weights = shape(3, 96, 96)

  def scanned(x, w):
    step = lambda carry, layer: (jaxgemm.matmul(carry, layer), None)
    return lax.scan(step, x, w)[0]

  def branches(x, w):
    square = lambda x: jaxgemm.matmul(x, w[0])
    tall = lambda x: jaxgemm.matmul(x[:32], w[0]).repeat(2, 0)
    x = lax.cond(x[0, 0] > 0, square, tall, x)
    return lax.while_loop(lambda x: x[0, 0] < 0, lambda x: scanned(x, w), x)

  square = Problem(64, 96, 96)
  assert collected(scanned, A, weights) == [square]
  assert sorted(collected(branches, A, weights), key=str) == sorted(
      [square, dataclasses.replace(square, m=32)], key=str
  )
  gradient = jax.grad(lambda x, w: jnp.sum(scanned(x, w).astype(jnp.float32)), (0, 1))
  layouts = {problem.layouts for problem in collected(gradient, A, weights)}
  assert layouts == {"NN", "NT", "TN"}


def test_remat_and_custom_derivatives_are_looked_into():
  @jax.checkpoint
  def block(a, b):
    return jnp.sin(jaxgemm.matmul(a, b).astype(jnp.float32))

  gradient = jax.grad(lambda a, b: jnp.sum(block(a, b)), (0, 1))
  assert set(collected(gradient, A, B)) == {NN, NT, TN}

  @jax.custom_vjp
  def doubled(a, b):
    return jaxgemm.matmul(a, b)

  doubled.defvjp(
      lambda a, b: (doubled(a, b), (a, b)),
      lambda saved, ct: (jaxgemm.matmul(ct, saved[1].T), jnp.zeros_like(saved[1])),
  )
  gradient = jax.grad(lambda a, b: jnp.sum(doubled(a, b).astype(jnp.float32) ** 2))
  assert set(collected(gradient, A, B)) == {NN, NT}


def test_batches_are_found_as_they_are_folded():
  assert collected(jax.vmap(jaxgemm.matmul, (0, None)), shape(8, 64, 96), B) == [
      dataclasses.replace(NN, m=512)
  ]
  (problem,) = collected(jax.vmap(jaxgemm.matmul), shape(8, 64, 96), shape(8, 96, 128))
  assert problem == dataclasses.replace(NN, batch=8)


def test_a_shard_map_has_the_problems_of_its_shards():
  mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = PartitionSpec("x", None)
  fn = jax.shard_map(
      jaxgemm.matmul, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
  )
  assert collected(fn, A, B) == [dataclasses.replace(NN, m=16)]


def test_what_jit_shards_is_found_by_compiling(monkeypatch):
  """The partitioner asks for the shards' plans; a CPU then computes them by XLA."""

  def planned_but_by_xla(product, *operands):
    lowering.local_plan(product, *operands)
    return lowering.xla_product(product, *operands, cuda=False)

  monkeypatch.setattr(primitive, "local_product", planned_but_by_xla)
  monkeypatch.setattr(tuner.jax, "default_backend", lambda: "gpu")
  registry = importlib.import_module("jax._src.interpreters.mlir")
  monkeypatch.setitem(  # As on a GPU.
      registry._platform_specific_lowerings["cpu"], primitive.gemm_p,
      registry.LoweringRuleEntry(primitive._lower_kernels, True)
      if hasattr(registry, "LoweringRuleEntry") else primitive._lower_kernels,
  )
  mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = NamedSharding(mesh, PartitionSpec("x", None))
  a = jax.ShapeDtypeStruct(A.shape, A.dtype, sharding=rows)
  whole = NamedSharding(mesh, PartitionSpec())
  b = jax.ShapeDtypeStruct(B.shape, B.dtype, sharding=whole)
  assert collected(jaxgemm.matmul, a, b) == [dataclasses.replace(NN, m=16)]


def test_what_the_caller_has_chosen_is_left_alone():
  named = functools.partial(jaxgemm.matmul, implementation="blocked")
  assert collected(named, A, B) == []
  assert collected(functools.partial(jaxgemm.matmul, config=BlockedConfig()), A, B) == []
  assert collected(functools.partial(jaxgemm.matmul, implementation="xla"), A, B) == []
  assert collected(jaxgemm.matmul, shape(8, 8, dtype="int8"), shape(8, 8, dtype="int8")
                   ) == []

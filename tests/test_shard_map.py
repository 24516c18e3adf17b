"""Products within jax.shard_map: of shards, with and without kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from pallas_kernels.configs import BlockedConfig
from tests.product_cases import normal
from tests.sharding_cases import (
  loss_of,
  make_mesh,
)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma, jit, rng):
  """Also where only one operand varies, and with a psum over k."""
  mesh = make_mesh(shape=(4,))
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
    ours = jax.grad(loss_of(f(jaxgemm.matmul)), (0, 1))(a, b)
    theirs = jax.grad(loss_of(jnp.matmul), (0, 1))(a, b)
    for x, y in zip(ours, theirs, strict=True):
      assert reference.relative_error(x, y) < 1e-5


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_runs_kernels(check_vma, rng):
  """Each device its own, forward and backward; emulated, and lowered for CUDA."""
  mesh = make_mesh(shape=(4,))
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
  mesh = make_mesh()
  a, b = normal(rng, 64, 128), normal(rng, 128, 32)
  f = jax.jit(jax.shard_map(
      jaxgemm.matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"),
      axis_names={"x"},
  ))
  a = jax.device_put(a, NamedSharding(mesh, P("x", "y")))
  b = jax.device_put(b, NamedSharding(mesh, P("y")))
  with jaxgemm.emulate():
    assert reference.relative_error(f(a, b), reference.matmul(a, b)) < 1e-6
    ours = jax.grad(loss_of(f), (0, 1))(a, b)
  theirs = jax.grad(loss_of(jnp.matmul), (0, 1))(np.asarray(a), np.asarray(b))
  for x, y in zip(ours, theirs, strict=True):
    assert reference.relative_error(x, y) < 1e-5

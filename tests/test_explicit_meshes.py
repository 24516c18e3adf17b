"""Products on explicit meshes: types, values and gradients are those of lax."""

from __future__ import annotations

from collections import Counter
import contextlib

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from tests.product_cases import normal, products
from tests.sharding_cases import (
  BATCHES,
  FOLDED,
  MATRICES,
  SHARED,
  loss_of,
  make_mesh,
)


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
  mesh = make_mesh(AxisType.Explicit)
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
    truths = (jax.jit(theirs)(a, b), *jax.jit(jax.grad(loss_of(theirs), (0, 1)))(a, b))
    with jaxgemm.emulate() if emulated else jaxgemm.target("NVIDIA H200"):
      results = (jax.jit(ours)(a, b), *jax.jit(jax.grad(loss_of(ours), (0, 1)))(a, b))
      text = jax.jit(ours).lower(a, b).as_text()
  # The product's own result is annotated, not only what jit returns.
  assert "sdy.sharding_constraint" in text
  for result, truth in zip(results, truths, strict=True):
    assert jax.typeof(result) == jax.typeof(truth)
    assert reference.relative_error(result, truth) < 1e-5


def test_out_sharding_of_a_result_that_is_transposed(rng):
  mesh = make_mesh(AxisType.Explicit)
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
  mesh = make_mesh(AxisType.Explicit)
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
  mesh = make_mesh(axis_type)
  values = normal(rng, 24, 16), normal(rng, *size)
  of = lambda matmul: lambda a, x: jax.vmap(matmul, (None, 0))(a, x)
  grads = lambda matmul: jax.jit(jax.grad(loss_of(of(matmul)), (0, 1)))
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


@pytest.mark.parametrize("multiply", [jnp.matmul, jaxgemm.matmul])
def test_accelerate_keeps_types_on_explicit_meshes(multiply, rng):
  """And values: what lies in another way is not fused, nor XLA's products ours."""
  mesh = make_mesh(AxisType.Explicit)
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

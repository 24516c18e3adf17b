"""Functions that are exported for sizes that nobody knows yet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from tests.product_cases import normal

_SYMBOLIC = {
    "matmul": (jaxgemm.matmul, "b,8", "8,16"),
    "gemm": (lambda a, b, c: jaxgemm.gemm(a, b, c, beta=1), "b,8", "8,16", "b,16"),
    "transposed batch": (
        lambda a, b: jaxgemm.einsum("bkh,ckd->bhcd", a, b), "b,32,s", "512,32,16"),
    "vmap": (jax.vmap(jaxgemm.matmul, (None, 0)), "b,32", "4,32,16"),
    "linear": (
        lambda x, w, r: jaxgemm.linear(x, w, activation="silu", residual=r),
        "b,s,8", "8,16", "b,s,16"),
    "mlp": (
        lambda x, w, v, r: jaxgemm.mlp(x, w, v, residual=r), "b,8", "8,16", "16,8",
        "b,8"),
    "gradient": (
        jax.grad(lambda x, w, v: jnp.sum(jaxgemm.gated_linear(x, w, v) ** 2), (0, 1)),
        "b,8", "8,16", "8,16"),
    "loss": (
        jax.grad(lambda x, w: jaxgemm.linear_cross_entropy(
            x, w, jnp.zeros(x.shape[:-1], jnp.int32)).sum(), (0, 1)), "b,8", "8,100"),
    "loss of any number of classes": (
        lambda x, w: jaxgemm.linear_cross_entropy(
            x, w, jnp.zeros(x.shape[:-1], jnp.int32)), "b,8", "8,c"),
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", _SYMBOLIC)
def test_symbolic_shapes_are_exported(name, platform, rng):
  """Their products are XLA's: no plan knows the sizes."""
  run, *shapes = _SYMBOLIC[name]
  scope = jax.export.SymbolicScope()
  args = [
      jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), "float32")
      for shape in shapes
  ]
  with jaxgemm.target("NVIDIA H200"):
    exported = jax.export.export(jax.jit(run), platforms=[platform])(*args)
  if platform == "cuda":
    assert "mosaic_gpu" not in exported.mlir_module()
    return
  sizes = {"b": 6, "s": 5, "c": 100}
  values = [
      normal(rng, *(sizes.get(one) or int(one) for one in shape.split(",")))
      for shape in shapes
  ]
  found, wanted = exported.call(*values), run(*values)
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, wanted
  )


def test_a_plan_of_symbolic_sizes():
  (rows,) = jax.export.symbolic_shape("b")
  a, b = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, 64), (64, 96)))
  with jaxgemm.target("NVIDIA H200"):
    plan = jaxgemm.explain(a, b)
  assert plan.kernel == "xla" and "symbolic" in plan.reason

"""Activations: callables in kernels, by operations that Mosaic has."""

from __future__ import annotations

import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from pallas_kernels import activations

CALLABLES = {
    "swish": lambda x: x * lax.logistic(x),
    "cube": lambda x: x * x * x,
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    **{
        name: getattr(jax.nn, name)
        for name in (
            "relu", "relu6", "gelu", "silu", "hard_swish", "leaky_relu", "elu", "selu",
            "celu", "softplus", "mish", "log_sigmoid", "soft_sign", "hard_tanh",
        )
    },
}


def loss(activation, x, w):
  out = jaxgemm.linear(x, w, activation=activation)
  return jnp.sum(out.astype(jnp.float32) ** 2)


@pytest.mark.parametrize("name", CALLABLES)
def test_layers_and_gradients_lower(name):
  """With those that have derivatives of their own, and those that use x twice."""
  x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((512, 1024), (1024, 2048)))
  run = jax.value_and_grad(lambda x, w: loss(CALLABLES[name], x, w), (0, 1))
  with jaxgemm.target("NVIDIA H200"):
    text = jax.export.export(jax.jit(run), platforms=["cuda"])(x, w).mlir_module()
  assert "jaxgemm_persistent" in text


@pytest.mark.parametrize(
    "name",
    ["relu", "mish", *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("swish", "elu", "exact gelu")
    )],
)
def test_gradients_in_emulation(name, rng):
  x, w = (
      jnp.asarray(rng.standard_normal(shape) / 4, "bfloat16")
      for shape in ((64, 96), (96, 64))
  )
  run = jax.grad(lambda x, w: loss(CALLABLES[name], x, w), (0, 1))
  wanted = run(x, w)
  with jaxgemm.emulate():
    found = run(x, w)
  for one, want in zip(found, wanted, strict=True):
    assert reference.relative_error(one, want) < 1e-2


def _erf(x):
  return np.vectorize(math.erf)(x)


@pytest.mark.parametrize(
    ("name", "truth", "least", "most"),
    [("log1p", np.log1p, -0.999, 1e30), ("expm1", np.expm1, -50.0, 80.0),
     ("erfc", lambda x: 1.0 - _erf(x), -5.0, 2.0), ("erf", _erf, -5.0, 5.0)],
)
def test_operations_that_mosaic_lacks(name, truth, least, most, rng):
  x = np.concatenate([
      rng.uniform(max(least, -5.0), min(most, 5.0), 4000),
      np.geomspace(1e-30, most, 2000), -np.geomspace(1e-30, -least, 2000), [0.0],
  ]).astype(np.float32)
  found = np.asarray(jax.jit(activations._REPLACED[name])(x), np.float64)
  wanted = truth(x.astype(np.float64))
  exact_near_0 = name in ("log1p", "expm1")
  size = np.abs(wanted) if exact_near_0 else np.maximum(np.abs(wanted), 1.0)
  assert np.all(np.abs(found - wanted) <= 4e-7 * size)


@pytest.mark.parametrize("power", [-2, -1, 0, 1, 3])
def test_integer_powers(power):
  x = jnp.asarray([2.0, -0.5])
  np.testing.assert_array_equal(activations._integer_pow(x, y=power), x**power)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_activation_of_a_traced_value(wrap):
  """Its derivative by that value would be lost."""
  x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
  run = lambda beta: jaxgemm.linear(x, w, activation=lambda z: z * beta).sum()
  with pytest.raises(ValueError, match="closes over a traced value"):
    wrap(jax.grad(run))(2.0)
  assert run(2.0) == 48.0


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu"])
def test_sigmoids_of_any_unit(name):
  """A kernel's sigmoid takes x in a unit of its own, which the constants hold."""
  of_two = activations.Arithmetic(
      lambda x: 1.0 / (1.0 + jnp.exp2(x)), activations.ARRAYS.cdf,
      unit=activations.APPROXIMATE.unit,
  )
  x = jnp.linspace(-12.0, 12.0, 4001)
  for function in (activations.apply, activations.slope):
    wanted, found = (function(name, x, by) for by in (activations.ARRAYS, of_two))
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "gelu_exact"])
def test_slopes_have_ended_far_out(name):
  """No product of 0 and what overflows: the cube of 1e15 does."""
  x = jnp.array([-1e15, -1e4, -200.0, 200.0, 1e4, 1e15])
  end = 0.0 if name == "sigmoid" else 1.0
  assert activations.slope(name, x).tolist() == [0.0] * 3 + [end] * 3

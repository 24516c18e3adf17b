"""Operands, and looks into jaxprs, that the tests of the library share."""

from __future__ import annotations

from collections import Counter
import re

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

import jaxgemm
from jaxgemm import reference
from jaxgemm.dims import Dims
from jaxgemm.product import Product


def normal(rng: np.random.Generator, *shape: int, dtype="float32") -> jax.Array:
  return jnp.asarray(rng.standard_normal(shape), dtype)


def equations(jaxpr) -> list[core.JaxprEqn]:
  """The equations of a jaxpr and of all that are nested in them."""
  found = []
  for eqn in jaxpr.eqns:
    found.append(eqn)
    for sub in core.jaxprs_in_params(eqn.params):
      found += equations(sub)
  return found


def products(function, *args) -> list[Product]:
  """The parameters of every gemm_p that the function binds."""
  eqns = equations(jax.make_jaxpr(function)(*args).jaxpr)
  return [eqn.params["product"] for eqn in eqns if eqn.primitive.name == "jaxgemm"]


def product_dims(function, *args) -> list[Dims]:
  return [product.dims for product in products(function, *args)]


def count_primitives(function, *args) -> Counter:
  eqns = equations(jax.make_jaxpr(function)(*args).jaxpr)
  return Counter(eqn.primitive.name for eqn in eqns)


def cuda_kernels(function, *args) -> Counter:
  """What computes the products of a function, from its text lowered for an H200."""
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
  with jaxgemm.target("NVIDIA H200"):
    exported = jax.export.export(jax.jit(function), platforms=["cuda"])(*shapes)
  text = exported.mlir_module()
  calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
  names = [re.findall(r"jaxgemm_([a-z_]+)_mosaic_gpu", line) for line in calls]
  kernels = Counter(name for found in names for name in set(found))
  kernels["xla"] = text.count("stablehlo.dot_general")
  return +kernels


def assert_close(result, truth, dtype):
  assert result.dtype == dtype
  bound = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}[jnp.dtype(dtype).name]
  assert reference.relative_error(result, truth) <= bound


def in_float64(function, *trees):
  """The result for the same operands in float64."""
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), trees)
    return jax.tree.map(np.asarray, function(*wide))


def assert_as_good(found, wanted, truth):
  """No array is more than twice as far off the truth as the one that is wanted."""
  for a, b, exact in zip(*map(jax.tree.leaves, (found, wanted, truth)), strict=True):
    error, baseline = (reference.relative_error(x, exact) for x in (a, b))
    assert error <= 2 * baseline

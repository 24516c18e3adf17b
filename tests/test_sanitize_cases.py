"""The cases that compute-sanitizer watches."""

from __future__ import annotations

import jax
import pytest

from experiments import sanitize_cases
from experiments.sanitize_cases import CASES
from pallas_kernels import GROUPED_KERNELS, KERNELS, triton

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


@pytest.mark.parametrize("name", CASES)
def test_cases_lower_to_their_kernels(name):
  case = CASES[name]
  assert case.reason is None
  if case.kernel == triton.NAME:
    return  # jax-triton compiles for a GPU that is there.
  launch = jax.jit(lambda *x: case.launch(*x))
  module = jax.export.export(launch, platforms=["cuda"])(*case.types).mlir_module()
  assert f"jaxgemm_{case.kernel}" in module


def test_every_kernel_has_cases():
  wanted = {*KERNELS, *GROUPED_KERNELS, "cotangents", "losses", "norm_gradients"}
  if triton.missing_package() is not None:
    wanted.remove(triton.NAME)
  assert {case.kernel for case in CASES.values()} == wanted


@pytest.mark.parametrize(
    "name",
    [
        name for name in CASES
        if "registers" in name
        or name in ("direct odd", "blocked odd", "persistent padded")
    ],
)
def test_register_loads_end_with_their_arrays(name):
  """Though their rows begin anywhere; else initcheck reports what lies behind."""
  for x in CASES[name].types:
    assert x.dtype.itemsize * x.shape[-1] % 16
    assert x.dtype.itemsize * x.size % 16 == 0


def test_operands_are_those_of_the_case():
  for name in ("persistent packed", "scaled blocks", "losses", "int8"):
    found = sanitize_cases.operands(CASES[name])
    wanted = jax.tree.leaves(CASES[name].types)
    for x, y in zip(jax.tree.leaves(found), wanted, strict=True):
      assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_without_a_gpu_there_is_nothing_to_watch():
  if jax.default_backend() == "gpu":
    pytest.skip("there is one")
  with pytest.raises(SystemExit, match="Hopper"):
    sanitize_cases.main([])

"""The kernels that only the laboratory has: emulated, and lowered for CUDA."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from experiments.lab import (
  kernels_one_tile,
  kernels_rungs,
  kernels_stream_k,
  kernels_strided,
  kernels_unshared,
)
from jaxgemm import reference
from pallas_kernels import compat
from pallas_kernels.configs import PersistentConfig
from tests.kernel_cases import (
  baseline_error,
  make_problem,
  operand_types,
  random_operands,
  truth,
)

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

Rungs, Strided = kernels_rungs.RungsConfig, kernels_strided.StridedConfig
StreamK = kernels_stream_k.StreamKConfig
MORE = (pytest.mark.slow, pytest.mark.more)


SMALL = (128, 64, 192)
EMULATED = [
    (kernels_unshared, (128, 64, 24), "bfloat16", kernels_unshared.UnsharedConfig()),
    (kernels_unshared, (64, 64, 24), "float32", kernels_unshared.UnsharedConfig()),
    (kernels_one_tile, SMALL, "bfloat16", PersistentConfig(64, 64, 64, 2, 1)),
    (kernels_rungs, SMALL, "bfloat16", Rungs(64, 64)),
    (kernels_rungs, SMALL, "bfloat16", Rungs(64, 64, num_stages=3, swizzle=64)),
    (kernels_rungs, SMALL, "bfloat16", Rungs(64, 64, num_stages=2, swizzle=32)),
    (kernels_rungs, SMALL, "bfloat16", Rungs(64, 64, num_stages=2, sums="shared")),
    (kernels_rungs, SMALL, "bfloat16", Rungs(64, 64, num_stages=2, sums="memory")),
    (kernels_rungs, SMALL, "bfloat16", Rungs(64, 64, cached_output=False)),
    (kernels_rungs, (64, 64, 96), "float32", Rungs(64, 64, 32, 2, 32, "shared")),
    (kernels_strided, (130, 72, 450), "bfloat16", Strided(64, 64, splits=3)),
    pytest.param(
        kernels_strided, (64, 72, 450), "bfloat16",
        Strided(64, 64, num_stages=2, splits=2, strided=False), marks=MORE,
    ),
    # Tiles whole and cut, cut by one border and by several, a last CTA with less.
    (kernels_stream_k, (72, 136, 320), "bfloat16", StreamK(64, 64, 64, 2, 1, ctas=4)),
    pytest.param(
        kernels_stream_k, (64, 64, 640), "bfloat16", StreamK(64, 64, 64, 2, 1, ctas=5),
        marks=MORE,
    ),
    pytest.param(
        kernels_stream_k, (128, 128, 256), "bfloat16", StreamK(128, 128, 64, 2, 2, 2),
        marks=MORE,
    ),
    pytest.param(
        kernels_stream_k, (64, 64, 160), "float32", StreamK(64, 64, 32, 2, 1, ctas=3),
        marks=MORE,
    ),
]


@pytest.mark.parametrize(("module", "size", "dtype", "config"), EMULATED)
def test_kernels_in_emulation(module, size, dtype, config):
  problem = make_problem(*size, dtype=dtype)
  assert module.supports(problem, config) is None
  inputs = random_operands(problem)
  result = compat.run_interpreted(
      lambda params: module.launch(inputs, problem, config, num_sms=4, interpret=params)
  )
  assert result.shape == problem.out_shape and result.dtype == problem.out_dtype
  error = reference.relative_error(result, truth(problem, inputs))
  assert error <= 2 * baseline_error(problem, inputs)


LOWERED = [
    (kernels_unshared, kernels_unshared.UnsharedConfig(), 1),
    (kernels_one_tile, PersistentConfig(128, 128, 64), 1),
    *((kernels_rungs, Rungs(num_stages=4, **fields), 1) for fields in (
        {}, dict(sums="shared"), dict(sums="memory"), dict(swizzle=64),
        dict(swizzle=32), dict(cached_output=False),
    )),
    (kernels_strided, Strided(), 1),
    (kernels_stream_k, StreamK(), 2),
]


@pytest.mark.parametrize(("module", "config", "kernels"), LOWERED)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=MORE)])
def test_kernels_lower(module, config, kernels, dtype):
  problem = make_problem(512, 512, 16384, dtype=dtype)
  if dtype == "float32" and hasattr(config, "tile_k"):
    config = dataclasses.replace(config, tile_k=32)
  if module is kernels_strided and dtype == "float32":
    assert "16-bit" in module.supports(problem, config)
    return
  assert module.supports(problem, config) is None
  launch = lambda *x: module.launch(x, problem, config, num_sms=132)
  types = [jax.ShapeDtypeStruct(*one) for one in operand_types(problem)]
  text = jax.export.export(jax.jit(launch), platforms=["cuda"])(*types).mlir_module()
  name = "persistent" if module is kernels_one_tile else module.NAME
  assert f"jaxgemm_{name}" in text
  assert text.count("custom_call @mosaic_gpu") == kernels


def test_what_kernels_cannot_serve():
  problem = make_problem(512, 512, 512)
  assert "swizzled by 32, 64 or" in kernels_rungs.supports(problem, Rungs(swizzle=0))
  odd = make_problem(500, 512, 512)
  assert "must divide" in kernels_rungs.supports(odd, Rungs())
  assert "must divide" in kernels_unshared.supports(
      odd, kernels_unshared.UnsharedConfig()
  )
  batch = make_problem(64, 64, 64, batch=2)
  for module, config in ((kernels_strided, Strided()), (kernels_stream_k, StreamK())):
    assert "one" in module.supports(batch, config)


def test_units_are_cut_evenly():
  problem = make_problem(512, 512, 4096)
  units = kernels_stream_k.Units.of(problem, StreamK(), 132)
  assert (units.total, units.k_steps, units.per) == (1024, 64, 8)
  assert (units.ctas, units.cuts) == (128, True)
  assert not kernels_stream_k.Units.of(problem, StreamK(ctas=16), 132).cuts

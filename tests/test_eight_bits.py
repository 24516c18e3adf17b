"""Products of 8-bit operands, in emulation and lowered for CUDA."""

from __future__ import annotations

import numpy as np
import pytest

from jaxgemm import reference
from pallas_kernels import KERNELS
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem, mostly_slow, small_config

OUT = {"float8_e4m3fn": "bfloat16", "float8_e5m2": "float32", "int8": "int32"}


def eight_bits(m, n, k, layouts, dtype, **fields):
  fields.setdefault("out_dtype", OUT[dtype])
  return make_problem(m, n, k, layouts, dtype, **fields)


def check(kernel, problem, config):
  operands = kernel_cases.random_operands(problem)
  result = np.asarray(
      kernel_cases.emulate(kernel, problem, config, operands, num_sms=2)
  )
  truth = kernel_cases.truth(problem, operands)
  if problem.dtype == "int8":
    np.testing.assert_array_equal(result, truth)
  else:
    limit = max(2 * kernel_cases.baseline_error(problem, operands), 1e-7)
    assert reference.relative_error(result, truth) <= limit


@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize("layouts", mostly_slow(LAYOUTS))
def test_layouts(layouts, dtype):
  problem = eight_bits(133, 203, 141, layouts, dtype)
  check("persistent", problem, small_config("persistent", dtype))


@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize("kernel", ["blocked", "pipelined"])
def test_simpler_kernels(kernel, dtype):
  check(kernel, eight_bits(128, 128, 256, "NT", dtype), small_config(kernel, dtype))


@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more(
        [dict(cluster_m=2), dict(wg_dim="tile", tile_n=64), dict(promote=1),
         dict(tile_n=208, num_stages=2)],
    ),
    ids=str,
)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", kernel_cases.mostly_more(["float8_e4m3fn", "int8"]))
def test_configs(dtype, fields):
  problem = eight_bits(264, 272, 400, "NN", dtype, batch=2)
  check("persistent", problem, small_config("persistent", dtype, **fields))


def test_split_k():
  problem = eight_bits(72, 136, 1024, "NT", "float8_e4m3fn", out_dtype="float16")
  for cluster_k in (1, 2):
    config = small_config("split_k", problem.dtype, cluster_k=cluster_k)
    check("split_k", problem, config)


@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_they_lower(layouts, dtype):
  """An operand is transposed in a pass where wgmma wants it, and nowhere else."""
  text = lowered(
      "persistent", eight_bits(512, 768, 1024, layouts, dtype),
      small_config("persistent", dtype),
  )
  assert text.count("stablehlo.transpose") == (layouts[0] == "T") + (layouts[1] == "N")


@pytest.mark.parametrize(
    ("kernel", "fields", "named"),
    [
        ("persistent", dict(dtype="int8", out_dtype="float32"), "have one of int32"),
        ("persistent", dict(dtype="int8", epilogue=Epilogue(0.5)), "no epilogue"),
        ("persistent", dict(dtype="float8_e5m2", out_dtype="int32"), "int32"),
        ("split_k", dict(dtype="int8"), "float32 sums"),
        ("direct", dict(dtype="float8_e5m2"), "16-bit operands"),
    ],
)
def test_supports_names_the_constraint(kernel, fields, named):
  problem = eight_bits(256, 256, 1024, "NT", **fields)
  config = small_config(kernel, fields["dtype"])
  assert named in KERNELS[kernel].supports(problem, config)

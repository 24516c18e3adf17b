"""The portable kernel: its numbers in Triton's interpreter, its plans, its lowering.

What needs Triton or jax-triton is skipped where they are missing; what needs a GPU
runs on any that the kernel serves.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import device, plan, reference, table, triton_heuristics
from pallas_kernels import triton
from pallas_kernels.configs import TritonConfig
from pallas_kernels.problem import Epilogue, Problem
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, make_problem, small_config

H200 = device.known_device("NVIDIA H200")
A100 = device.known_device("NVIDIA A100-SXM4-80GB")
RAGGED = (133, 203, 141)  # Odd, and no multiple of any tile.
FULL = (128, 192, 256)


def _import_error() -> str:
  """Why jax_triton cannot be imported, or nothing: it refuses a JAX without CUDA."""
  try:
    import jax_triton  # noqa: F401
  except ImportError as error:
    return str(error).partition("\n")[0] or "missing"
  return ""


needs_packages = pytest.mark.skipif(
    triton.missing_package() is not None,
    reason=f"the package {triton.missing_package()} is not installed",
)


@functools.cache
def _lowering_refused() -> str:
  return str(triton.missing_package() or _import_error())


@pytest.fixture
def can_lower():
  if _lowering_refused():
    pytest.skip(f"jax_triton cannot be imported: {_lowering_refused()}")


@pytest.fixture(params=[None, "jax_triton"], ids=["installed", "missing"])
def package(request, monkeypatch):
  """The package that is missing, or None; whatever is installed in truth."""
  monkeypatch.setattr(triton, "missing_package", lambda: request.param)
  plan.make_plan.cache_clear()
  yield request.param
  plan.make_plan.cache_clear()


@pytest.fixture
def installed(monkeypatch):
  monkeypatch.setattr(triton, "missing_package", lambda: None)
  plan.make_plan.cache_clear()
  yield
  plan.make_plan.cache_clear()


# -- Numbers, on any machine ---------------------------------------------------------


@needs_packages
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("size", [FULL, RAGGED], ids=["full", "ragged"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_layouts_and_dtypes(layouts, dtype, size, splits):
  config = small_config("triton", dtype, splits=splits)
  kernel_cases.check("triton", make_problem(*size, layouts, dtype), config)


@needs_packages
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("c_dtype", ["float32", "bfloat16"])
def test_alpha_beta_c(c_dtype, splits):
  problem = make_problem(*RAGGED, epilogue=Epilogue(-0.5, 2.0, c_dtype))
  kernel_cases.check("triton", problem, small_config("triton", splits=splits))


@needs_packages
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "shared", [{}, {"lhs_batched": False}, {"rhs_batched": False}], ids=str
)
def test_batch(shared, splits):
  problem = make_problem(70, 130, 200, "TN", batch=3, **shared)
  kernel_cases.check("triton", problem, small_config("triton", splits=splits))


@needs_packages
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (1, 200, 7), (200, 1, 65), (3, 5, 130), (64, 64, 1)], ids=str
)
def test_sizes_below_one_tile(size):
  kernel_cases.check("triton", make_problem(*size), small_config("triton"))


@needs_packages
@pytest.mark.parametrize("promote", [1, 2, 5])
def test_promoted_sums(promote):
  """Also where the last part of k is shorter, or the first is all of it."""
  problem = make_problem(70, 96, 64 * 5 + 8, out_dtype="float32")
  for splits in (1, 2):
    config = small_config("triton", promote=promote, splits=splits)
    kernel_cases.check("triton", problem, config)


@needs_packages
@pytest.mark.parametrize("splits", [2, 7, 18])
def test_parts_that_are_short_or_empty(splits):
  problem = make_problem(60, 70, 64 * 17 + 3, "TT")
  kernel_cases.check("triton", problem, small_config("triton", splits=splits))


@needs_packages
@pytest.mark.parametrize("grid_width", [1, 3, 8])
def test_every_tile_is_computed(grid_width):
  """In bands of any width; what no CTA stores stays NaN in the interpreter."""
  config = TritonConfig(16, 16, 16, num_warps=1, grid_width=grid_width)
  kernel_cases.check("triton", make_problem(16 * 7, 16 * 5, 16), config)


@needs_packages
def test_the_function_is_emulated():
  rng = np.random.default_rng(0)
  a = jnp.asarray(rng.standard_normal((65, 40)), jnp.bfloat16)
  b = jnp.asarray(rng.standard_normal((40, 33)), jnp.bfloat16)
  with jaxgemm.emulate(A100.kind):
    result = jax.jit(jaxgemm.matmul)(a, b)
    grad = jax.grad(lambda a: jaxgemm.matmul(a, b).astype(jnp.float32).sum())(a)
  a64, b64 = (np.asarray(x).astype(np.float64) for x in (a, b))
  assert reference.relative_error(result, a64 @ b64) < 3e-3
  assert reference.relative_error(grad, np.ones((65, 33)) @ b64.T) < 3e-3


# -- What it refuses -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(tile_m=96), "tile_m=96"),
        (dict(tile_n=512), "tile_n=512"),
        (dict(tile_k=8), "tile_k=8"),
        (dict(num_warps=3), "num_warps=3"),
        (dict(num_stages=0), "num_stages=0"),
        (dict(grid_width=0), "grid_width=0"),
        (dict(promote=-1), "promote=-1"),
        (dict(splits=0), "splits=0"),
        (dict(splits=5), "k=256"),
        (dict(tile_m=256, tile_n=256), "accumulator of 256x256"),
        (dict(tile_m=128, tile_n=256, num_warps=8, promote=1), "promoted sum of 128x256"),
        (dict(tile_m=128, tile_n=128, num_stages=8), "shared memory"),
    ],
)
def test_supports_names_the_constraint(fields, named):
  problem = make_problem(512, 512, 256)
  reason = triton.supports(problem, small_config("triton", **fields))
  assert reason is not None and named in reason


def test_supports_refuses_other_dtypes():
  problem = make_problem(256, 256, 256)
  assert triton.supports(problem, TritonConfig()) is None
  for fields, named in [
      (dict(dtype="int8"), "int8"),
      (dict(out_dtype="float64"), "float64"),
      (dict(algorithm="tf32_f32"), "tf32_f32"),
      (dict(m=0), "m=0"),
  ]:
    reason = triton.supports(dataclasses.replace(problem, **fields), TritonConfig())
    assert named in reason


# -- Plans ---------------------------------------------------------------------------


def test_other_gpus_get_it_if_it_is_installed(package):
  problem = make_problem(4096, 4096, 4096)
  for kind, known in device.KNOWN_DEVICES.items():
    chosen = plan.make_plan(problem, known)
    if device.supported(known):
      assert chosen.kernel not in ("triton", "xla")
    elif package is None:
      assert (chosen.kernel, chosen.source) == ("triton", "heuristic"), kind
      reason = triton_heuristics.supports(problem, chosen.config, known)
      assert reason is None
    else:
      assert (chosen.kernel, chosen.source) == ("xla", "fallback"), kind
      assert "pip install jaxgemm[triton]" in chosen.reason


def test_by_name(package):
  problem = make_problem(1024, 1024, 14336)
  config = TritonConfig(64, 64, 64, num_warps=4)
  for where in (H200, A100):
    for named in (dict(implementation="triton"), dict(config=config)):
      if package is not None:
        with pytest.raises(ValueError, match=r"jax_triton: pip install jaxgemm\[triton"):
          plan.make_plan(problem, where, **named)
        continue
      chosen = plan.make_plan(problem, where, **named)
      assert (chosen.kernel, chosen.source) == ("triton", "override")
      assert chosen.config == named.get("config", chosen.config)


def test_where_it_cannot_run(installed):
  problem = make_problem(256, 256, 256)
  with pytest.raises(ValueError, match="capability 8.0.*default device is none.*emulate"):
    plan.make_plan(problem, None, implementation="triton")
  turing = dataclasses.replace(A100, kind="Tesla T4", compute_capability="7.5")
  assert plan.make_plan(problem, turing).kernel == "xla"
  with pytest.raises(ValueError, match="Tesla T4 has 7.5"):
    plan.make_plan(problem, turing, implementation="triton")
  config = TritonConfig(128, 256, 64, num_stages=4)
  assert plan.make_plan(problem, A100, config=config).config == config
  small = device.known_device("NVIDIA L4")
  with pytest.raises(ValueError, match="101376 of one CTA on NVIDIA L4"):
    plan.make_plan(problem, small, config=config)


@pytest.mark.parametrize("kind", device.KNOWN_DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_ordinary_problem_has_candidates(kind, dtype):
  known = device.known_device(kind)
  for size in [(1, 4096, 4096), (7, 9, 3), (1024, 1024, 14336), (8192, 50257, 768)]:
    for out_dtype in (dtype, "float32"):
      problem = make_problem(*size, "TN", dtype, out_dtype=out_dtype)
      found = triton_heuristics.candidates(problem, known)
      assert found and found == tuple(sorted(found, key=lambda c: c.time_us))
      for candidate in found:
        assert triton_heuristics.supports(problem, candidate.config, known) is None
      forms = {c.config.num_stages > 1 for c in found}
      assert forms == {False, True}
      if dtype == "bfloat16" and out_dtype == "float32":
        assert all(c.config.promote for c in found)


def test_few_tiles_and_a_long_k_are_split():
  problem = make_problem(256, 256, 65536)
  for known in device.KNOWN_DEVICES.values():
    assert triton_heuristics.candidates(problem, known)[0].config.splits > 1


def test_the_tuner_weighs_it_on_hopper(package):
  problem = make_problem(1024, 1024, 1024)
  automatic = plan.candidates(problem, H200)
  everything = plan.candidates(problem, H200, everything=True)
  assert "triton" not in {c.kernel for c in automatic}
  assert everything[: len(automatic)] == automatic
  assert ("triton" in {c.kernel for c in everything}) == (package is None)


def test_rows_of_tables(package, monkeypatch):
  """A measured row counts, unless what it measured is no longer installed."""
  problem = make_problem(4096, 4096, 4096)
  evidence = tuple(dict.fromkeys(table.EVIDENCE, 1).items())
  row = table.Row(problem, "triton", TritonConfig(), evidence)
  monkeypatch.setattr(table, "_load", lambda kind: {problem: row})
  chosen = plan.make_plan(problem, H200)
  assert (chosen.source == "table") == (package is None)
  (parsed,) = table.parse({"device": "x", "rows": [table.as_json(row)]}, "x")
  assert parsed == row


def test_explain(installed, capsys):
  x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
  with jaxgemm.target(A100.kind):
    assert jaxgemm.explain(x, x).kernel == "triton"
  with jaxgemm.target(H200.kind):
    assert jaxgemm.explain(x, x, implementation="triton").kernel == "triton"
  assert capsys.readouterr().out.count("us  triton") > 8


def test_planning_imports_nothing_of_triton():
  code = (
      "import sys, jax, jaxgemm\n"
      "x = jax.ShapeDtypeStruct((64, 64), 'bfloat16')\n"
      "for kind in ('NVIDIA H200', 'NVIDIA L4'):\n"
      "  with jaxgemm.target(kind): jaxgemm.explain(x, x)\n"
      "assert not {'triton', 'jax_triton'} & set(sys.modules)\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# -- Lowered for GPUs that are not here ----------------------------------------------


def _lowered(problem: Problem, config: TritonConfig, capability: str) -> str:
  shapes = [(problem.lhs_shape, problem.dtype), (problem.rhs_shape, problem.dtype)]
  if problem.epilogue.has_c:
    shapes.append((problem.out_shape, problem.epilogue.c_dtype))
  operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
  launch = lambda *x: triton.launch(
      x, problem, config, num_sms=1, compute_capability=capability
  )
  traced = jax.jit(launch).trace(*operands)
  return traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


@pytest.mark.parametrize("capability", device.PORTABLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_lowers_for_every_gpu(can_lower, layouts, dtype, capability):
  epilogue = Epilogue(0.5, 2.0, "bfloat16")
  problem = make_problem(1000, 1000, 1000, layouts, dtype, epilogue=epilogue)
  text = _lowered(problem, small_config("triton", dtype), capability)
  assert "@triton_kernel_call" in text and "jaxgemm_triton" in text
  assert "stablehlo.transpose" not in text and "stablehlo.pad" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["NVIDIA H200", A100.kind, "NVIDIA GeForce RTX 5090"])
def test_every_candidate_lowers(can_lower, kind):
  """Each tile and depth that is weighed compiles."""
  known, seen = device.known_device(kind), set()
  for size in [(4096, 4096, 4096), (1024, 1024, 14336), (20, 50, 512)]:
    problem = make_problem(*size)
    for candidate in triton_heuristics.candidates(problem, known):
      key = dataclasses.replace(candidate.config, splits=min(candidate.config.splits, 2))
      if key not in seen:
        seen.add(key)
        text = _lowered(problem, candidate.config, known.compute_capability)
        assert "jaxgemm_triton" in text
  assert len(seen) > 20


def test_only_odd_strides_are_padded(can_lower):
  text = _lowered(make_problem(1001, 1024, 1000), TritonConfig(), "8.0")
  assert "stablehlo.pad" not in text  # Any number of rows.
  text = _lowered(make_problem(1001, 1001, 1001), TritonConfig(), "8.0")
  assert text.count("stablehlo.pad") == 2 and "stablehlo.transpose" not in text


def test_matmul_lowers_for_a_target(can_lower):
  x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
  with jaxgemm.target("NVIDIA L4"):
    traced = jax.jit(jaxgemm.matmul).trace(x, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
  assert "@triton_kernel_call" in text and "jaxgemm_triton" in text


# -- On a GPU ------------------------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.portable, needs_packages]


def _gpu(*cases):
  """Parametrize-like marks for a test on the GPU."""

  def mark(test):
    for one in (*cases, *on_gpu):
      test = one(test)
    return test

  return mark


def _launch(problem, config, operands) -> jax.Array:
  where = device.current_device()
  reason = triton_heuristics.supports(problem, config, where)
  assert reason is None, reason
  # A freed buffer of NaN where the result is likely to come to lie.
  jnp.full(problem.out_shape, jnp.nan, problem.out_dtype).block_until_ready()
  return jax.jit(lambda *x: triton.launch(x, problem, config, num_sms=1))(*operands)


def _check(problem, config, seed=0) -> None:
  operands = kernel_cases.random_operands(problem, seed)
  result = _launch(problem, config, operands)
  error = reference.relative_error(result, kernel_cases.truth(problem, operands))
  limit = 2 * kernel_cases.baseline_error(problem, operands)
  assert error <= max(limit, 1e-7), (problem, config, error, limit)


FORMS = {
    "blocked": dict(num_stages=1),
    "pipelined": dict(num_stages=3),
    "split_k": dict(num_stages=3, splits=3),
}


@_gpu(
    pytest.mark.parametrize(
        "size", [(256, 256, 256), (1000, 1000, 1000), (1001, 515, 333)], ids=str
    ),
    pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"]),
    pytest.mark.parametrize("layouts", LAYOUTS),
    pytest.mark.parametrize("form", FORMS),
)
def test_gpu_layouts_and_dtypes(form, layouts, dtype, size):
  config = small_config("triton", dtype, **FORMS[form])
  _check(make_problem(*size, layouts, dtype), config)


@_gpu(
    pytest.mark.parametrize("n", [96, 101]),
    pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"]),
    pytest.mark.parametrize("form", FORMS),
)
def test_gpu_epilogue_and_batch(form, out_dtype, n):
  for shared in ({}, {"lhs_batched": False}, {"rhs_batched": False}):
    problem = make_problem(
        130, n, 256, dtype="float16", batch=2, out_dtype=out_dtype,
        epilogue=Epilogue(0.5, -2.0, "float32"), **shared,
    )
    promote = int(out_dtype == "float32")  # See accumulate.py.
    _check(problem, small_config("triton", promote=promote, **FORMS[form]))


@_gpu(
    pytest.mark.parametrize(
        "size", [(1, 1, 1), (1, 4096, 4096), (200, 1, 65), (3, 5, 130), (16, 6144, 512)],
        ids=str,
    )
)
def test_gpu_thin_sizes(size):
  for layouts in LAYOUTS:
    problem = make_problem(*size, layouts)
    best = triton_heuristics.candidates(problem, device.current_device())[0]
    _check(problem, best.config)


@_gpu(
    pytest.mark.parametrize(
        "size", [(130, 96, 256), (512, 768, 2048), (256, 256, 16384)], ids=str
    )
)
def test_gpu_float32_results_are_sums_that_round(size):
  problem = make_problem(*size, out_dtype="float32")
  found = triton_heuristics.candidates(problem, device.current_device())
  for candidate in found[:4]:
    _check(problem, candidate.config)


@_gpu()
def test_gpu_every_run_gives_the_same_bits():
  for config in (TritonConfig(64, 64, 64, 4, 4, splits=16), TritonConfig()):
    problem = make_problem(256, 250, 16384)
    operands = kernel_cases.random_operands(problem)
    runs = [np.asarray(_launch(problem, config, operands)) for _ in range(20)]
    for run in runs[1:]:
      np.testing.assert_array_equal(runs[0], run)


@_gpu()
def test_gpu_offsets_of_64_bits():
  """An lhs of more than 2**31 elements; its last rows are those that would wrap."""
  m, k = 2**21 + 64, 1040
  lhs = jax.random.normal(jax.random.key(0), (1, m, k), jnp.bfloat16)
  rhs = jax.random.normal(jax.random.key(1), (1, k, 64), jnp.bfloat16)
  problem = make_problem(m, 64, k)
  result = _launch(problem, TritonConfig(128, 64, 64, 3, 4), (lhs, rhs))[:, -256:]
  last = make_problem(256, 64, k)
  operands = (lhs[:, -256:], rhs)
  error = reference.relative_error(result, kernel_cases.truth(last, operands))
  assert error <= 2 * kernel_cases.baseline_error(last, operands)


@_gpu()
def test_gpu_products_run_on_it():
  def loss(a, b):
    out = jaxgemm.matmul(a, b, implementation="triton")
    return jnp.sum(out.astype(jnp.float32) ** 2)

  keys = jax.random.split(jax.random.key(0), 2)
  a = jax.random.normal(keys[0], (512, 384), jnp.bfloat16)
  b = jax.random.normal(keys[1], (384, 640), jnp.bfloat16)
  step = jax.jit(jax.grad(loss, (0, 1))).lower(a, b).compile()
  assert step.as_text().count("triton_kernel_call") >= 3
  da, db = step(a, b)
  a64, b64 = (np.asarray(x).astype(np.float64) for x in (a, b))
  out = a64 @ b64
  assert reference.relative_error(da, 2 * out @ b64.T) < 1e-2
  assert reference.relative_error(db, 2 * a64.T @ out) < 1e-2

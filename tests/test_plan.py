"""The plan: where it comes from, what it refuses, and what explain says of it."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxgemm
from jaxgemm import (
  device,
  exactness,
  heuristics,
  plan,
)
from jaxgemm.contexts import current_target
from pallas_kernels import KERNELS, TILE_KERNELS, tiles, triton
from pallas_kernels.configs import (
  BlockedConfig,
  DirectConfig,
  PersistentConfig,
  SplitKConfig,
)
from pallas_kernels.problem import Problem

H200 = device.known_device("NVIDIA H200")
A100 = dataclasses.replace(H200, kind="NVIDIA A100", compute_capability="8.0")
SQUARE = Problem(4096, 4096, 4096)


def test_heuristic_is_the_first_candidate():
  chosen = plan.make_plan(SQUARE, H200)
  best = heuristics.candidates(SQUARE, H200)[0]
  assert (chosen.kernel, chosen.config) == (best.kernel, best.config)
  assert chosen.source == "heuristic" and chosen.reason == best.reason
  assert chosen.problem == SQUARE


@pytest.mark.parametrize("kernel", TILE_KERNELS)
def test_a_named_kernel_gets_a_config(kernel):
  chosen = plan.make_plan(SQUARE, H200, implementation=kernel)
  assert chosen.kernel == kernel and chosen.source == "override"
  assert type(chosen.config) is KERNELS[kernel].Config
  assert KERNELS[kernel].supports(SQUARE, chosen.config) is None


def test_a_config_alone_names_its_kernel():
  config = PersistentConfig(tile_m=128, tile_n=128)
  chosen = plan.make_plan(SQUARE, H200, config=config)
  assert (chosen.kernel, chosen.config) == ("persistent", config)
  # SplitKConfig is a PersistentConfig too, and still names its own kernel.
  config = KERNELS["split_k"].Config(tile_m=128, tile_n=128)
  assert plan.make_plan(SQUARE, H200, config=config).kernel == "split_k"


def test_xla_by_name():
  chosen = plan.make_plan(SQUARE, H200, implementation="xla")
  assert (chosen.kernel, chosen.config, chosen.source) == ("xla", None, "override")


@pytest.mark.parametrize("dim", ["m", "n", "k", "batch"])
@pytest.mark.parametrize("implementation", [None, "persistent"])
def test_empty_products_run_no_kernel(dim, implementation):
  problem = dataclasses.replace(SQUARE, **{dim: 0})
  chosen = plan.make_plan(problem, H200, implementation=implementation)
  assert chosen.kernel == "xla" and "empty" in chosen.reason


@pytest.mark.parametrize("where", [None, A100], ids=["cpu", "a100"])
def test_other_devices_get_xla(where, monkeypatch):
  """Where the portable kernel's packages are missing; see also tests/test_triton.py."""
  monkeypatch.setattr(triton, "missing_package", lambda: "jax_triton")
  plan.make_plan.cache_clear()
  chosen = plan.make_plan(SQUARE, where)
  assert (chosen.kernel, chosen.source) == ("xla", "fallback")
  assert "Hopper" in chosen.reason
  with pytest.raises(ValueError, match=r"'blocked' cannot run: .*Hopper.*emulate"):
    plan.make_plan(SQUARE, where, implementation="blocked")


def test_a_named_kernel_that_cannot_serve():
  config = BlockedConfig(tile_m=100)
  reason = KERNELS["blocked"].supports(SQUARE, config)
  with pytest.raises(ValueError) as error:
    plan.make_plan(SQUARE, H200, config=config)
  assert "'blocked' cannot serve 4096x4096x4096" in str(error.value)
  assert reason is not None and reason in str(error.value)


def test_wrong_names_and_configs():
  with pytest.raises(ValueError, match="'cublas' is unknown.*'persistent'.*'xla'"):
    plan.make_plan(SQUARE, H200, implementation="cublas")
  with pytest.raises(ValueError, match="not a config of implementation 'blocked'"):
    plan.make_plan(
        SQUARE, H200, implementation="blocked", config=PersistentConfig()
    )
  with pytest.raises(ValueError, match="not a config of implementation 'xla'"):
    plan.make_plan(SQUARE, H200, implementation="xla", config=PersistentConfig())


@pytest.mark.parametrize("kernel", ["blocked", "direct", "persistent", "pipelined"])
@pytest.mark.parametrize("size", [(8, 225, 2832), (8192, 4096, 2832)], ids=str)
def test_a_named_kernel_is_as_exact_as_its_candidates(kernel, size):
  """Also where the heuristics list none of it: fuzz found direct's default config."""
  problem = Problem(*size, out_dtype="float32")
  chosen = plan.make_plan(problem, H200, implementation=kernel)
  splits = getattr(chosen.config, "splits", 1)
  steps = tiles.cdiv(tiles.cdiv(problem.k, 64), splits)
  assert chosen.config.promote == exactness.promotion(problem, steps) > 0
  assert KERNELS[kernel].supports(problem, chosen.config) is None


@pytest.mark.parametrize(
    ("kernel", "config", "message"),
    [
        ("direct", DirectConfig(tile_k=0), "tile_k=0 must be 64"),
        ("split_k", SplitKConfig(tile_k=0), "tile_k=0 must be 64"),
        ("direct", DirectConfig(splits=9), r"splits=9 must be in \[1, 8\]"),
        ("direct", DirectConfig(splits=0), r"splits=0 must be in \[1, 8\]"),
    ],
)
def test_numbers_that_make_no_tiles_are_refused(kernel, config, message):
  reason = KERNELS[kernel].supports(Problem(64, 64, 1024), config)
  assert re.search(message, reason)


@pytest.mark.parametrize("num_sms", range(1, 17))
def test_there_is_a_plan_for_a_gpu_of_few_sms(num_sms):
  """Some of which run no cluster of six or eight."""
  few = dataclasses.replace(H200, num_sms=num_sms)
  for size in ((72, 16, 1400), (16, 16, 4096), (64, 64, 520), (1000, 1000, 1000)):
    assert plan.make_plan(Problem(*size), few).kernel in (*KERNELS, "xla")


# -- Devices and contexts ----------------------------------------------------------


def test_contexts_nest():
  assert current_target() is None
  with jaxgemm.target("NVIDIA H100 80GB HBM3"):
    assert not current_target().emulate
    with jaxgemm.emulate():
      assert current_target().emulate
      assert current_target().device.kind == "NVIDIA H100 80GB HBM3"
    with jaxgemm.emulate("NVIDIA H200"):
      assert current_target().device == H200
    assert not current_target().emulate
  assert current_target() is None


def test_contexts_enter_the_cache_of_jit():
  traced = []

  @jax.jit
  def f(x):
    traced.append(current_target())
    return x

  f(1.0)
  with jaxgemm.target("NVIDIA H200"):
    f(1.0)
    f(1.0)
  f(1.0)
  assert [target is None for target in traced] == [True, False]


# -- explain -----------------------------------------------------------------------


def _shape(*shape, dtype="bfloat16"):
  return jax.ShapeDtypeStruct(shape, dtype)


def test_explain_prints_the_plan_and_its_rivals(capsys):
  with jaxgemm.target("NVIDIA H200"):
    chosen = jaxgemm.explain(_shape(4096, 4096), _shape(4096, 4096))
  assert chosen == plan.make_plan(SQUARE, H200)
  printed = capsys.readouterr().out
  assert "4096x4096x4096 NN bfloat16->bfloat16" in printed
  assert chosen.kernel in printed and chosen.reason in printed
  assert printed.count(" us  ") >= 2


def test_explain_folds_as_matmul_does(capsys):
  with jaxgemm.target("NVIDIA H200"):
    chosen = jaxgemm.explain(_shape(8, 64, 32), _shape(32, 16))
    assert (chosen.problem.batch, chosen.problem.m) == (1, 512)
    chosen = jaxgemm.explain(_shape(64, 32), _shape(8, 32, 16))
    assert chosen.problem.batch == 8 and not chosen.problem.lhs_batched
    chosen = jaxgemm.explain(_shape(8, 64, 32), _shape(8, 32, 16))
    assert chosen.problem.batch == 8 and chosen.problem.lhs_batched
    chosen = jaxgemm.explain(_shape(32), _shape(32, 16))
    assert (chosen.problem.m, chosen.problem.n) == (1, 16)
  capsys.readouterr()


def test_explain_says_how_exact_it_is(capsys):
  with jaxgemm.target("NVIDIA H200"):
    x = _shape(2048, 2048, dtype="float32")
    chosen = jaxgemm.explain(x, x, precision="highest", implementation="persistent")
  assert chosen.problem.algorithm == "bf16_x6" and "splitting" in chosen.reason
  assert "bf16_x6: six products of bfloat16 parts: 2**-23" in capsys.readouterr().out
  assert all(
      KERNELS[c.kernel].supports(chosen.problem, c.config) is None
      for c in heuristics.candidates(chosen.problem, H200) if c.kernel != "xla"
  )


def test_explain_tells_of_all_products_of_a_function(capsys):
  def loss(x, w, v):
    h = jaxgemm.linear(x, w, activation="gelu")
    out = jaxgemm.matmul(jaxgemm.matmul(h, v), v, implementation="blocked")
    return jnp.sum(jnp.sin(out))

  shapes = [_shape(512, 256), _shape(256, 384), _shape(384, 384)]
  with jaxgemm.target("NVIDIA H200"):
    found = jaxgemm.explain(jax.grad(loss, (0, 1, 2)), *shapes)
  # Three forward, and two gradients of each.
  printed = capsys.readouterr().out
  assert "loss: 9 of 9 planned products on kernels of jaxgemm" in printed
  assert len(found) == len(set(found)) == 9
  assert str(found[0].problem.epilogue) == " + gelu + saved"
  assert {one.problem.layouts for one in found} == {"NN", "NT", "TN"}
  assert "1 x 512x384x256 NN bfloat16->bfloat16 + gelu + saved: " in printed
  assert "  override: implementation='blocked'" in printed
  assert all(one.reason in printed for one in found)


def test_explain_tells_of_c(capsys):
  with jaxgemm.target("NVIDIA H200"):
    jaxgemm.explain(
        lambda a, b, c: jaxgemm.gemm(a, b, c, beta=1.0), *[_shape(512, 512)] * 3
    )
  assert "512x512x512 NN bfloat16->bfloat16 + c: " in capsys.readouterr().out


def test_explain_without_a_device_plans_nothing(capsys):
  assert jaxgemm.explain(jaxgemm.matmul, _shape(8, 8), _shape(8, 8)) == []
  assert "matmul: 0 of 0" in capsys.readouterr().out


def test_explain_says_why_xla(capsys):
  chosen = jaxgemm.explain(_shape(8, 8), _shape(8, 8), implementation="xla")
  assert chosen.kernel == "xla"
  with jaxgemm.target("NVIDIA H200"):
    chosen = jaxgemm.explain(_shape(8, 8, dtype="int8"), _shape(8, 8, dtype="int8"))
    assert "int8" in chosen.reason
    x = _shape(64, 64, dtype="float32")
    precision = "BF16_BF16_F32"
    assert precision in jaxgemm.explain(x, x, precision=precision).reason
    with pytest.raises(ValueError, match=precision):
      jaxgemm.explain(x, x, precision=precision, implementation="blocked")
    chosen = jaxgemm.explain(x, jnp.ones((64, 8), "bfloat16"), implementation="blocked")
    assert chosen.problem.dtype == "float32"
  capsys.readouterr()



"""The pass from a layer's cotangent to those of its products."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import jax.test_util
import numpy as np
import pytest

from experiments.collectives import collectives
import jaxgemm
from jaxgemm import reference
from jaxgemm.contexts import current_target
from jaxgemm.cotangents import Pass, cotangents
from pallas_kernels import activations, compat
from pallas_kernels import cotangents as kernel
from pallas_kernels.cotangents import Cotangents
from tests.kernel_cases import more


def operands_of(facts, seed=0):
  rng = np.random.default_rng(seed)
  shape = (facts.rows, facts.cols)
  return [
      jnp.asarray(rng.standard_normal(shape), facts.dtype)
      for _ in range(facts.num_entering + 1)
  ]


def check(facts, found, sums, operands):
  with jax.enable_x64(True):
    wide = [x.astype("float64") for x in operands]
    truth = kernel.derivatives(facts, wide[:-1], wide[-1])
  assert len(found) == facts.num_entering
  for ours, its in zip(found, truth, strict=False):
    assert reference.relative_error(ours, its) < 3e-3
  assert len(sums) == facts.sums * facts.count
  for ours, its in zip(sums, truth, strict=False):
    assert reference.relative_error(ours, np.sum(np.asarray(its), axis=0)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "facts",
    [
        Cotangents(700, 520, "bfloat16", "gelu"),
        Cotangents(640, 128, "float16", "silu", gated=True),
        Cotangents(130, 72, "bfloat16", "relu", sums=False),
        Cotangents(70, 1032, "float16", "gelu_exact", gated=True, sums=False),
        Cotangents(600, 200, "bfloat16", "none"),
        Cotangents(9, 8, "bfloat16", lambda x: jnp.where(x > 0, x, 0.1 * x)),
    ],
    ids=["plain", "gated", "no_sums", "gated_no_sums", "only_sums", "callable"],
)
def test_values(facts):
  operands = operands_of(facts)
  found, sums = compat.run_interpreted(
      lambda params: kernel.launch(operands, facts, num_sms=4, interpret=params)
  )
  check(facts, found, sums, operands)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", (*activations.NAMES, "none"))
def test_lowers_for_cuda(activation, gated):
  facts = Cotangents(2048, 1096, "bfloat16", activation, gated)
  run = lambda *x: kernel.launch(x, facts, num_sms=132)
  exported = jax.export.export(jax.jit(run), platforms=["cuda"])(*operands_of(facts))
  assert "jaxgemm_cotangents" in exported.mlir_module()


@pytest.mark.parametrize(
    ("fields", "named"),
    [(dict(dtype="float32"), "16 bits"), (dict(cols=2047), "2047"),
     (dict(rows=8), "8x2048")],
)
def test_supports(fields, named):
  facts = dict(rows=2048, cols=2048, dtype="bfloat16", activation="gelu") | fields
  assert named in kernel.supports(Cotangents(**facts))


def test_chunks_keep_the_sms_busy():
  for rows, cols in ((8192, 14336), (8192, 3072), (16384, 3072), (6304, 4096)):
    for gated in (False, True):
      facts = Cotangents(rows, cols, "bfloat16", "gelu", gated)
      strips, chunks = facts.num_strips, facts.num_chunks(132)
      pieces = -(-rows // kernel.ROWS)
      at_once = 132 * (232448 // facts.smem_bytes)
      waves = -(-strips * chunks // at_once)
      busy = strips * pieces / (waves * -(-pieces // chunks) * at_once)
      assert busy > 0.85, (rows, cols, gated)


def gradients(values, **options):
  def loss(values):
    out = jaxgemm.linear(**values, activation="gelu", precision=None, **options)
    return jnp.sum(out.astype(jnp.float32) ** 2)

  return jax.grad(loss)(values)


@pytest.mark.slow
@pytest.mark.parametrize("save", ["preactivation", more("nothing")])
def test_a_layer_s_backward_pass_takes_it(save, rng, monkeypatch):
  monkeypatch.setattr(kernel, "LEAST_ELEMENTS", 1)
  shapes = dict(x=(2, 96, 72), w=(72, 136), bias=(136,))
  values = {k: jnp.asarray(rng.standard_normal(s), "bfloat16") for k, s in shapes.items()}
  run = jax.jit(functools.partial(gradients, save=save))
  with jaxgemm.target("NVIDIA H200"):
    text = jax.export.export(run, platforms=["cuda"])(values).mlir_module()
  assert text.count("jaxgemm_cotangents") >= 1
  with jaxgemm.emulate():
    found = gradients(values, save=save)
  wanted = gradients(values, save=save)
  for name in shapes:
    assert reference.relative_error(found[name], wanted[name]) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", (*activations.NAMES, "none"))
@pytest.mark.parametrize(
    "shape", [(2048, 1096), (1001, 4096), (8192, 768), (4099, 256), (131075, 8)], ids=str
)
def test_gpu(shape, activation, gated):
  facts = Cotangents(*shape, "bfloat16", activation, gated)
  operands = operands_of(facts)
  run = jax.jit(lambda x: kernel.launch(x, facts, num_sms=132))
  check(facts, *run(operands), operands)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "cols"])
def test_sharded_operands(spec, rng, monkeypatch):
  """XLA then shares the pass out; what it sums up over devices are the sums."""
  monkeypatch.setattr(kernel, "LEAST_ELEMENTS", 1)
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
  facts = Pass("gelu", False, True, 1, by_xla=False, target=None)
  z, ct = (jnp.asarray(rng.standard_normal((64, 128)), "bfloat16") for _ in range(2))
  (dz,), (total,) = cotangents([z], ct, facts)
  shard = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
  with jaxgemm.emulate():
    facts = dataclasses.replace(facts, target=current_target())
    run = jax.jit(lambda z, ct: cotangents([z], ct, facts))
    step = run.lower(shard(z), shard(ct)).compile()
    (sharded_dz,), (sharded_total,) = step(shard(z), shard(ct))
  np.testing.assert_array_equal(sharded_dz, dz)
  np.testing.assert_allclose(sharded_total, total, 1e-5, 1e-5)
  found = collectives(step.as_text())
  assert found == ({("all-reduce", (128,)): 1} if spec[0] else {})


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_within_shard_map(check_vma, monkeypatch):
  monkeypatch.setattr(kernel, "LEAST_ELEMENTS", 1)
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
  shapes = dict(x=(256, 128), w=(128, 256), bias=(256,))
  values = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()}
  specs = dict(x=P("x"), w=P(), bias=P())
  run = jax.shard_map(
      gradients, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma
  )
  with jaxgemm.target("NVIDIA H200"):
    text = jax.export.export(jax.jit(run), platforms=["cuda"])(values).mlir_module()
  assert "jaxgemm_cotangents" in text


def test_dz_takes_the_place_of_z():
  facts = Cotangents(2048, 1096, "bfloat16", "silu", gated=True)
  run = jax.jit(lambda *x: kernel.launch(x, facts, num_sms=132))
  exported = jax.export.export(run, platforms=["cuda"])(*operands_of(facts))
  assert exported.mlir_module().count("output_operand_alias<") == 2


def test_batches_and_second_derivatives(rng):
  facts = Pass("tanh", False, True, 1, by_xla=False, target=None)
  z, ct = (jnp.asarray(rng.standard_normal((3, 4, 5)), "float32") for _ in range(2))
  run = lambda z, ct: cotangents([z], ct, facts)
  (dz,), (total,) = jax.vmap(run)(z, ct)
  np.testing.assert_allclose(dz, ct * (1 - jnp.tanh(z) ** 2), 1e-5, 1e-6)
  np.testing.assert_allclose(total, dz.sum(1), 1e-5, 1e-6)
  jax.test_util.check_grads(lambda z, ct: run(z, ct)[0][0], (z, ct), 1, ["fwd", "rev"])


@pytest.mark.parametrize("rows", [70, 576])
def test_rows_beyond_the_last_do_not_count(rows, rng, monkeypatch):
  """TMA fills them with zeros, where the slope of a callable may be inf."""
  monkeypatch.setattr(kernel, "LEAST_ELEMENTS", 1)
  x = jnp.asarray(rng.uniform(1.0, 2.0, (rows, 16)), "bfloat16")
  w, bias = jnp.full((16, 128), 0.25, "bfloat16"), jnp.ones(128, "bfloat16")
  run = jax.grad(
      lambda b: jnp.sum(jaxgemm.linear(x, w, b, activation=jnp.log).astype(jnp.float32))
  )
  wanted = run(bias)
  with jaxgemm.emulate():
    found = run(bias)
  assert reference.relative_error(found, wanted) < 1e-2

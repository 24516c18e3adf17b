"""gemm_p under JAX's transformations, and which kernel its lowering runs."""

from __future__ import annotations

from collections import Counter

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import checkpoint_policies, reference
from jaxgemm.dims import Dims
from pallas_kernels import TILE_KERNELS as KERNELS
from pallas_kernels.configs import BlockedConfig, PersistentConfig
from tests.product_cases import (
  count_primitives,
  cuda_kernels,
  normal,
  product_dims,
  products,
)


def _loss(matmul):
  return lambda a, b: jnp.sum(jnp.sin(matmul(a, b).astype("float32")))


# -- vmap --------------------------------------------------------------------------

VMAPS = {
    # in_axes, shape of a, shape of b, and the dims of the one product.
    "lhs": ((0, None), (7, 3, 4), (4, 5), Dims(m=2)),
    "lhs, inside": ((1, None), (3, 7, 4), (4, 5), Dims(m=2)),
    "rhs": ((None, 0), (3, 4), (7, 4, 5), Dims("mk", "bkn", b=1)),
    "rhs, inside": ((None, 1), (3, 4), (4, 7, 5), Dims(n=2)),
    "both": ((0, 0), (7, 3, 4), (7, 4, 5), Dims(b=1)),
    "lhs of a batch, inside": ((1, None), (2, 7, 3, 4), (2, 4, 5), Dims(b=1, m=2)),
    "both of a batch": ((0, 0), (7, 2, 3, 4), (7, 2, 4, 5), Dims(b=2)),
    "rhs of a shared lhs": ((None, 0), (3, 4), (7, 2, 4, 5), Dims("mk", "bkn", b=2)),
    "lhs of a shared lhs": ((0, None), (7, 3, 4), (2, 4, 5), Dims("mk", "bkn", b=1, m=2)),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_copies_nothing(name, rng):
  in_axes, a_shape, b_shape, dims = VMAPS[name]
  a, b = normal(rng, *a_shape), normal(rng, *b_shape)
  ours, theirs = (jax.vmap(f, in_axes) for f in (jaxgemm.matmul, jnp.matmul))
  np.testing.assert_allclose(ours(a, b), theirs(a, b), rtol=1e-4, atol=1e-5)
  assert product_dims(ours, a, b) == [dims]
  # Only the result moves, and only to where vmap wants the new dimension.
  moved = count_primitives(ours, a, b)
  assert moved["broadcast_in_dim"] == 0 and moved["transpose"] <= 1


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 2), (2, None)],
                         ids=str)
@pytest.mark.parametrize("out_axes", [0, 1, -1])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("layouts", ["NN", "NT", "TN", "TT"])
def test_vmap_is_a_loop(layouts, batched, out_axes, in_axes, rng):
  lhs = {"N": (3, 4), "T": (4, 3)}[layouts[0]]
  rhs = {"N": (4, 5), "T": (5, 4)}[layouts[1]]
  shift, batch = (1, (2,)) if batched else (0, ())
  numbers = (
      ((shift + (layouts[0] == "N"),), (shift + (layouts[1] == "T"),)),
      ((0,), (0,)) if batched else ((), ()),
  )
  shapes = [list(batch + lhs), list(batch + rhs)]
  for shape, axis in zip(shapes, in_axes, strict=True):
    if axis is not None:
      shape.insert(axis, 6)
  a, b = (normal(rng, *shape) for shape in shapes)
  f = lambda a, b: jaxgemm.dot_general(a, b, numbers)
  ours = jax.vmap(f, in_axes, out_axes)(a, b)
  loop = [
      jax.lax.dot_general(*(
          x if axis is None else jnp.take(x, i, axis)
          for x, axis in zip((a, b), in_axes, strict=True)
      ), numbers)
      for i in range(6)
  ]
  np.testing.assert_allclose(
      ours, jnp.stack(loop, out_axes), rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize("c_axis", [None, 0, 1, 2])
@pytest.mark.parametrize("ab_axes", [(None, None), (0, None), (None, 1), (0, 0)],
                         ids=str)
def test_vmap_of_gemm(ab_axes, c_axis, rng):
  if ab_axes == (None, None) and c_axis is None:
    pytest.skip("nothing is mapped")
  shapes = [[3, 4], [4, 5], [3, 5]]
  in_axes = (*ab_axes, c_axis)
  for shape, axis in zip(shapes, in_axes, strict=True):
    if axis is not None:
      shape.insert(axis, 6)
  operands = [normal(rng, *shape) for shape in shapes]
  ours = jax.vmap(lambda *x: jaxgemm.gemm(*x, alpha=2.0, beta=0.5), in_axes)
  theirs = jax.vmap(lambda a, b, c: 2.0 * (a @ b) + 0.5 * c, in_axes)
  np.testing.assert_allclose(ours(*operands), theirs(*operands), rtol=1e-4, atol=1e-4)
  assert len(products(ours, *operands)) == 1


def test_vmap_of_gemm_with_a_shared_operand(rng):
  """One batch dimension in both operands and one in rhs alone: the result moves."""
  a, b, c = normal(rng, 6, 3, 4), normal(rng, 6, 2, 4, 5), normal(rng, 6, 2, 3, 5)
  for axis in (0, 3):
    mapped = jnp.moveaxis(c, 0, axis)
    ours = jax.vmap(lambda *x: jaxgemm.gemm(*x, beta=0.5), (0, 0, axis))(a, b, mapped)
    theirs = jax.vmap(lambda a, b, c: a @ b + 0.5 * c, (0, 0, axis))(a, b, mapped)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_vmap_twice_and_grad_of_vmap(rng):
  a, b = normal(rng, 2, 7, 3, 4), normal(rng, 7, 4, 5)
  twice = lambda f: jax.vmap(jax.vmap(f), (0, None))
  np.testing.assert_allclose(
      twice(jaxgemm.matmul)(a, b), twice(jnp.matmul)(a, b), rtol=1e-4, atol=1e-5
  )
  for f in (twice, lambda f: jax.vmap(f, (1, 0))):
    ours = jax.grad(_loss(f(jaxgemm.matmul)), (0, 1))(a, b)
    theirs = jax.grad(_loss(f(jnp.matmul)), (0, 1))(a, b)
    for x, y in zip(ours, theirs, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


# -- jit, scan, checkpoint ---------------------------------------------------------


def test_jit_scan_and_grad(rng):
  ws, x = normal(rng, 3, 4, 4), normal(rng, 2, 4)

  def chain(matmul, checkpoint):
    body = lambda x, w: (jnp.tanh(matmul(x, w)), None)
    body = jax.checkpoint(body) if checkpoint else body
    return jax.jit(lambda x, ws: jax.lax.scan(body, x, ws)[0].sum())

  for checkpoint in (False, True):
    ours = jax.grad(chain(jaxgemm.matmul, checkpoint), (0, 1))(x, ws)
    theirs = jax.grad(chain(jnp.matmul, checkpoint), (0, 1))(x, ws)
    for got, want in zip(ours, theirs, strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_disable_jit(rng):
  a, b = normal(rng, 3, 4), normal(rng, 4, 5)
  with jax.disable_jit():
    np.testing.assert_allclose(jaxgemm.matmul(a, b), a @ b, rtol=1e-4, atol=1e-5)


_PRODUCTS = checkpoint_policies.products_saveable
_NO_BATCH = checkpoint_policies.products_with_no_batch_dims_saveable
_NAMED = jax.checkpoint_policies.save_only_these_names("jaxgemm_out")


@pytest.mark.parametrize(
    "implementation, policy, weights, scores",
    [
        (None, None, 2, 2),
        (None, _PRODUCTS, 1, 1),
        (None, _NO_BATCH, 1, 2),
        (None, _NAMED, 1, 1),
        ("xla", None, 2, 2),
        ("xla", _PRODUCTS, 1, 1),
        ("xla", _NO_BATCH, 1, 2),
    ],
    ids=[
        "none", "products", "no batch", "name", "xla none", "xla products",
        "xla no batch",
    ],
)
def test_checkpoint_policies(implementation, policy, weights, scores, rng):
  """How often the forward products of weights and of scores run, once or twice."""
  x, w = normal(rng, 2, 3, 4), normal(rng, 4, 6)

  def layer(x, w):
    h = jnp.sin(jaxgemm.matmul(x, w, implementation=implementation))
    s = jaxgemm.dot_general(
        h, h, (((2,), (2,)), ((0,), (0,))), implementation=implementation
    )
    return jnp.sum(jnp.sin(s))

  plain = jax.grad(layer, (0, 1))
  ours = jax.grad(jax.checkpoint(layer, policy=policy), (0, 1))
  for got, want in zip(ours(x, w), plain(x, w), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
  name = "dot_general" if implementation == "xla" else "jaxgemm"
  backward = 4  # Two for each product.
  assert count_primitives(ours, x, w)[name] == backward + weights + scores


def test_a_shared_operand_is_no_batch(rng):
  """As lax.dot_general's dimension numbers have it, of which jax's policy speaks."""
  a, b = normal(rng, 4, 5), normal(rng, 3, 5, 6)
  ours = jax.grad(jax.checkpoint(
      lambda a, b: jnp.sum(jnp.sin(jaxgemm.matmul(a, b))), policy=_NO_BATCH), (0, 1))
  assert count_primitives(ours, a, b)["jaxgemm"] == 3


# -- Which kernel runs -------------------------------------------------------------


def _bf16(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_named_kernel_is_lowered(kernel):
  f = lambda a, b: jaxgemm.matmul(a, b, implementation=kernel)
  kernels = cuda_kernels(f, _bf16(512, 1024), _bf16(1024, 256))
  assert kernels == Counter({kernel: 1})


def test_the_config_is_lowered():
  config = PersistentConfig(tile_m=128, tile_n=64)
  f = lambda a, b: jaxgemm.matmul(a, b, config=config)
  assert cuda_kernels(f, _bf16(256, 256), _bf16(256, 256)) == {"persistent": 1}


def test_the_plan_is_lowered_forward_and_backward(capsys):
  a, b = _bf16(2048, 1024), _bf16(1024, 4096)
  with jaxgemm.target("NVIDIA H200"):
    chosen = jaxgemm.explain(a, b)
  capsys.readouterr()
  assert cuda_kernels(jaxgemm.matmul, a, b) == {chosen.kernel: 1}
  kernels = cuda_kernels(jax.grad(_loss(jaxgemm.matmul), (0, 1)), a, b)
  assert "xla" not in kernels
  assert kernels.total() == 3


def test_what_no_kernel_serves_is_xlas():
  x, y = (jax.ShapeDtypeStruct((256, n), jnp.float32) for n in (256, 1))
  f = lambda a, b: jaxgemm.matmul(a, b, precision="highest")
  assert cuda_kernels(f, x, y) == {"xla": 1}
  assert cuda_kernels(jaxgemm.matmul, _bf16(0, 256), _bf16(256, 256)) == {"xla": 1}
  # Without a target, a CPU machine cannot tell which GPU the text is for.
  if jax.default_backend() == "cpu":
    exported = jax.export.export(jax.jit(jaxgemm.matmul), platforms=["cuda"])(
        _bf16(256, 256), _bf16(256, 256)
    )
    assert "mosaic_gpu" not in exported.mlir_module()


def test_other_platforms_get_xlas_dot():
  """One function, lowered for two platforms at once: each gets its own."""
  with jaxgemm.target("NVIDIA H200"):
    exported = jax.export.export(jax.jit(jaxgemm.matmul), platforms=["cpu", "cuda"])(
        _bf16(256, 256), _bf16(256, 256)
    )
  text = exported.mlir_module()
  assert text.count("stablehlo.dot_general") == 1
  assert text.count("custom_call @mosaic_gpu") == 1


def test_gradients_of_a_kernel_that_cannot_serve_them():
  """The caller chose split_k for a large k, not for the small one of d a."""
  f = jax.grad(_loss(lambda a, b: jaxgemm.matmul(a, b, implementation="split_k")))
  kernels = cuda_kernels(f, _bf16(64, 4096), _bf16(4096, 64))
  assert kernels["split_k"] >= 1 and kernels["xla"] == 0


# -- Emulation ---------------------------------------------------------------------


def _assert_near(result, truth):
  assert reference.relative_error(result, truth) < 5e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_emulated_kernels(kernel, rng):
  a = normal(rng, 96, 128, dtype="bfloat16")
  b = normal(rng, 128, 64, dtype="bfloat16")
  with jaxgemm.emulate():
    result = jaxgemm.matmul(a, b, implementation=kernel)
  _assert_near(result, reference.matmul(a, b))


def test_emulation_runs_the_kernel(monkeypatch, rng):
  """Not XLA's dot: what the kernel returns is what matmul returns."""
  blocked = KERNELS["blocked"]
  seen = []

  def launch(operands, problem, config, *, num_sms, interpret):
    seen.append((problem, config, num_sms, interpret.detect_races))
    return jnp.full(problem.out_shape, 7, problem.out_dtype)

  monkeypatch.setattr(blocked, "launch", launch)
  a = normal(rng, 2, 64, 64, dtype="bfloat16")
  config = BlockedConfig(64, 64, 64)
  with jaxgemm.emulate():
    result = jaxgemm.matmul(a, a[0], config=config)
  assert np.all(np.asarray(result) == 7) and result.shape == (2, 64, 64)
  ((problem, *rest),) = seen
  assert rest == [config, 132, True]
  assert (problem.m, problem.batch) == (128, 1)


def test_emulation_under_jit_grad_vmap_scan_checkpoint(rng):
  ws = normal(rng, 2, 64, 64, dtype="bfloat16") / 8
  x = normal(rng, 2, 8, 64, dtype="bfloat16")
  matmul = lambda a, b: jaxgemm.matmul(a, b, config=BlockedConfig(64, 64, 64))

  def loss(matmul, x, ws):
    layer = lambda x, w: (jnp.tanh(jax.vmap(matmul, (0, None))(x, w)), None)
    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype("float32"))

  step = jax.jit(jax.value_and_grad(loss, (1, 2)), static_argnums=0)
  with jaxgemm.emulate():
    ours, gradients = step(matmul, x, ws)
  theirs, truths = step(jnp.matmul, x, ws)
  np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=0.5)
  for gradient, truth in zip(gradients, truths, strict=True):
    assert reference.relative_error(gradient, truth) < 2e-2


def _racing_launch(operands, problem, config, *, num_sms, interpret):
  """Two warpgroups write one buffer, and neither waits for the other."""
  del operands, config, num_sms

  def body(out, smem):
    wg = jax.lax.axis_index("wg")
    smem[...] = jnp.full(smem.shape, 1.0, smem.dtype) * wg.astype(smem.dtype)

    @pl.when(wg == 0)
    def _():
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(smem, out.at[0])
      plgpu.wait_smem_to_gmem(0)

  return plgpu.kernel(
      body,
      out_type=jax.ShapeDtypeStruct(problem.out_shape, jnp.float32),
      scratch_types=dict(smem=plgpu.SMEM(problem.out_shape[1:], jnp.float32)),
      grid=(1,), grid_names=("cta",), num_threads=2, thread_name="wg",
      interpret=interpret,
  )()


@pytest.mark.parametrize("jit", [False, True])
def test_a_race_raises(jit, monkeypatch, rng):
  a = normal(rng, 64, 64, dtype="bfloat16")
  f = lambda a: jaxgemm.matmul(
      a, a, config=BlockedConfig(64, 64, 64), preferred_element_type="float32")
  f = jax.jit(f) if jit else f
  with jaxgemm.emulate():
    with monkeypatch.context() as patch:
      patch.setattr(KERNELS["blocked"], "launch", _racing_launch)
      with pytest.raises(Exception, match="(?i)race"):
        jax.block_until_ready(f(a))
    # The interpreter is usable again.
    result = jaxgemm.matmul(a, a, config=BlockedConfig(64, 64, 64))
  _assert_near(result, reference.matmul(a, a))


# -- On the chip -------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [((256, 512), (512, 384)), ((3, 100, 200), (200, 72))],
                         ids=str)
def test_gpu_forward_and_backward(shapes, rng):
  a, b = (normal(rng, *shape, dtype="bfloat16") for shape in shapes)
  a = a / a.shape[-1] ** 0.5  # The sine of a large number would show its rounding.
  def results(matmul):  # Not the loss: a sum of sines cancels.
    grad = jax.grad(_loss(matmul), (0, 1))
    return jax.jit(lambda a, b: (matmul(a, b), *grad(a, b)))

  ours, theirs = results(jaxgemm.matmul), results(jnp.matmul)
  assert "mosaic_gpu" in ours.lower(a, b).as_text()
  for got, want in zip(ours(a, b), theirs(a, b), strict=True):
    assert reference.relative_error(got, want) < 1e-2

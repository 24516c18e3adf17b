"""jaxgemm.linear_cross_entropy: values, derivatives and transformations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from pallas_kernels import compat
from pallas_kernels import losses as kernel
from pallas_kernels.losses import Losses
from tests.product_cases import cuda_kernels, equations, normal

BATCH, K, N = (3, 10), 48, 131  # N is no multiple of 64: five columns do not count.


def operands(rng, dtype="float32", n=N):
  x, w, bias = normal(rng, *BATCH, K), normal(rng, K, n) / 4, normal(rng, n)
  values = {"x": x, "w": w, "bias": bias}
  values = {name: jnp.asarray(value, dtype) for name, value in values.items()}
  return values, jnp.asarray(rng.integers(0, n, BATCH), jnp.int32)


def losses(values, labels, **options):
  options = dict(precision="highest") | options
  w = values["w"].T if options.get("transposed") else values["w"]
  return jaxgemm.linear_cross_entropy(
      values["x"], w, labels, values.get("bias"), **options
  )


def unfused(values, labels):
  logits = values["x"] @ values["w"] + values["bias"]
  labelled = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  return jax.nn.logsumexp(logits, -1) - labelled


def in_float64(function, values, *others):
  with jax.enable_x64(True):
    wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in values.items()}
    return jax.tree.map(np.asarray, function(wide, *others))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [2, 63, 64, N])
def test_values_and_gradients(n, transposed, rng):
  values, labels = operands(rng, n=n)
  run = functools.partial(losses, transposed=transposed)
  out = run(values, labels)
  assert out.shape == BATCH and out.dtype == jnp.float32
  assert reference.relative_error(out, in_float64(unfused, values, labels)) < 1e-6
  mean = lambda f: jax.grad(lambda v, labels: f(v, labels).mean())
  found, wanted = mean(run)(values, labels), in_float64(mean(unfused), values, labels)
  for name in values:
    assert reference.relative_error(found[name], wanted[name]) < 2e-6, name


@pytest.mark.slow
def test_every_derivative(rng):
  """Both modes, to the second order."""
  values, labels = operands(rng, n=70)
  scaled = {name: value / 4 for name, value in values.items()}
  check_grads(lambda v: losses(v, labels), (scaled,), 2, rtol=2e-2, atol=2e-2)


def test_bfloat16_keeps_no_logits_in_float32(rng):
  """What is kept of them for the backward pass are their slopes, in bfloat16."""
  values, labels = operands(rng, "bfloat16")
  run = jax.jit(lambda v: losses(v, labels, precision=None))
  _, backward = jax.vjp(run, values)
  kept = [x for x in jax.tree.leaves(backward) if hasattr(x, "dtype")]
  assert any(x.dtype == jnp.bfloat16 and x.shape == (*BATCH, 192) for x in kept)
  assert not any(x.shape[-1:] == (192,) for x in kept if x.dtype == jnp.float32)
  (found,), wanted = backward(jnp.ones(BATCH)), in_float64(
      jax.grad(lambda v, labels: unfused(v, labels).sum()), values, labels
  )
  for name in values:
    assert found[name].dtype == jnp.bfloat16
    assert reference.relative_error(found[name], wanted[name]) < 2e-2, name


def test_no_product_has_an_operand_padded(rng):
  """The rows of the logits and of their cotangent are aligned."""
  x, w, labels = normal(rng, 2048, 256), normal(rng, 5003, 256), jnp.zeros(2048, int)
  x, w = x.astype("bfloat16"), w.astype("bfloat16")

  def gradients(x, w):
    run = functools.partial(jaxgemm.linear_cross_entropy, transposed=True)
    return jax.grad(lambda x, w: run(x, w, labels).sum(), (0, 1))(x, w)

  kernels = cuda_kernels(gradients, x, w)
  assert sum(kernels.values()) == 4 and kernels["losses"] == 1 and "xla" not in kernels
  with jaxgemm.target("NVIDIA H200"):
    text = jax.export.export(jax.jit(gradients), platforms=["cuda"])(x, w).mlir_module()
  assert text.count("stablehlo.pad") == 2  # Of w, and of its gradient: cut off again.


def test_labels_out_of_range_do_not_count(rng):
  values, labels = operands(rng)
  some = labels.at[0].set(-1).at[1, 0].set(N).at[2, 3].set(N + 5)
  found, whole = losses(values, some), losses(values, labels)
  out = np.asarray((some < 0) | (some >= N))
  np.testing.assert_array_equal(np.asarray(found)[out], 0.0)
  np.testing.assert_array_equal(np.asarray(found)[~out], np.asarray(whole)[~out])
  slopes = jax.grad(lambda v: losses(v, some).sum())(values)["x"]
  assert not np.asarray(slopes)[out].any() and np.asarray(slopes)[~out].any(-1).all()


def test_large_logits(rng):
  values, labels = operands(rng)
  large = values | {"x": values["x"] * 1e4}
  out = losses(large, labels)
  assert reference.relative_error(out, in_float64(unfused, large, labels)) < 1e-6


@pytest.mark.slow
def test_emulated(rng, monkeypatch):
  """Products and losses by the kernels, forward and backward."""
  monkeypatch.setattr(kernel, "LEAST_ELEMENTS", 1)
  values, labels = operands(rng, "bfloat16")
  run = lambda v: losses(v, labels, precision=None).sum()
  with jaxgemm.emulate():
    out, found = jax.value_and_grad(run)(values)
  wanted, slopes = jax.value_and_grad(run)(values)
  assert abs(out / wanted - 1) < 1e-3
  for name in values:
    assert reference.relative_error(found[name], slopes[name]) < 1e-2, name


KERNEL_CASES = [
    Losses(5, 4096, 4096, "bfloat16"),
    Losses(3, 8320, 8292, "float16"),  # A last piece of a few lines.
    Losses(4, 64, 50, "bfloat16"),  # One line.
    Losses(2, 57408, 57400, "bfloat16"),  # A row that does not stay in shared memory.
]


def logits_and_labels(facts, seed=0):
  rng = np.random.default_rng(seed)
  logits = jnp.asarray(3 * rng.standard_normal((facts.rows, facts.cols)), facts.dtype)
  labels = rng.integers(0, facts.num_classes, facts.rows)
  labels[:2] = 0, facts.num_classes - 1
  return logits, jnp.asarray(labels, jnp.int32)


def check_kernel(facts, found, logits, labels):
  log_sum, label, slopes = map(np.asarray, found)
  wide = np.asarray(logits, np.float64)[:, : facts.num_classes]
  rows = np.arange(facts.rows)
  np.testing.assert_array_equal(label, wide[rows, labels])
  truth = np.log(np.exp(wide).sum(1))
  np.testing.assert_allclose(log_sum, truth, rtol=2e-6)
  wanted = np.exp(wide - truth[:, None])
  wanted[rows, labels] -= 1
  inside, beyond = np.split(slopes.astype(np.float64), [facts.num_classes], 1)
  # Half a unit in the last place, of each.
  np.testing.assert_allclose(inside, wanted, rtol=2.0**-8, atol=1e-7)
  assert not beyond.any()


@pytest.mark.slow
@pytest.mark.parametrize("facts", KERNEL_CASES, ids=str)
def test_kernel(facts):
  logits, labels = logits_and_labels(facts)
  found = compat.run_interpreted(
      lambda params: kernel.launch(logits, labels, facts, interpret=params)
  )
  check_kernel(facts, found, logits, labels)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "facts",
    [*KERNEL_CASES, Losses(1000, 50304, 50257, "bfloat16"),
     Losses(300, 128256, 128256, "float16")],
    ids=str,
)
def test_gpu(facts):
  logits, labels = logits_and_labels(facts)
  found = jax.jit(functools.partial(kernel.launch, facts=facts))(logits, labels)
  check_kernel(facts, found, logits, labels)


@pytest.mark.parametrize(
    ("fields", "named"),
    [(dict(dtype="float32"), "16 bits"), (dict(cols=5003), "5003"),
     (dict(rows=8), "8x5056")],
)
def test_supports(fields, named):
  facts = dict(rows=2048, cols=5056, num_classes=5003, dtype="bfloat16") | fields
  assert named in kernel.supports(Losses(**facts))


def test_vmap_and_shards(rng):
  values, labels = operands(rng)
  mapped = jax.vmap(lambda x, at: losses(values | {"x": x}, at))(values["x"], labels)
  np.testing.assert_allclose(mapped, losses(values, labels), rtol=1e-5)
  mesh = Mesh(np.array(jax.devices()[:2]), "d")
  x = jax.device_put(values["x"][:2], NamedSharding(mesh, P("d")))
  out = jax.jit(lambda x: losses(values | {"x": x}, labels[:2]))(x)
  np.testing.assert_allclose(out, losses(values, labels)[:2], rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "n"), [("uint8", 256), ("int8", 300), ("int16", 50257), ("uint16", 65536)]
)
def test_labels_of_few_bits(dtype, n, rng):
  """They need not hold the number of classes."""
  x, w = normal(rng, 4, 8), normal(rng, 8, n)
  labels = jnp.asarray([0, 1, 100, 127], dtype)
  run = lambda x, labels: jaxgemm.linear_cross_entropy(x, w, labels).sum()
  wanted = jax.value_and_grad(run)(x, labels.astype(jnp.int32))
  for found, want in zip(jax.value_and_grad(run)(x, labels), wanted, strict=True):
    np.testing.assert_array_equal(found, want)
  assert np.abs(wanted[1]).min() > 0


def test_labels_that_vary_over_a_mesh_alone(rng):
  """Each device has labels of its own for the same rows of logits."""
  mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("i",))
  x, w = normal(rng, 2, 6), normal(rng, 6, 9)
  labels, ct = jnp.arange(8) % 9, normal(rng, 8)

  def shared(x, w):
    losses = jax.shard_map(
        jaxgemm.linear_cross_entropy, mesh=mesh, in_specs=(P(), P(), P("i")),
        out_specs=P("i"),
    )
    return jnp.sum(ct * losses(x, w, labels))

  def wanted(x, w):
    logits = jnp.tile(x @ w, (4, 1))
    labelled = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.sum(ct * (jax.nn.logsumexp(logits, -1) - labelled))

  for found, want in zip(
      jax.grad(shared, (0, 1))(x, w), jax.grad(wanted, (0, 1))(x, w), strict=True
  ):
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("argnums", [0, 1, 2])
def test_a_gradient_forms_what_it_needs(argnums, rng):
  """The logits, and one product by their slopes."""
  x, w, bias = normal(rng, 4, 8), normal(rng, 8, 70), normal(rng, 70)
  run = lambda *x: jaxgemm.linear_cross_entropy(*x[:2], jnp.arange(4), x[2]).sum()
  traced = jax.make_jaxpr(jax.grad(run, argnums))(x, w, bias)
  names = [eqn.primitive.name for eqn in equations(traced.jaxpr)]
  assert sum(name.startswith("jaxgemm_linear") for name in names) == 1
  of_x, of_w = int(argnums == 0), int(argnums == 1)
  assert names.count("jaxgemm") == of_x + of_w
  assert names.count("dot_general") == (argnums == 2)


def test_a_kernel_named_for_the_logits_need_not_serve_gradients(rng):
  x, w = jnp.ones((2, 512), "bfloat16"), jnp.ones((512, 1024), "bfloat16")
  run = lambda x, w: jaxgemm.linear_cross_entropy(
      x, w, jnp.arange(2), implementation="gemv"
  ).sum()
  with jaxgemm.target("NVIDIA H200"):
    text = cuda_kernels(jax.grad(run, (0, 1)), x, w)
  assert "gemv" in str(text)


def test_checkpoint_saves_the_slopes(rng):
  values, labels = operands(rng)

  def count(policy) -> int:
    run = jax.checkpoint(lambda v: losses(v, labels).sum(), policy=policy)
    traced = jax.make_jaxpr(jax.grad(run))(values).jaxpr
    return sum(
        eqn.primitive.name == "jaxgemm_linear" for eqn in equations(traced)
    )

  assert count(jaxgemm.checkpoint_policies.products_saveable) == 1
  assert count(jax.checkpoint_policies.nothing_saveable) == 2


def test_rows_whose_logits_are_all_masked():
  facts = Losses(64, 64, 60, "bfloat16")
  logits = jnp.full((64, 64), -2e38, "bfloat16").at[:, 3].set(-1e38)
  labels = jnp.full(64, 3, jnp.int32)
  log_sum, label, slopes = compat.run_interpreted(
      lambda params: kernel.launch(logits, labels, facts, interpret=params)
  )
  np.testing.assert_array_equal(log_sum, logits[:, 3].astype(jnp.float32))
  np.testing.assert_array_equal(label, log_sum)
  assert not np.asarray(slopes[:, :60]).any()

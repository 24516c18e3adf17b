"""jaxgemm.ragged_dot: values, under JAX's transformations, and on the chip."""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import checkpoint_policies, reference
from tests.kernel_cases import more
from tests.product_cases import count_primitives, cuda_kernels, normal
from tests.ragged_cases import (
  PRIMITIVE,
  SIZES,
  K,
  M,
  N,
  check_as_exact,
  check_close,
  exact,
  exact_gradients,
  float64,
  operands_of,
  plain,
  ragged,
)

# -- Values ------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize(
    "sizes", [SIZES, (40,), (0, 0), (30, 20, 9), (10, 30)], ids=str
)
def test_values_without_a_gpu_are_those_of_xla(sizes, dtype, implementation, rng):
  lhs, rhs, sizes = operands_of(rng, "float32", sizes=sizes)
  scale = 10 if dtype == "int32" else 1
  operands = (scale * lhs).astype(dtype), (scale * rhs).astype(dtype), sizes
  found = jaxgemm.ragged_dot(*operands, implementation=implementation)
  wanted = lax.ragged_dot(*operands)
  assert found.dtype == dtype and found.shape == (M, N)
  np.testing.assert_array_equal(found, wanted)
  if dtype == "float32":
    check_close(found, exact(*operands).astype("float32"), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposed_matrices(dtype, rng):
  lhs, rhs, sizes = operands_of(rng, dtype, transposed=True)
  found = jaxgemm.ragged_dot(lhs, rhs, sizes, transposed=True)
  wanted = lax.ragged_dot(lhs, rhs.swapaxes(1, 2), sizes)
  check_close(found, wanted, 1e-6 if dtype == "float32" else 3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, more(True)])
@pytest.mark.parametrize("dtype", ["bfloat16", more("float16")])
def test_emulated_values(dtype, transposed, rng):
  *operands, sizes = operands_of(rng, dtype, transposed=transposed)
  ours = functools.partial(
      jaxgemm.ragged_dot, *operands, sizes, transposed=transposed
  )
  xla = ours()
  with jaxgemm.emulate():
    found = jax.jit(ours)() if transposed else ours()
  wanted = exact(*operands, sizes, transposed=transposed)
  check_as_exact([found], [xla], [wanted])
  np.testing.assert_array_equal(found[sum(SIZES):], 0.0)


@pytest.mark.slow
@pytest.mark.more
def test_a_row_count_of_many_tiles_emulated(rng):
  """The plan's own config, of a few hundred rows."""
  sizes = jnp.array([100, 0, 130, 3], jnp.int32)
  lhs, rhs = normal(rng, 260, 64, dtype="bfloat16"), normal(rng, 4, 64, 64)
  rhs = rhs.astype("bfloat16")
  with jaxgemm.emulate():
    found = jaxgemm.ragged_dot(lhs, rhs, sizes)
  wanted = exact(lhs, rhs, sizes)
  check_as_exact([found], [lax.ragged_dot(lhs, rhs, sizes)], [wanted])


@pytest.mark.parametrize(
    "dtypes, out",
    [(("bfloat16", "float32"), "float32"), (("float16", "bfloat16"), "float32"),
     (("float16", "float16"), "float16"), (("int8", "bfloat16"), "bfloat16")],
)
def test_mixed_dtypes_are_promoted(dtypes, out, rng):
  lhs, rhs, sizes = operands_of(rng)
  lhs, rhs = (3 * lhs).astype(dtypes[0]), rhs.astype(dtypes[1])
  found = jaxgemm.ragged_dot(lhs, rhs, sizes)
  assert found.dtype == out
  wanted = jnp.asarray(exact(lhs, rhs, sizes), out)
  check_close(found, wanted, 1e-2 if out == "bfloat16" else 1e-3)


@pytest.mark.parametrize("preferred", ["float32", jnp.float16, "bfloat16"])
def test_preferred_element_type(preferred, rng):
  operands = operands_of(rng, "bfloat16")
  found = jaxgemm.ragged_dot(*operands, preferred_element_type=preferred)
  wanted = lax.ragged_dot(*operands, preferred_element_type=jnp.dtype(preferred))
  assert found.dtype == preferred
  np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.more
def test_float32_results_emulated(rng):
  """Also of gradients, whose cotangents are float32 then."""
  operands = operands_of(rng, "bfloat16")
  run = lambda *x: jaxgemm.ragged_dot(*x, preferred_element_type="float32")
  with jaxgemm.emulate():
    found = run(*operands)
  assert found.dtype == "float32"
  assert reference.relative_error(found, exact(*operands)) < 1e-6
  lhs, rhs, sizes = operands
  grads = jax.grad(lambda *x: jnp.sin(run(*x, sizes)).sum(), (0, 1))(lhs, rhs)
  assert [x.dtype.name for x in grads] == ["bfloat16"] * 2
  ct = np.cos(exact(*operands))
  for one, want in zip(grads, exact_gradients(*operands, ct), strict=True):
    assert reference.relative_error(one, want) < 3e-3


@pytest.mark.parametrize(
    "emulated, dtype",
    [*((False, x) for x in ("uint8", "int8", "int16", "uint32", "int64")),
     *(more(True, x) for x in ("uint8", "int16", "uint32"))],
)
def test_dtypes_of_sizes(emulated, dtype, rng):
  lhs, rhs, sizes = operands_of(rng, "bfloat16")
  wanted = lax.ragged_dot(lhs, rhs, sizes)
  with jax.enable_x64(dtype == "int64"):
    sizes = jnp.asarray(SIZES, dtype)
    assert sizes.dtype == dtype
    run = functools.partial(jaxgemm.ragged_dot, lhs, rhs, sizes)
    if emulated:
      with jaxgemm.emulate():
        found = run()
    else:
      found = run()
  check_close(found, wanted, 3e-3)
  numpy_sizes = np.array(SIZES)
  np.testing.assert_array_equal(jaxgemm.ragged_dot(lhs, rhs, numpy_sizes), wanted)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_kernels_lower_where_integers_have_64_bits(dtype, rng):
  lhs, rhs, _ = operands_of(rng, "bfloat16")
  loss = lambda *x: jnp.sum(jnp.sin(jaxgemm.ragged_dot(*x).astype("float32")))
  with jax.enable_x64(True):
    found = cuda_kernels(jax.grad(loss, (0, 1)), lhs, rhs, jnp.asarray(SIZES, dtype))
  assert found == dict(grouped_m=2, grouped_k=1)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_narrow_sizes_whose_sum_is_wider(dtype, rng):
  """XLA adds sizes up in their own dtype, and would lose rows."""
  lhs, rhs = normal(rng, 700, K), normal(rng, 7, K, N)
  sizes = np.array([100, 120, 0, 127, 100, 127, 90])
  found = jaxgemm.ragged_dot(lhs, rhs, jnp.asarray(sizes, dtype), precision="highest")
  assert reference.relative_error(found, exact(lhs, rhs, sizes)) < 1e-6


def test_one_group_is_a_product(rng):
  lhs, rhs = normal(rng, M, K), normal(rng, 1, K, N)
  check_close(ragged()(lhs, rhs, jnp.array([M])), lhs @ rhs[0])


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(
    "m, k, n, g", [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2), (5, 4, 3, 0)], ids=str
)
def test_empty_arrays(m, k, n, g, emulated):
  """As jax.lax.ragged_dot has them, and their gradients."""
  lhs, rhs = jnp.ones((m, k), "bfloat16"), jnp.ones((g, k, n), "bfloat16")
  sizes = jnp.full((g,), min(m, 2), jnp.int32)
  wanted = np.zeros((m, n))
  if g:  # XLA's CPU compiler has no such product of no groups.
    np.testing.assert_array_equal(lax.ragged_dot(lhs, rhs, sizes), wanted)
  loss = lambda *x: jaxgemm.ragged_dot(*x, sizes).sum()
  with jaxgemm.emulate() if emulated else jaxgemm.batch_invariant(False):
    np.testing.assert_array_equal(jaxgemm.ragged_dot(lhs, rhs, sizes), wanted)
    grads = jax.grad(loss, (0, 1))(lhs, rhs)
  assert [x.shape for x in grads] == [lhs.shape, rhs.shape]
  assert all(np.isfinite(float64(x)).all() for x in grads)


# -- vmap, jit, scan, checkpoint ---------------------------------------------------

AXES = {
    "lhs": (0, None, None), "rhs": (None, 0, None), "sizes": (None, None, 0),
    "lhs and rhs": (0, 0, None), "lhs inside, sizes": (1, None, 0),
    "rhs inside": (None, 2, None), "all": (0, 1, 0),
}


@pytest.mark.parametrize("name", AXES)
def test_vmap(name, rng):
  axes = AXES[name]
  shapes = (M, K), (4, K, N)
  lhs, rhs = (
      normal(rng, *(np.insert(shape, axis, 3) if axis is not None else shape))
      for shape, axis in zip(shapes, axes[:2], strict=True)
  )
  sizes = jnp.array([SIZES, (40, 0, 0, 0), (1, 2, 3, 4)])
  sizes = sizes if axes[2] == 0 else sizes[0]
  ours, theirs = (jax.vmap(f, axes) for f in (ragged(), plain))
  wanted = theirs(lhs, rhs, sizes)
  check_close(ours(lhs, rhs, sizes), wanted)
  loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x, sizes)))
  grads, wanted = (jax.grad(loss(f), (0, 1))(lhs, rhs) for f in (ours, theirs))
  check_close(grads, wanted, 1e-5)
  per_example = lambda f: jax.vmap(
      jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1)), axes
  )
  found, wanted = (per_example(f)(lhs, rhs, sizes) for f in (ragged(), plain))
  check_close(found, wanted, 1e-5)


def test_vmap_twice_and_of_nothing(rng):
  lhs, (_, rhs, sizes) = normal(rng, 2, 3, M, K), operands_of(rng)
  twice = lambda f: jax.vmap(jax.vmap(f, (0, None, None)), (0, None, None))
  check_close(twice(ragged())(lhs, rhs, sizes), twice(plain)(lhs, rhs, sizes))
  none = jax.vmap(ragged(), (0, None, None))(lhs[0, :0], rhs, sizes)
  assert none.shape == (0, M, N)


@pytest.mark.slow
@pytest.mark.more
def test_vmap_emulated(rng):
  lhs, rhs = normal(rng, 2, M, K, dtype="bfloat16"), normal(rng, 4, K, N)
  rhs, sizes = rhs.astype("bfloat16"), jnp.array([SIZES, (0, 40, 0, 0)])
  run = jax.vmap(jaxgemm.ragged_dot, (0, None, 0))
  with jaxgemm.emulate():
    found = jax.jit(run)(lhs, rhs, sizes)
  for one, x, s in zip(found, lhs, sizes, strict=True):
    assert reference.relative_error(one, exact(x, rhs, s)) < 3e-3


@pytest.mark.parametrize("checkpoint", [False, True])
def test_scan(checkpoint, rng):
  x, ws = normal(rng, 20, 16), normal(rng, 3, 4, 16, 16)
  sizes = jnp.array([[3, 0, 7, 10], [20, 0, 0, 0], [1, 1, 1, 1]])

  def chain(multiply):
    body = lambda x, layer: (jnp.tanh(multiply(x, *layer)), None)
    body = jax.checkpoint(body) if checkpoint else body
    return jax.jit(lambda x, ws: lax.scan(body, x, (ws, sizes))[0].sum())

  found, wanted = (
      jax.value_and_grad(chain(f), (0, 1))(x, ws) for f in (ragged(), plain)
  )
  check_close(found, wanted, 1e-5)


def test_sizes_are_data(rng):
  """Nothing is traced or compiled anew for others; they may be computed."""
  lhs, rhs, _ = operands_of(rng)
  count = []

  @jax.jit
  def run(lhs, rhs, expert):
    count.append(None)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=4)
    out = ragged()(lhs[order], rhs, sizes)
    return jnp.zeros_like(out).at[order].set(out)

  for _ in range(3):
    expert = rng.integers(0, 4, M)
    wanted = np.einsum("rk,rkn->rn", *float64(lhs, np.asarray(rhs)[expert]))
    assert reference.relative_error(run(lhs, rhs, expert), wanted) < 1e-6
  assert len(count) == 1


def test_disable_jit_and_debug_nans(rng):
  operands = operands_of(rng)
  with jax.disable_jit():
    check_close(ragged()(*operands), plain(*operands))
  with jax.debug_nans(True), pytest.raises(FloatingPointError):
    ragged()(operands[0] * jnp.inf, *operands[1:])


@pytest.mark.parametrize(
    "policy, forward",
    [(None, 2), (checkpoint_policies.products_saveable, 1),
     (checkpoint_policies.products_with_no_batch_dims_saveable, 1),
     (jax.checkpoint_policies.save_only_these_names("jaxgemm_out"), 1),
     (jax.checkpoint_policies.everything_saveable, 1)],
    ids=["none", "products", "no batch", "name", "everything"],
)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_checkpoint_policies(implementation, policy, forward, rng):
  """How often the forward product runs."""
  lhs, rhs, sizes = operands_of(rng)
  run = ragged(implementation=implementation)
  layer = lambda *x: jnp.sin(jnp.sin(run(*x, sizes)))
  loss = lambda *x: jax.checkpoint(layer, policy=policy)(*x).sum()
  assert count_primitives(jax.grad(loss, (0, 1)), lhs, rhs)[PRIMITIVE] == forward + 2
  wanted = jax.grad(lambda *x: jnp.sin(jnp.sin(plain(*x, sizes))).sum(), (0, 1))
  check_close(jax.grad(loss, (0, 1))(lhs, rhs), wanted(lhs, rhs), 1e-5)


# -- On the chip -------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m, k, n, g", [(4096, 1024, 1536, 16), (1000, 520, 264, 40)])
def test_gpu_values_and_gradients(m, k, n, g, dtype, transposed, rng):
  lhs, ct = normal(rng, m, k, dtype=dtype), normal(rng, m, n, dtype=dtype)
  rhs = normal(rng, *((g, n, k) if transposed else (g, k, n)), dtype=dtype)
  for total in (0.7, 1.0):
    sizes = rng.multinomial(int(total * m), rng.dirichlet(np.full(g, 0.3)))
    sizes = jnp.asarray(sizes, jnp.int32)

    def results(implementation):
      run = lambda *x: jaxgemm.ragged_dot(
          *x, sizes, transposed=transposed, implementation=implementation
      )
      out, pull = jax.vjp(run, lhs, rhs)
      return out, *pull(ct)

    wanted = (
        exact(lhs, rhs, sizes, transposed=transposed),
        *exact_gradients(lhs, rhs, sizes, ct, transposed=transposed),
    )
    check_as_exact(jax.jit(results, static_argnums=0)(None), results("xla"), wanted)


@pytest.mark.gpu
def test_gpu_rows_have_the_same_bits(rng):
  m, k, n, g = 2048, 1000, 520, 8
  x, rhs = normal(rng, m, k, dtype="bfloat16"), normal(rng, g, k, n, dtype="bfloat16")
  with jaxgemm.batch_invariant():
    run = jax.jit(jaxgemm.ragged_dot)
    whole = np.asarray(run(x, rhs, jnp.full((g,), m // g)))
    for first, rows in ((256, 1), (260, 17), (300, 200)):
      sizes = jnp.zeros(g, jnp.int32).at[1].set(rows)
      some = np.asarray(run(x[first : first + rows], rhs, sizes))
      np.testing.assert_array_equal(some, whole[first : first + rows])

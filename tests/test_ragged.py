"""jaxgemm.ragged_dot: values, derivatives, batches, plans, errors and shardings."""

from __future__ import annotations

from collections import Counter
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

import jaxgemm
from jaxgemm import checkpoint_policies, reference
from jaxgemm.device import known_device
from jaxgemm.plan import make_plan
from jaxgemm.recording import recording
from pallas_kernels.problem import BlockedConfig, Epilogue, PersistentConfig, Problem
from tests.kernel_cases import more
from tests.product_cases import count_primitives, cuda_kernels, normal

# Of 40 rows; a group of few, one of none, and 7 rows of nobody.
SIZES = (9, 0, 23, 1)
M, K, N = 40, 72, 48
SMALL = PersistentConfig(64, 16, 64, num_stages=3, consumers=1, swap=True)
PRIMITIVE = "jaxgemm_ragged"


def operands_of(rng, dtype="float32", *, transposed=False, sizes=SIZES):
  lhs = normal(rng, M, K, dtype=dtype)
  shape = (len(sizes), N, K) if transposed else (len(sizes), K, N)
  return lhs, normal(rng, *shape, dtype=dtype), jnp.asarray(sizes, jnp.int32)


def float64(*arrays):
  return [np.asarray(x).astype(np.float64) for x in arrays]


def ranges(sizes, rows: int) -> list[slice]:
  ends = np.minimum(np.cumsum(np.asarray(sizes, np.int64)), rows)
  return [slice(*x) for x in zip(np.append(0, ends[:-1]), ends, strict=True)]


def exact(lhs, rhs, sizes, *, transposed=False) -> np.ndarray:
  lhs, rhs = float64(lhs, rhs)
  rhs = rhs.swapaxes(1, 2) if transposed else rhs
  out = np.zeros((lhs.shape[0], rhs.shape[2]))
  for matrix, rows in zip(rhs, ranges(sizes, len(lhs)), strict=True):
    out[rows] = lhs[rows] @ matrix
  return out


def exact_gradients(lhs, rhs, sizes, ct, *, transposed=False):
  """Those of the operands as they are."""
  of_lhs = exact(ct, rhs, sizes, transposed=not transposed)
  lhs, ct = float64(lhs, ct)
  of_rhs = np.stack([lhs[rows].T @ ct[rows] for rows in ranges(sizes, len(lhs))])
  return of_lhs, of_rhs.swapaxes(1, 2) if transposed else of_rhs


def plain(lhs, rhs, sizes, *, transposed=False):
  """The same product of what JAX differentiates by itself."""
  ends = jnp.cumsum(sizes)
  row = jnp.arange(lhs.shape[0])
  of = (row[:, None] < ends) & (row[:, None] >= ends - sizes)
  of = of.astype(lhs.dtype)
  spec = "rk,gnk,rg->rn" if transposed else "rk,gkn,rg->rn"
  return jnp.einsum(spec, lhs, rhs, of, precision="highest")


def ragged(**fields):
  fields = dict(precision="highest") | fields
  return lambda *x: jaxgemm.ragged_dot(*x, **fields)


def check_close(found, wanted, limit=2e-6) -> None:
  for one, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert one.shape == want.shape and one.dtype == want.dtype
    assert reference.relative_error(one, want) < limit


def check_as_exact(found, xla, wanted) -> None:
  """At most twice as far off as XLA's."""
  for one, other, want in zip(found, xla, wanted, strict=True):
    assert one.dtype == other.dtype
    limit = 2 * reference.relative_error(other, want)
    assert reference.relative_error(one, want) <= limit


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


# -- Derivatives -------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients(dtype, transposed, rng):
  *operands, sizes = operands_of(rng, dtype, transposed=transposed)
  ct = normal(rng, M, N, dtype=dtype)
  ours = lambda *x: jaxgemm.ragged_dot(*x, sizes, transposed=transposed)

  def xla(lhs, rhs):
    return lax.ragged_dot(lhs, rhs.swapaxes(1, 2) if transposed else rhs, sizes)

  found, theirs = (jax.vjp(f, *operands)[1](ct) for f in (ours, xla))
  wanted = exact_gradients(*operands, sizes, ct, transposed=transposed)
  check_as_exact(found, theirs, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, more(True)])
def test_emulated_gradients(transposed, rng):
  *operands, sizes = operands_of(rng, "bfloat16", transposed=transposed)
  ct = normal(rng, M, N, dtype="bfloat16")
  ours = lambda *x: jaxgemm.ragged_dot(*x, sizes, transposed=transposed)
  theirs = jax.vjp(ours, *operands)[1](ct)
  with jaxgemm.emulate():
    found = jax.vjp(ours, *operands)[1](ct)
  wanted = exact_gradients(*operands, sizes, ct, transposed=transposed)
  check_as_exact(found, theirs, wanted)
  assert np.isfinite(float64(found[1])).all()
  np.testing.assert_array_equal(found[1][1], 0.0)  # Of the group without rows.
  np.testing.assert_array_equal(found[0][sum(SIZES):], 0.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_numerical_gradients(transposed, rng):
  """Of both modes, and of second order."""
  lhs, rhs, sizes = operands_of(rng, transposed=transposed)
  run = lambda lhs, rhs: ragged(transposed=transposed)(lhs, rhs, sizes)
  check_grads(run, (lhs / 8, rhs), order=2, atol=2e-2, rtol=2e-2)


def hvp(f):
  """Of the square's sum, along the operands themselves."""
  loss = lambda *x: jnp.sum(jnp.sin(f(*x)) ** 2)
  return lambda *x: jax.jvp(jax.grad(loss, (0, 1)), x, x)[1]


SECOND = {
    "forward over reverse": hvp,
    "reverse over reverse": lambda f: jax.grad(
        lambda *x: sum(
            jnp.sum(jnp.cos(g))
            for g in jax.grad(lambda *y: jnp.sum(jnp.sin(f(*y))), (0, 1))(*x)
        ), (0, 1),
    ),
    "third": lambda f: jax.grad(
        lambda *x: sum(jnp.sum(jnp.sin(g)) for g in hvp(f)(*x)), (0, 1)
    ),
}


@pytest.mark.parametrize("order", SECOND)
@pytest.mark.parametrize("transposed", [False, True])
def test_higher_derivatives(transposed, order, rng):
  lhs, rhs, sizes = operands_of(rng, transposed=transposed)
  lhs = lhs / 9
  of = lambda f: lambda *x: f(*x, sizes)
  ours = of(ragged(transposed=transposed))
  theirs = of(functools.partial(plain, transposed=transposed))
  found = jax.jit(SECOND[order](ours))(lhs, rhs)
  check_close(found, jax.jit(SECOND[order](theirs))(lhs, rhs), 1e-5)


@pytest.mark.slow
@pytest.mark.more
def test_second_derivatives_emulated(rng):
  lhs, rhs, sizes = operands_of(rng, "bfloat16")

  def second(lhs, rhs):
    loss = lambda *x: jnp.sum(jaxgemm.ragged_dot(*x, sizes).astype("float32") ** 2)
    return jax.jvp(jax.grad(loss, (0, 1)), (lhs, rhs), (lhs, rhs))[1]

  xla = second(lhs, rhs)
  with jaxgemm.emulate():
    found = jax.jit(second)(lhs, rhs)
  for one, other in zip(found, xla, strict=True):
    assert reference.relative_error(one, other) < 1e-2


def test_jvp_and_linearize(rng):
  lhs, rhs, sizes = operands_of(rng)
  tangents = normal(rng, *lhs.shape), normal(rng, *rhs.shape)
  ours, theirs = (lambda *x, f=f: f(*x, sizes) for f in (ragged(), plain))
  wanted = jax.jvp(theirs, (lhs, rhs), tangents)
  check_close(jax.jvp(ours, (lhs, rhs), tangents), wanted)
  out, linear = jax.linearize(ours, lhs, rhs)
  check_close((out, linear(*tangents)), wanted)
  # One operand alone has one product more.
  one = lambda lhs: ours(lhs, rhs)
  assert count_primitives(lambda x: jax.jvp(one, (x,), (x,)), lhs)[PRIMITIVE] == 2
  check_close(jax.jvp(one, (lhs,), tangents[:1])[1], theirs(tangents[0], rhs))
  ct = normal(rng, M, N)
  (transpose,) = jax.linear_transpose(one, lhs)(ct)
  check_close(transpose, jax.linear_transpose(lambda x: theirs(x, rhs), lhs)(ct)[0])


@pytest.mark.parametrize("argnums, count", [(0, 1), (1, 1), ((0, 1), 2)])
def test_only_what_is_asked_for_is_multiplied(argnums, count, rng):
  """Beside the forward product, which XLA drops where nobody wants it."""
  lhs, rhs, sizes = operands_of(rng)
  loss = lambda *x: jaxgemm.ragged_dot(*x, sizes).sum()
  assert count_primitives(jax.grad(loss, argnums), lhs, rhs)[PRIMITIVE] == count + 1


def test_gradients_of_kernels_are_kernels(rng):
  """Three of the forward product's two operands, in place: nothing is transposed."""
  lhs, rhs, sizes = operands_of(rng, "bfloat16")
  loss = lambda *x: jnp.sum(jnp.sin(jaxgemm.ragged_dot(*x).astype("float32")))
  for argnums, wanted in (
      (0, dict(grouped_m=2)), (1, dict(grouped_m=1, grouped_k=1)),
      ((0, 1), dict(grouped_m=2, grouped_k=1)),
  ):
    found = cuda_kernels(jax.grad(loss, argnums), lhs, rhs, sizes)
    assert found == Counter(wanted)
  for transposed in (False, True):
    lhs, rhs, sizes = operands_of(rng, "bfloat16", transposed=transposed)
    with jaxgemm.target("NVIDIA H200"):
      run = lambda *x: jaxgemm.ragged_dot(*x, sizes, transposed=transposed).sum()
      exported = jax.export.export(jax.jit(jax.grad(run, (0, 1))), platforms=["cuda"])
      assert "stablehlo.transpose" not in exported(lhs, rhs).mlir_module()


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


# -- Plans, and what is left to XLA ------------------------------------------------


def shapes(m=4096, k=2048, n=1024, g=8, dtype="bfloat16"):
  return [
      jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((g, k, n), dtype),
      jax.ShapeDtypeStruct((g,), "int32"),
  ]


def test_explain_of_a_function(capsys):
  loss = lambda *x: jnp.sum(jnp.sin(jaxgemm.ragged_dot(*x).astype("float32")))
  with jaxgemm.target("NVIDIA H200"):
    found = jaxgemm.explain(jax.grad(loss, (0, 1)), *shapes())
  kernels = Counter(plan.kernel for plan in found)
  assert kernels == {"grouped_m": 2, "grouped_k": 1}
  assert {plan.problem.grouped for plan in found} == {"m", "k"}
  printed = capsys.readouterr().out
  assert "3 of 3 planned products on kernels of jaxgemm" in printed
  assert "in 8 groups of m" in printed and "in 8 groups of k" in printed
  assert "estimated for 8 groups of about 512 rows" in printed


@pytest.mark.parametrize(
    "options, dtype, why",
    [({}, "float32", "float32"), ({}, "int8", "int8"),
     (dict(preferred_element_type="float64"), "bfloat16", "float64"),
     (dict(implementation="xla"), "bfloat16", "implementation='xla'")],
)
def test_what_is_left_to_xla_says_why(options, dtype, why, capsys):
  run = lambda *x: jaxgemm.ragged_dot(*x, **options)
  with jaxgemm.target("NVIDIA H200"), jax.enable_x64(why == "float64"):
    (plan,) = jaxgemm.explain(run, *shapes(dtype=dtype))
  assert plan.kernel == "xla" and why in plan.reason
  assert "0 of 1 planned products" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "out", "kernel"),
    [more("float8_e4m3fn", "bfloat16", "grouped_m"),
     ("float8_e5m2", "float16", "grouped_m"), ("float8_e4m3fn", "float32", "xla"),
     pytest.param("int8", "int32", "grouped_m", marks=pytest.mark.slow),
     ("int8", "bfloat16", "xla"), ("float8_e4m3fn", None, "xla")],
)
def test_operands_in_8_bits(dtype, out, kernel, rng):
  """Results that the tensor cores sum up exactly enough are kernels'."""
  lhs, rhs = (normal(rng, *shape).astype(dtype) for shape in ((M, K), (4, N, K)))
  run = ragged(precision=None, transposed=True, preferred_element_type=out)
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    traced = jax.jit(run).trace(lhs, rhs, jnp.asarray(SIZES, "int32"))
    traced.lower(lowering_platforms=("cuda",))
  (plan,) = record.plans
  assert plan.kernel == kernel and plan.reason
  if kernel == "xla":
    return
  with jaxgemm.emulate():
    found = jax.jit(run)(lhs, rhs, jnp.asarray(SIZES, "int32"))
  wanted = exact(lhs, rhs, SIZES, transposed=True)
  assert found.dtype == out and reference.relative_error(found, wanted) < 2e-3


def test_float8_is_promoted_where_it_must_be():
  """Of float16 results each k tile, of bfloat16's long sums some, of blocks all."""
  for scaling, out, k, promote in (
      ("none", "float16", 512, 1), ("none", "bfloat16", 8192, 0),
      ("none", "bfloat16", 16384, 16), ("rows", "bfloat16", 16384, 16),
      ("rows", "float32", 512, 1), ("blocks", "bfloat16", 16384, 1),
  ):
    problem = Problem(
        512, 1024, k, 4, lhs_batched=False, rhs_layout="k-major", grouped="m",
        dtype="float8_e4m3fn", out_dtype=out, algorithm="e4m3_f32",
        epilogue=Epilogue(scaling=scaling),
    )
    plan = make_plan(problem, known_device("NVIDIA H200"))
    assert (plan.kernel, plan.config.promote) == ("grouped_m", promote)


@pytest.mark.parametrize("n", [1023, 1028])
def test_odd_columns_are_left_to_xla(n):
  with jaxgemm.target("NVIDIA H200"):
    (plan,) = jaxgemm.explain(jaxgemm.ragged_dot, *shapes(n=n))
    assert plan.kernel == "xla"
    named = lambda *x: jaxgemm.ragged_dot(*x, implementation="grouped_m")
    with pytest.raises(ValueError, match=f"n={n}"):
      jaxgemm.explain(named, *shapes(n=n))


def test_gradients_of_xla_stay_xlas():
  loss = lambda *x: jnp.sum(
      jaxgemm.ragged_dot(*x, implementation="xla").astype("float32") ** 2
  )
  with jaxgemm.target("NVIDIA H200"):
    found = jaxgemm.explain(jax.grad(loss, (0, 1)), *shapes())
  assert {plan.kernel for plan in found} == {"xla"}


@pytest.mark.slow
def test_a_named_kernel_and_its_config(rng):
  config = PersistentConfig(128, 128, 64, num_stages=3)
  for options in (dict(config=config), dict(config=config, implementation="grouped_m")):
    with jaxgemm.target("NVIDIA H200"):
      run = lambda *x: jaxgemm.ragged_dot(*x, **options)
      (plan,) = jaxgemm.explain(run, *shapes())
    assert (plan.kernel, plan.config, plan.source) == ("grouped_m", config, "override")
  loss = lambda *x: jnp.sum(jaxgemm.ragged_dot(*x, config=config).astype("float32") ** 2)
  with jaxgemm.target("NVIDIA H200"):
    found = jaxgemm.explain(jax.grad(loss, (0, 1)), *shapes())
  # Gradients are problems of their own.
  assert [plan.config == config for plan in found].count(True) == 1
  assert Counter(plan.kernel for plan in found) == {"grouped_m": 2, "grouped_k": 1}
  operands = operands_of(rng, "bfloat16")
  with jaxgemm.emulate():
    found = jaxgemm.ragged_dot(*operands, config=SMALL)
  assert reference.relative_error(found, exact(*operands)) < 3e-3


def test_symbolic_rows_are_left_to_xla(rng):
  scope = jax.export.SymbolicScope()
  _, rhs, sizes = operands_of(rng)
  lhs = jax.ShapeDtypeStruct(
      jax.export.symbolic_shape(f"m,{K}", scope=scope), jnp.float32
  )
  exported = jax.export.export(jax.jit(ragged()), platforms=["cpu", "cuda"])(
      lhs, rhs, sizes
  )
  x = normal(rng, 33, K)
  check_close(exported.call(x, rhs, sizes), plain(x, rhs, sizes))


# -- Batch invariance --------------------------------------------------------------


@pytest.mark.slow
def test_rows_have_the_same_bits(rng):
  """In other groups of rows, at another place, of another number of rows."""
  x = normal(rng, 30, K, dtype="bfloat16")
  rhs = normal(rng, 4, K, N, dtype="bfloat16")
  others = normal(rng, 200, K, dtype="bfloat16")
  with jaxgemm.emulate(), jaxgemm.batch_invariant():
    alone = jaxgemm.ragged_dot(x, rhs, jnp.array([0, 0, 30, 0]))
    among = jaxgemm.ragged_dot(
        jnp.concatenate([others[:77], x, others[77:]]), rhs, jnp.array([70, 3, 150, 7])
    )
  np.testing.assert_array_equal(alone, among[77:107])


def test_batch_invariance_is_planned_or_raises(rng):
  operands = operands_of(rng, "bfloat16")
  with jaxgemm.batch_invariant():
    with pytest.raises(ValueError, match="batch_invariant: no kernel serves .*Hopper"):
      jaxgemm.ragged_dot(*operands)
    with jaxgemm.target("NVIDIA H200"):
      with pytest.raises(ValueError, match="batch_invariant.*float32"):
        jaxgemm.ragged_dot(*operands_of(rng))
      with pytest.raises(ValueError, match="batch_invariant: XLA|batch_invariant: xla"):
        jaxgemm.ragged_dot(*operands, implementation="xla")
      wrong = PersistentConfig(128, 128, promote=1)
      with pytest.raises(ValueError, match="promote=1 is not 0"):
        jaxgemm.ragged_dot(*operands, config=wrong)
      (plan,) = jaxgemm.explain(jaxgemm.ragged_dot, *operands)
      assert plan.kernel == "grouped_m"
      loss = lambda *x: jaxgemm.ragged_dot(*x, operands[2]).astype("float32").sum()
      found = jaxgemm.explain(jax.grad(loss, (0, 1)), *operands[:2])
      assert {plan.kernel for plan in found} == {"grouped_m", "grouped_k"}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_batch_invariance_is_held_to_where_it_is_lowered(platform, rng):
  """No kernel is for another platform than was planned for, nor for symbolic sizes."""
  lhs, rhs, sizes = operands_of(rng, "bfloat16")
  where = "on this platform"
  if platform == "cuda":
    rows = jax.export.symbolic_shape(f"m,{K}")
    lhs, where = jax.ShapeDtypeStruct(rows, lhs.dtype), "symbolic sizes"
  with jaxgemm.target("NVIDIA H200"), jaxgemm.batch_invariant():
    with pytest.raises(ValueError, match=f"batch_invariant: no kernel serves {where}"):
      jax.export.export(jax.jit(jaxgemm.ragged_dot), platforms=[platform])(
          lhs, rhs, sizes
      )


# -- Errors ------------------------------------------------------------------------

LHS, RHS, GROUPS = np.ones((8, 16), "float16"), np.ones((3, 16, 8), "float16"), [1, 2, 3]
GROUPS = np.array(GROUPS)
BAD = {
    "lhs: a list": (([[1.0]], RHS, GROUPS), {}, TypeError, "lhs is of type list"),
    "rhs: None": ((LHS, None, GROUPS), {}, TypeError, "rhs is of type NoneType"),
    "sizes: a tuple": ((LHS, RHS, (1, 2, 3)), {}, TypeError, "group_sizes is of type"),
    "lhs: 3 dimensions": (
        (LHS[None], RHS, GROUPS), {}, TypeError, r"lhs has shape \(1, 8, 16\).*\[m, k\]"),
    "rhs: 2 dimensions": (
        (LHS, RHS[0], GROUPS), {}, TypeError, r"rhs has shape .*\[groups, k, n\]"),
    "rhs: 2, transposed": (
        (LHS, RHS[0], GROUPS), dict(transposed=True), TypeError,
        r"rhs has shape .*\[groups, n, k\]"),
    "sizes: a scalar": (
        (LHS, RHS, np.int32(3)), {}, TypeError, "group_sizes has shape"),
    "sizes: floats": (
        (LHS, RHS, np.ones(3)), {}, TypeError, "group_sizes is of dtype float"),
    "sizes: bools": (
        (LHS, RHS, np.ones(3, bool)), {}, TypeError, "group_sizes is of dtype bool"),
    "k": ((LHS[:, 1:], RHS, GROUPS), {}, TypeError, r"lhs has shape .*rhs.*dimension 1"),
    "k, transposed": (
        (LHS, RHS, GROUPS), dict(transposed=True), TypeError, "dimension 2 of rhs"),
    "groups": (
        (LHS, RHS, GROUPS[1:]), {}, TypeError, "group_sizes has shape .*each group"),
    "no common dtype": (
        (jnp.asarray(LHS, "float8_e4m3fn"), RHS, GROUPS), {}, ValueError,
        "ragged_dot: lhs is float8_e4m3fn and rhs float16, which JAX promotes to no"),
    "preferred_element_type": (
        (LHS, RHS, GROUPS), dict(preferred_element_type="no"), TypeError,
        "preferred_element_type='no'"),
    "an unknown kernel": (
        (LHS, RHS, GROUPS), dict(implementation="fast"), ValueError, "'fast' is unknown"),
    "another kernel": (
        (LHS, RHS, GROUPS), dict(implementation="persistent"), ValueError,
        "'persistent' cannot serve"),
    "the sums' kernel": (
        (LHS, RHS, GROUPS), dict(implementation="grouped_k"), ValueError,
        "'grouped_k' cannot serve"),
    "another's config": (
        (LHS, RHS, GROUPS), dict(config=BlockedConfig()), ValueError, "BlockedConfig"),
    "a config for xla": (
        (LHS, RHS, GROUPS), dict(config=SMALL, implementation="xla"), ValueError, "xla"),
    "a config of other types": (
        (LHS, RHS, GROUPS), dict(config=PersistentConfig(tile_m=64.0)), TypeError,
        "tile_m"),
    "no GPU": (
        (LHS, RHS, GROUPS), dict(implementation="grouped_m"), ValueError,
        "'grouped_m' cannot run.*Hopper.*jaxgemm.emulate"),
    "no GPU, a config": (
        (LHS, RHS, GROUPS), dict(config=SMALL), ValueError,
        "'grouped_m' cannot run.*Hopper"),
    "precision": (
        (LHS, RHS, GROUPS), dict(precision="good"), ValueError, "precision|good"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
  operands, options, error, message = BAD[name]
  with pytest.raises(error, match=message):
    jaxgemm.ragged_dot(*operands, **options)


@pytest.mark.parametrize(
    "options, dtype, message",
    [(dict(implementation="grouped_m"), "float32", "'grouped_m'.*float32"),
     (dict(config=PersistentConfig(tile_m=96)), "float16",
      "cannot serve .*tile_m=96 over"),
     (dict(config=PersistentConfig(cluster_m=2)), "float16",
      "cannot serve .*along rows"),
     (dict(config=SMALL, preferred_element_type="float32"), "float16",
      "cannot serve .*swap=True stores 16-bit")],
)
def test_errors_of_a_target(options, dtype, message):
  with jaxgemm.target("NVIDIA H200"), pytest.raises(ValueError, match=message):
    jaxgemm.ragged_dot(LHS.astype(dtype), RHS.astype(dtype), GROUPS, **options)


def test_other_products_take_no_groups():
  with pytest.raises(ValueError, match="grouped_m"):
    with jaxgemm.target("NVIDIA H200"):
      jaxgemm.matmul(LHS, LHS.T, implementation="grouped_m")


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

"""Weights in 8 bits, converted where they are used: plans, values, layers."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import cost_model, heuristics, reference
from jaxgemm.device import known_device
from jaxgemm.recording import recording
from pallas_kernels import compat
from pallas_kernels.conversions import SOURCES
from tests.kernel_cases import make_problem, more, small_config
from tests.product_cases import count_primitives, equations

H200 = known_device("NVIDIA H200")


def plans(function, *operands):
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
  return list(record.plans)


def operand_types(m=16, k=4096, n=14336, source="int8", dtype="bfloat16"):
  return (
      jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), source)
  )


def as_accurate(found, xla, exact) -> None:
  """Asserts that each result is off by twice XLA's error at most, and of its dtype."""
  leaves = (jax.tree.leaves(each) for each in (found, xla, exact))
  for a, b, truth in zip(*leaves, strict=True):
    assert a.dtype == b.dtype
    limit = 2 * reference.relative_error(b, truth)
    assert reference.relative_error(a, truth) <= limit < 0.1


def in_float64(function, *operands):
  """What the function returns of its operands in float64."""
  with jax.enable_x64(True):
    wide = (jnp.asarray(np.asarray(each, np.float64)) for each in operands)
    return jax.tree.map(np.asarray, function(*wide))


WRITTEN = {
    "converted": lambda x, w: jaxgemm.matmul(x, w.astype(x.dtype)),
    "promoted": jaxgemm.matmul,
    "in steps": lambda x, w: jaxgemm.matmul(x, w.astype("float32").astype(x.dtype)),
    "transposed twice": lambda x, w: jaxgemm.matmul(x, w.T.astype(x.dtype).T),
    "einsum": lambda x, w: jaxgemm.einsum("mk,kn->mn", x, w.astype(x.dtype)),
    "in the other place": lambda x, w: jaxgemm.matmul(w.astype(x.dtype).T, x.T).T,
    "jit": jax.jit(lambda x, w: jaxgemm.matmul(x, w.astype(x.dtype))),
    "checkpoint": jax.checkpoint(lambda x, w: jaxgemm.matmul(x, w.astype(x.dtype))),
    "scan": lambda x, w: jax.lax.scan(
        lambda c, _: (c, jaxgemm.matmul(x, w.astype(x.dtype))), 0, None, length=2)[1],
    "forward mode": lambda x, w: jax.jvp(
        lambda x: jaxgemm.matmul(x, w.astype(x.dtype)), (x,), (x,)),
    "accelerated": jaxgemm.accelerate(lambda x, w: x @ w.astype(x.dtype)),
    "mapped": lambda x, w: jax.vmap(
        lambda x: jaxgemm.matmul(x, w.astype(x.dtype)))(x[:, None]),
    "experts of jit": lambda x, w: jax.vmap(
        jax.jit(lambda x, w: jaxgemm.matmul(x, w.T.astype(x.dtype).T)), (None, 2), 1)(
            x, jnp.stack([w] * 3, 2)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", WRITTEN)
def test_few_rows_of_weights_are_converted_in_the_kernel(name, source):
  if name == "promoted" and source != "int8":
    pytest.skip("JAX promotes no float8")
  found = plans(WRITTEN[name], *operand_types(source=source))
  plan = next(plan for plan in found if plan.problem.converts)
  assert plan.kernel in ("persistent", "split_k") and source in str(plan.problem)
  assert plan.reason and plan.source == "heuristic"


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("differentiated", [False, True])
def test_experts(axis, differentiated):
  """Mapped together with their conversion, along any axis."""
  def multiply(x, w):
    return jaxgemm.matmul(x, w.astype(x.dtype))

  def forward(x, w):
    return jax.jvp(lambda x: multiply(x, w), (x,), (x,))[0]

  shape = [4096, 1024]
  shape.insert(axis, 8)
  x = jax.ShapeDtypeStruct((8, 16, 4096), "bfloat16")
  w = jax.ShapeDtypeStruct(tuple(shape), "int8")
  function = jax.vmap(forward if differentiated else multiply, (0, axis))
  found = plans(function, x, w)
  problem = next(plan.problem for plan in found if plan.problem.converts)
  assert (problem.batch, problem.rhs_source) == (8, "int8")


@pytest.mark.parametrize(
    ("name", "function"),
    {
        "multiplied": lambda x, w: jaxgemm.matmul(x, w.astype(x.dtype) * x[0, 0]),
        "less wide on the way": lambda x, w: jaxgemm.matmul(
            x, w.astype("int4").astype(x.dtype)),
        "float32": lambda x, w: jaxgemm.matmul(
            x.astype("float32"), w.astype("float32")),
        "computed": lambda x, w: jaxgemm.matmul(x, (w + w).astype(x.dtype)),
        "of a kernel": lambda x, w: jaxgemm.matmul(
            x, w.astype(x.dtype), implementation="persistent"),
        "added to c": lambda x, w: jaxgemm.gemm(
            x, w.astype(x.dtype), beta=1.0, c=jnp.ones((16, 14336), x.dtype)),
        "batch invariant": lambda x, w: jaxgemm.matmul(
            x, w.astype(x.dtype), batch_invariant=True),
    }.items(),
)
def test_what_no_kernel_converts(name, function):
  del name
  found = plans(function, *operand_types())
  assert found and not any(plan.problem.converts for plan in found)


def block(library, x, gate, up, down, bias):
  """A residual block of a gated layer and another, and a layer with a bias."""
  if library is jnp:
    hidden = jax.nn.silu(x @ gate) * (x @ up)
    return x + hidden @ down, jax.nn.gelu(x @ up + bias)
  if library == "layers":
    hidden = jaxgemm.gated_linear(x, gate, up)
    out = jaxgemm.linear(hidden, down, residual=x)
  else:
    out = jaxgemm.gated_mlp(x, gate, up, down, residual=x)
  return out, jaxgemm.linear(x, up, bias, activation="gelu")


def block_of(library):
  def computed(x, gate, up, down, bias):
    weights = (w.astype(x.dtype) for w in (gate, up, down))
    return block(library, x, *weights, bias)

  return computed


BLOCKS = {
    "layers": block_of("layers"), "together": block_of("mlp"),
    "accelerated": jaxgemm.accelerate(block_of(jnp)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_of_few_rows_are_taken_apart(name):
  """Each product converts its weights; of many rows what follows is in its kernel."""
  def fused(rows):
    x, up = operand_types(rows)
    _, down = operand_types(k=14336, n=4096)
    found = plans(BLOCKS[name], x, up, up, down, jax.ShapeDtypeStruct((14336,), x.dtype))
    return {plan.problem.epilogue.is_fused for plan in found}, found

  is_fused, found = fused(16)
  assert is_fused == {False} and all(plan.problem.rhs_source == "int8" for plan in found)
  is_fused, found = fused(8192)
  assert True in is_fused and not any(plan.problem.converts for plan in found)


@pytest.mark.parametrize("name", BLOCKS)
def test_values_of_layers_taken_apart(name, rng):
  x, bias = (
      jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in ((4, 64), (96,))
  )
  gate, up, down = (
      jnp.asarray(rng.integers(-9, 9, shape), "int8")
      for shape in ((64, 96), (64, 96), (96, 64))
  )
  found = jax.jit(BLOCKS[name])(x, gate, up, down, bias)
  xla = jax.jit(block_of(jnp))(x, gate, up, down, bias)
  as_accurate(found, xla, in_float64(block_of(jnp), x, gate, up, down, bias))


@pytest.mark.parametrize("eager", [False, True])
def test_accelerate_of_our_own_products(eager, rng):
  x = jnp.asarray(rng.standard_normal((4, 64)), "bfloat16")
  w = jnp.asarray(rng.integers(-9, 9, (64, 128)), "int8")
  function = jaxgemm.accelerate(WRITTEN["converted"])
  found = function(x, w) if eager else jax.jit(function)(x, w)
  np.testing.assert_array_equal(found, x @ w.astype(x.dtype))
  assert jax.vmap(function, (0, None))(x[None], w).shape == (1, 4, 128)


def test_both_operands_in_8_bits():
  """Of which vmap makes the smaller one the larger: the array at hand is the other's."""
  both = lambda x, w: jaxgemm.matmul(x.astype("bfloat16"), w.astype("bfloat16"))
  x = jax.ShapeDtypeStruct((1000, 16, 4096), "int8")
  w = jax.ShapeDtypeStruct((4096, 64), "int8")
  (plan,) = plans(jax.vmap(both, (0, None)), x, w)
  assert not plan.problem.lhs_source
  tie = [jax.ShapeDtypeStruct((64, 65536), each) for each in ("int8", "float8_e4m3fn")]
  convert = lambda x, w: jaxgemm.einsum(
      "mk,nk->nm", x.astype("bfloat16"), w.astype("bfloat16")
  )
  assert plans(convert, *tie)


def test_transposed_in_the_weights():
  x = jnp.ones((4, 64), "bfloat16")
  w = jnp.ones((64, 128), "float8_e4m3fn")
  multiply = jax.jit(lambda w: jaxgemm.matmul(x, w.astype(x.dtype)))
  (found,) = jax.linear_transpose(multiply, w)(jnp.ones((4, 128), "bfloat16"))
  np.testing.assert_array_equal(found.astype("float32"), np.full((64, 128), 4.0))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_scale_comes_before_the_product_is_rounded(activation):
  """Whose float16 would overflow."""
  x, w = jnp.full((4, 512), 100.0, "float16"), jnp.full((512, 64), 100, "int8")
  residual = jnp.zeros((4, 64), "float16")
  found = jax.jit(lambda x, w: jaxgemm.linear(
      x, w.astype(x.dtype), activation=activation, residual=residual, scale=1e-3
  ))(x, w)
  np.testing.assert_allclose(found.astype("float32"), 5120.0, rtol=1e-3)


def test_what_stays_whole():
  """Many rows, a short k, rows that TMA cannot stride over, what is computed again."""
  def products(m, k, n, **options):
    layer = lambda x, w: jaxgemm.linear(
        x, w.astype(x.dtype), activation="gelu", **options
    )
    jaxpr = jax.make_jaxpr(layer)(*operand_types(m, k, n)).jaxpr
    return {e.primitive.name for e in equations(jaxpr)}

  assert "jaxgemm" in products(16, 4096, 14336)
  for case in ((2048, 4096, 28672), (256, 256, 28672), (16, 4096, 14340)):
    assert "jaxgemm_linear" in products(*case)
  assert "jaxgemm_linear" in products(16, 4096, 14336, save="nothing")


def test_concatenated_weights_taken_apart(rng):
  x = jnp.asarray(rng.standard_normal((4, 64)), "bfloat16")
  both = jnp.asarray(rng.integers(-9, 9, (64, 192)), "int8")
  layer = lambda x, both: jaxgemm.gated_linear(x, both.astype(x.dtype))

  def written(x, both):
    gate, up = jnp.split(both.astype(x.dtype), 2, 1)
    return jax.nn.silu(x @ gate) * (x @ up)

  xla, exact = jax.jit(written)(x, both), in_float64(written, x, both)
  as_accurate(jax.jit(layer)(x, both), xla, exact)
  counted = jax.make_jaxpr(layer)(x, both).jaxpr
  (product,) = (e for e in equations(counted) if e.primitive.name == "jaxgemm")
  assert product.params["product"].attached == "rhs"


def test_many_rows_are_of_converted_weights():
  (plan,) = plans(WRITTEN["converted"], *operand_types(m=8192))
  assert plan.kernel == "persistent" and not plan.problem.converts


def test_a_conversion_s_array():
  """Of its shape, whole, and of types that have all of its values."""
  seen = []

  def function(w):
    for x in (
        w.astype("bfloat16"), w.T.astype("float16").astype("bfloat16"),
        w.astype("bfloat16") * w.astype("bfloat16")[0, 0],
        w.astype("int4").astype("int8"),
    ):
      found = compat.conversion_of(x)
      seen.append(None if found is None else found.source is not None)
      if found is not None and found.source is not None:
        source = found.source()
        assert source.shape == x.shape and source.dtype == jnp.int8
    return w

  jax.make_jaxpr(function)(jnp.ones((3, 4), "int8"))
  assert seen == [True, True, False, None]
  assert compat.conversion_of(np.ones((2, 3))) is None


@pytest.mark.parametrize(
    ("activation", "invariant", "transposes"),
    [(None, False, 4), (None, True, 2), ("gelu", True, 2)],
)
def test_an_array_that_no_product_takes_is_not_transposed(
    activation, invariant, transposes
):
  """w is by the caller, and back as it is stored; so is its array, where there is one."""
  def layer(x, w):
    with jaxgemm.batch_invariant(invariant):
      return jaxgemm.linear(x, w.T.astype(x.dtype), activation=activation)

  x, w = operand_types(16, 4096, 14336)
  counts = count_primitives(layer, x, jax.ShapeDtypeStruct(w.shape[::-1], w.dtype))
  assert counts["transpose"] == transposes


def test_the_array_is_an_operand_and_no_derivative_knows_it():
  x, w = operand_types(4, 64, 128)
  function = lambda x, w: jaxgemm.matmul(x, w.astype(x.dtype))
  (product,) = (
      e for e in equations(jax.make_jaxpr(function)(x, w).jaxpr)
      if e.primitive.name == "jaxgemm"
  )
  assert [v.aval.dtype.name for v in product.invars] == ["bfloat16", "bfloat16", "int8"]
  assert product.params["product"].attached == "rhs"
  w = jax.ShapeDtypeStruct(w.shape, "float8_e4m3fn")
  gradients = jax.grad(lambda x, w: jnp.sum(function(x, w).astype("float32")), (0, 1))
  found = [
      len(e.invars) for e in equations(jax.make_jaxpr(gradients)(x, w).jaxpr)
      if e.primitive.name == "jaxgemm"
  ]
  assert sorted(found) == [2, 2, 3]


TRANSFORMED = {
    "as it is": lambda f: f,
    "gradients": lambda f: jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1)),
    "forward": lambda f: lambda *x: jax.jvp(f, x, x),
    "transposed": lambda f: lambda x, w: jax.linear_transpose(
        lambda x: f(x, w), x)(f(x, w)),
    "mapped": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w),
    "both mapped": lambda f: lambda x, w: jax.vmap(f)(x[None], w[None]),
    "mapped within": lambda f: lambda x, w: jax.vmap(jax.jit(f), (None, 0))(x, w[None]),
    "accelerated": lambda f: jaxgemm.accelerate(f),
    "mapped along columns": lambda f: lambda x, w: jax.vmap(
        f, (None, 2), 1)(x, jnp.stack([w, w], 2)),
    "mapped twice": lambda f: lambda x, w: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(
        jnp.stack([x, x]), jnp.stack([w, -w])),
    "gradients of mapped": lambda f: jax.grad(
        lambda x, w: jnp.sum(jnp.sin(jax.vmap(f)(
            x.reshape(2, 8, 96), jnp.stack([w, w])))), (0, 1)),
}


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_values(name, emulated, rng):
  """As accurate as XLA's of the converted array, by XLA and by a kernel."""
  x = jnp.asarray(rng.standard_normal((16, 96)), "bfloat16")
  w = jnp.asarray(rng.standard_normal((96, 256)), "float8_e4m3fn")
  transform = TRANSFORMED[name]
  ours = transform(lambda x, w: jaxgemm.matmul(x, w.astype(x.dtype)))
  xla = transform(lambda x, w: jnp.matmul(x, w.astype(x.dtype)))
  if emulated:
    with jaxgemm.emulate():
      found = jax.jit(ours)(x, w)
  else:
    found = jax.jit(ours)(x, w)
  as_accurate(found, jax.jit(xla)(x, w), in_float64(xla, x, w))


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, more(True)])
def test_an_emulated_kernel_gets_the_array(swapped, rng):
  """The plan's own problem, whichever operand the weights are."""
  x = jnp.asarray(rng.standard_normal((16, 512)), "bfloat16")
  w = jnp.asarray(rng.integers(-128, 128, (512, 2048)), "int8")
  function = WRITTEN["in the other place" if swapped else "converted"]
  with jaxgemm.emulate(), recording() as record:
    found = jax.jit(function)(x, w)
  (plan,) = record.plans
  assert plan.problem.converts and plan.kernel != "xla"
  xla, exact = jnp.matmul(x, w.astype(x.dtype)), reference.matmul(x, w)
  as_accurate(found, xla, exact)


@pytest.mark.parametrize(
    ("subscripts", "mapped"),
    [("akb,mk->mab", None), ("mk,akb->mab", None), ("akbc,mkc->cmab", None),
     ("akb,mk->mab", (3, 2)), ("kn,mk->mn", (1, 1))],
)
def test_the_array_moves_as_its_operand(subscripts, mapped, rng):
  """Transposed, exchanged and mapped with it, wherever the operand goes."""
  axes = subscripts.split("->")[0].split(",")
  of = dict(a=8, b=64, c=2, k=128, m=8, n=1024)
  weights = max(range(2), key=lambda i: math.prod(of[axis] for axis in axes[i]))
  shapes = [tuple(of[axis] for axis in each) for each in axes]
  for i, axis in enumerate(mapped or ()):
    shapes[i] = (*shapes[i][:axis], 3, *shapes[i][axis:])
  x = [jnp.asarray(rng.standard_normal(each), "bfloat16") for each in shapes]
  x[weights] = jnp.asarray(rng.integers(-128, 128, shapes[weights]), "int8")

  def computed(library, dtype="bfloat16"):
    def product(*x):
      return library.einsum(subscripts, *(each.astype(dtype) for each in x))

    return product if mapped is None else jax.vmap(product, mapped)

  (product,) = (
      e for e in equations(jax.make_jaxpr(computed(jaxgemm))(*x).jaxpr)
      if e.primitive.name == "jaxgemm"
  )
  operand, source = product.invars[product.params["product"].attached == "rhs"], (
      product.invars[2])
  assert source.aval.dtype == jnp.int8 and source.aval.shape == operand.aval.shape
  with jaxgemm.emulate():
    found = jax.jit(computed(jaxgemm))(*x)
  xla = jax.jit(computed(jnp))(*x)
  as_accurate(found, xla, in_float64(computed(jnp, "float64"), *x))


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("axis", [0, 2])
def test_an_emulated_kernel_gets_the_arrays_of_experts(axis, rng):
  x = jnp.asarray(rng.standard_normal((2, 16, 512)), "bfloat16")
  w = jnp.asarray(rng.integers(-128, 128, (2, 512, 2048)), "int8")
  function = jax.vmap(WRITTEN["converted"], (0, axis))
  with jaxgemm.emulate(), recording() as record:
    found = jax.jit(function)(x, jnp.moveaxis(w, 0, axis))
  (plan,) = record.plans
  assert plan.problem.converts and plan.problem.batch == 2
  as_accurate(found, jnp.matmul(x, w.astype(x.dtype)), reference.matmul(x, w))


# us on an H200, 2026-11-25: experiments/results/h200/sweep.jsonl has more.
MEASURED = [
    ((16, 14336, 4096, "NN"), "int8", dict(tile_m=128, consumers=2, num_stages=9), 17.1),
    ((16, 14336, 4096, "NN"), "int8", dict(tile_m=64, consumers=1, num_stages=15), 24.4),
    ((16, 14336, 4096, "NN"), "float8_e4m3fn",
     dict(tile_m=128, consumers=2, num_stages=9), 19.5),
    ((128, 14336, 4096, "NN"), "int8",
     dict(tile_m=128, tile_n=128, consumers=2, num_stages=8), 27.0),
]


@pytest.mark.parametrize(("size", "source", "fields", "measured"), MEASURED)
def test_estimates(size, source, fields, measured):
  problem = make_problem(*size, rhs_source=source)
  config = small_config("persistent", swap=True, **dict(tile_n=16) | fields)
  found = cost_model.estimate(problem, "persistent", config, H200).time_us
  assert found == pytest.approx(measured, rel=0.15)


def test_candidates_move_less():
  """Half the bytes of the weights, and none in a pass."""
  problem = make_problem(16, 14336, 4096, rhs_source="int8")
  assert problem.num_bytes < 0.51 * dataclasses.replace(problem, rhs_source="").num_bytes
  found = heuristics.candidates(problem, H200)
  assert {c.kernel for c in found} == {"persistent", "split_k", "xla"}
  assert all("padding" not in c.reason for c in found)

"""ragged_dot of matrices in 8 bits, converted where they are used: plans and values."""

from __future__ import annotations

from collections import Counter

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxgemm
from jaxgemm.recording import recording
from pallas_kernels.conversions import SOURCES
from tests.kernel_cases import more, mostly_more
from tests.product_cases import equations
from tests.ragged_cases import plain
from tests.test_converted import as_accurate, in_float64, plans
from tests.test_ragged_sharding import kinds_and_sizes, mesh_of, put

M, G, K, N = 40, 4, 96, 64
SIZES = np.array([9, 0, 23, 1], np.int32)  # And 7 rows of nobody.


def types(m=16, g=8, k=4096, n=14336, source="int8", dtype="bfloat16", transposed=False):
  shape = (g, n, k) if transposed else (g, k, n)
  return (
      jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct(shape, source),
      jax.ShapeDtypeStruct((g,), "int32"),
  )


def converted(x, w, sizes):
  return jaxgemm.ragged_dot(x, w.astype(x.dtype), sizes)


def invariant(*operands):
  with jaxgemm.batch_invariant():
    return converted(*operands)


WRITTEN = {
    "converted": converted,
    "promoted": jaxgemm.ragged_dot,
    "in steps": lambda x, w, s: jaxgemm.ragged_dot(
        x, w.astype("float32").astype(x.dtype), s),
    "transposed before": lambda x, w, s: jaxgemm.ragged_dot(
        x, w.swapaxes(1, 2).astype(x.dtype), s, transposed=True),
    "transposed behind": lambda x, w, s: jaxgemm.ragged_dot(
        x, w.astype(x.dtype).swapaxes(1, 2), s, transposed=True),
    "jit": jax.jit(converted),
    "checkpoint": jax.checkpoint(converted),
    "scan": lambda x, w, s: lax.scan(
        lambda c, _: (c, converted(x, w, s)), 0, None, length=2)[1],
    "forward mode": lambda x, w, s: jax.jvp(
        lambda x: converted(x, w, s), (x,), (x,)),
    "accelerated": jaxgemm.accelerate(
        lambda x, w, s: lax.ragged_dot(x, w.astype(x.dtype), s)),
    "ours, accelerated": jaxgemm.accelerate(converted),
    "mapped": lambda x, w, s: jax.vmap(converted, (0, None, None))(x[None], w, s),
}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *((name, "int8") for name in WRITTEN),
        *(("converted", source) for source in SOURCES[1:]),
    ],
)
def test_matrices_of_few_rows_are_converted_in_the_kernel(name, source):
  found = plans(WRITTEN[name], *types(source=source))
  plan = next(plan for plan in found if plan.problem.converts)
  assert plan.kernel == "grouped_m" and plan.config.swap
  assert f"rhs of {source}" in str(plan.problem)
  assert (plan.problem.batch, plan.problem.rhs_layout) == (8, "n-major")


@pytest.mark.parametrize("axis", [0, 1, 3])
def test_mapped_with_their_conversion(axis):
  x, w, s = types()
  shapes = (2, *x.shape), [*w.shape], (2, *s.shape)
  shapes[1].insert(axis, 2)
  operands = map(jax.ShapeDtypeStruct, shapes, (x.dtype, w.dtype, s.dtype))
  (plan,) = plans(jax.vmap(converted, (0, axis, 0)), *operands)
  assert plan.problem.rhs_source == "int8" and plan.problem.batch == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 128, 2048])
def test_as_they_are_stored(m, dtype):
  """Along k, too; nothing is transposed."""
  function = lambda x, w, s: jaxgemm.ragged_dot(x, w.astype(x.dtype), s, transposed=True)
  operands = types(m, dtype=dtype, transposed=True)
  (plan,) = plans(function, *operands)
  assert plan.problem.converts and plan.problem.rhs_layout == "k-major"
  with jaxgemm.target("NVIDIA H200"):
    lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
  text = lowered.as_text()
  assert "jaxgemm_grouped_m" in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    ("function", "changes"),
    {
        "multiplied": (lambda x, w, s: jaxgemm.ragged_dot(
            x, w.astype(x.dtype) * x[0, 0], s), {}),
        "float32": (converted, dict(dtype="float32")),
        "a result in float32": (lambda x, w, s: jaxgemm.ragged_dot(
            x, w.astype(x.dtype), s, preferred_element_type="float32"), {}),
        "computed": (lambda x, w, s: converted(x, w + w, s), {}),
        "of a kernel": (lambda x, w, s: jaxgemm.ragged_dot(
            x, w.astype(x.dtype), s, implementation="grouped_m"), {}),
        "batch invariant": (invariant, {}),
        "rows that TMA does not take": (converted, dict(n=14344)),
        "an argument of 16 bits": (converted, dict(source="bfloat16")),
    }.values(),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_no_kernel_converts(function, changes):
  (plan,) = plans(function, *types(**changes))
  assert not plan.problem.converts


def test_the_array_is_an_operand_and_no_derivative_knows_it():
  operands = types(4, G, K, N, "float8_e4m3fn")
  (product,) = (
      e for e in equations(jax.make_jaxpr(converted)(*operands).jaxpr)
      if e.primitive.name == "jaxgemm_ragged"
  )
  assert [v.aval.dtype.name for v in product.invars] == [
      "bfloat16", "bfloat16", "int32", "float8_e4m3fn"
  ]
  gradients = jax.grad(lambda *x: jnp.sum(converted(*x).astype("float32")), (0, 1))
  found = [
      len(e.invars) for e in equations(jax.make_jaxpr(gradients)(*operands).jaxpr)
      if e.primitive.name == "jaxgemm_ragged"
  ]
  assert sorted(found) == [3, 3, 4]


def test_an_array_of_another_shape(rng):
  from jaxgemm.ragged_product import ragged_p

  (product,) = (
      e for e in equations(jax.make_jaxpr(converted)(*types(4, G, K, N)).jaxpr)
      if e.primitive.name == "jaxgemm_ragged"
  )
  x, w, s = drawn(rng)
  with pytest.raises(TypeError, match="rhs, .* is not .* converted"):
    ragged_p.bind(x, w.astype(x.dtype), s, w[1:], **product.params)


def drawn(rng, source="float8_e4m3fn"):
  return (
      jnp.asarray(rng.standard_normal((M, K)), "bfloat16"),
      jnp.asarray(rng.standard_normal((G, K, N)) * 4, source), jnp.asarray(SIZES),
  )


def wide(f):
  """Of float64 operands, sizes as they are."""
  return lambda x, w: f(x, w, jnp.asarray(SIZES))


TRANSFORMED = {
    "as it is": lambda f: f,
    "gradients": lambda f: lambda x, w, s: jax.grad(
        lambda x, w: jnp.sum(jnp.sin(f(x, w, s) / 16)), (0, 1))(x, w),
    "forward": lambda f: lambda x, w, s: jax.jvp(
        lambda x, w: f(x, w, s), (x, w), (x, w)),
    "transposed": lambda f: lambda x, w, s: jax.linear_transpose(
        lambda x: f(x, w, s), x)(f(x, w, s)),
    "mapped": lambda f: lambda x, w, s: jax.vmap(f, (0, None, None))(
        jnp.stack([x, -x]), w, s),
    "matrices mapped": lambda f: lambda x, w, s: jax.vmap(f, (None, 2, None))(
        x, jnp.stack([w, -w], 2), s),
    "sizes mapped": lambda f: lambda x, w, s: jax.vmap(f, (None, None, 0))(
        x, w, jnp.stack([s, s[::-1]])),
    "mapped within": lambda f: lambda x, w, s: jax.vmap(jax.jit(f), (None, 0, None))(
        x, w[None], s),
    "accelerated": jaxgemm.accelerate,
}


@pytest.mark.parametrize(
    ("name", "emulated"),
    [
        *((name, False) for name in TRANSFORMED),
        *(more(name, True) for name in TRANSFORMED),
    ],
)
def test_values(name, emulated, rng):
  """As accurate as XLA's of the converted arrays, by XLA and by a kernel."""
  operands, transform = drawn(rng), TRANSFORMED[name]
  xla = transform(lambda x, w, s: plain(x, w.astype(x.dtype), s))
  with jaxgemm.emulate() if emulated else jaxgemm.batch_invariant(False):
    found = jax.jit(transform(converted))(*operands)
  as_accurate(found, jax.jit(xla)(*operands), in_float64(wide(xla), *operands[:2]))


@pytest.mark.parametrize("source", mostly_more(SOURCES))
def test_an_emulated_kernel_gets_the_array(source, rng):
  x, w, s = drawn(rng, source)
  with jaxgemm.emulate(), recording() as record:
    found = jax.jit(converted)(x, w, s)
  (plan,) = record.plans
  assert plan.problem.converts and plan.kernel == "grouped_m"
  xla = lambda x, w, s: lax.ragged_dot(x, w.astype(x.dtype), s)
  as_accurate(found, xla(x, w, s), in_float64(wide(xla), x, w))


@pytest.mark.parametrize(
    ("of_x", "of_w", "wanted"),
    [(P(), P(None, None, "x"), {}), (P(None, "x"), P(None, "x"), {"all-reduce": 1})],
    ids=["n", "k"],
)
def test_shards(of_x, of_w, wanted, rng):
  """The arrays lie as their conversions do: nothing is gathered."""
  x, w, s = drawn(rng)
  mesh = mesh_of()
  placed = put(mesh, x, of_x), put(mesh, w, of_w), put(mesh, s, P())
  with jaxgemm.emulate():
    found = kinds_and_sizes(converted, *placed)
    assert Counter(kind for kind, _ in found.elements()) == wanted
    out = jax.jit(converted)(*placed)
  xla = lambda x, w, s: lax.ragged_dot(x, w.astype(x.dtype), s)
  as_accurate(out, xla(x, w, s), in_float64(wide(xla), x, w))


def test_shards_run_the_kernel(rng):
  """On each device, of its own share of the arrays."""
  mesh = mesh_of()
  of = lambda x, spec: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))
  x, w, s = types(16, 8, 512, 1024)
  operands = of(x, P()), of(w, P(None, None, "x")), of(s, P())
  run = jax.shard_map(
      converted, mesh=mesh, in_specs=(P(), P(None, None, "x"), P()),
      out_specs=P(None, "x"), check_vma=False,
  )
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
  (plan,) = record.plans
  assert plan.problem.converts and plan.problem.n == 512


def test_explain_says_so(capsys):
  with jaxgemm.target("NVIDIA H200"):
    jaxgemm.explain(converted, *types())
  assert "(rhs of int8)" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("m", [1, 16, 200])
def test_gpu_values(m, source, rng):
  """The plan's own kernel, in a program and its gradient."""
  g, k, n = 9, 1024, 2048
  x = jnp.asarray(rng.standard_normal((m, k)), "bfloat16")
  w = jnp.asarray(rng.standard_normal((g, k, n)) * 8, source)
  s = jnp.asarray(rng.multinomial(m, np.full(g, 1 / g)), "int32")
  with recording() as record:
    jax.jit(converted).lower(x, w, s)
  assert [plan.problem.converts for plan in record.plans] == [True]
  for transform in (
      lambda f: f,
      lambda f: lambda x, w, s: jax.grad(
          lambda x: jnp.sum(jnp.sin(f(x, w, s) / 256)))(x),
  ):
    xla = transform(lambda x, w, s: lax.ragged_dot(x, w.astype(x.dtype), s))
    exact = in_float64(lambda x, w, f=xla: f(x, w, s), x, w)
    as_accurate(jax.jit(transform(converted))(x, w, s), jax.jit(xla)(x, w, s), exact)

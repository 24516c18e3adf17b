"""lhs in 8 bits that consumers convert: each thread followed, the kernels, the plans."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxgemm
from jaxgemm import cost_model, heuristics, reference
from jaxgemm.device import known_device
from jaxgemm.recording import recording
from pallas_kernels import KERNELS, compat, conversions, fragments
from pallas_kernels.problem import Epilogue
from tests import gpu_cases, kernel_cases
from tests.kernel_cases import check, lowered, make_problem, small_config
from tests.product_cases import equations

H200 = known_device("NVIDIA H200")
SOURCES = conversions.SOURCES
FIELDS = dict(tile_m=64, tile_n=32, consumers=1, num_stages=4)


def converted_problem(m, n, k, layouts="NN", source="int8", *, swap=True, **fields):
  """Of rhs in 8 bits, which swapped operands have in the place of lhs; or of lhs."""
  name = "rhs_source" if swap else "lhs_source"
  return make_problem(m, n, k, layouts, **{name: source}, **fields)


# -- Threads -----------------------------------------------------------------------


@pytest.fixture
def in_integers(monkeypatch):
  """What is computed in MLIR, computed."""
  names = dict(
      addi="add", muli="mul", andi="and_", xori="xor", shli="lshift", shrui="rshift"
  )
  computed = {name: getattr(operator, does) for name, does in names.items()}
  for module in (conversions, fragments):
    monkeypatch.setattr(module, "arith", types.SimpleNamespace(**computed))
    monkeypatch.setattr(module, "i32", int)
  monkeypatch.setattr(conversions, "_address", lambda _, num_bytes: num_bytes)


def copied(tile: conversions.Narrow, matrix: np.ndarray) -> np.ndarray:
  """The bytes of a slot to which TMA has copied [m, k], by the rules of its swizzles.

  16 bytes are one unit. Bits of their places are those of the line of 128 bytes (of the
  first two or three): of rows of 64 bytes two lie in a line.
  """
  chunks, rows, width = tile.slot_shape
  stored = matrix if tile.k_major else matrix.T
  slot = np.zeros(stored.size, stored.dtype)
  for row, col in itertools.product(range(rows), range(chunks * width)):
    chunk, within = divmod(col, width)
    place = (chunk * rows + row) * width + within
    slot[place ^ (place >> 7 & width // 16 - 1) << 4] = stored[row, col]
  return slot


TILES = [(64, True), (128, True), (192, True), (64, False), (128, False), (256, False)]


@pytest.mark.parametrize(("tile_m", "k_major"), TILES)
def test_threads_load_their_elements(in_integers, monkeypatch, tile_m, k_major):
  """Of a fragment of wgmma, and each warp's from banks of their own."""
  tile = conversions.Narrow(tile_m, k_major, "int8", "bfloat16")
  matrix = np.arange(tile_m * 64).reshape(tile_m, 64)
  slot = copied(tile, matrix)
  order = "as they are" if k_major else "pairs"
  places: dict[int, list[int]] = {}  # Of each load of a warp.

  def load(kind, address, offset):
    assert kind == "u16" and (address + offset) % 2 == 0
    places.setdefault(len(loads), []).append(address + offset)
    loads.append(address + offset)
    return tuple(slot[address + offset : address + offset + 2]) + (0, 0)

  monkeypatch.setattr(fragments, "load", load)
  words_of = tile._from_rows if k_major else tile._from_columns
  for start, warp in itertools.product(range(0, tile_m, 64), range(4)):
    places.clear()
    for group, lane in itertools.product(range(8), range(4)):
      loads: list[int] = []
      monkeypatch.setattr(
          conversions, "place_of_fragment", lambda at=(warp, group, lane): at
      )
      for i, (first, second) in enumerate(words_of(None, start)):
        block, half = divmod(i, 2)
        row = start + fragments.row_of(order, 16 * warp + 8 * half + group)
        k, both = 8 * block + 2 * lane, first + second
        for selectors, at in ((conversions._PACKED, (0, 1)), (conversions._APART, (0, 2))):
          selector = selectors[0] if k_major else selectors[1 + half]
          found = [both[selector >> 4 * i & 7] for i in range(4)]
          assert [found[i] for i in at] == list(matrix[row, k : k + 2])
          if selectors is conversions._APART:
            assert found[1] == found[3] == 0
      assert len(loads) == 16
    for each in places.values():
      banks = [place // 4 % 32 for place in set(p // 4 * 4 for p in each)]
      assert len(each) == 32 and len(banks) == len(set(banks))


@pytest.mark.parametrize("order", ["as they are", "eighths", "pairs"])
def test_rows_of_a_sum(in_integers, order):
  """Each of 64 once, and a warp's 16 in pairs."""
  named = [fragments.row_of(order, row) for row in range(64)]
  assert sorted(named) == list(range(64))
  if order == "pairs":
    assert all(named[row + 8] == named[row] + 1 for row in range(0, 64, 16))
    assert all(set(named[at : at + 16]) == set(range(at, at + 16)) for at in (0, 16, 48))


def constants(instructions: str) -> list[int]:
  return [int(each, 16) for each in re.findall(r"0x[0-9a-f]{8}", instructions)]


def as_floats(bits: np.ndarray, dtype) -> np.ndarray:
  return bits.astype(np.uint16).view(dtype).astype(np.float64)


def test_the_arithmetic_of_int8():
  """All bytes, by the instructions' own constants, each step rounded to its type."""
  numbers = np.arange(-128, 128)
  apart = numbers.astype(np.uint8).astype(np.uint16)
  turn, *factors = constants(conversions._OF_INT8["bfloat16"])
  first, second, less = (as_floats(np.array(x & 0xFFFF), "bfloat16") for x in factors)
  found = as_floats(apart ^ (turn & 0xFFFF), "bfloat16")
  for step in (lambda x: x * first, lambda x: x * second + less):
    exact = step(found)
    found = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(found, exact)
  np.testing.assert_array_equal(found, numbers)
  turn, high, less = constants(conversions._OF_INT8["float16"])
  bits = (apart ^ (turn & 0xFFFF)) | (high & 0xFFFF)
  less = as_floats(np.array(less & 0xFFFF), "float16")
  np.testing.assert_array_equal(as_floats(bits, "float16") - less, numbers)


# -- Kernels -----------------------------------------------------------------------

FORMS = [  # (source, dtype, layouts, swap)
    (source, dtype, layouts, swap)
    for i, (source, dtype) in enumerate(
        itertools.product(SOURCES, ("bfloat16", "float16"))
    )
    for j, (layouts, swap) in enumerate(
        itertools.product(kernel_cases.LAYOUTS, (True, False))
    )
    if (i + j) % 3 == 0 or i == 0
]
SPLITS = [
    ("persistent", {}), ("split_k", dict(splits=2)),
    ("split_k", dict(splits=2, cluster_k=2)),
]


def tiles_for(problem, swap: bool):
  """Fields of configs that can multiply it: of n-major activations whole blocks."""
  product = problem.transposed if swap else problem
  cols = 32 if product.rhs_layout == "k-major" else 64
  return [
      dict(tile_m=64 * consumers * rows, tile_n=cols, consumers=consumers)
      for consumers, rows in ((1, 1), (1, 2), (2, 1), (2, 2))
  ]


@pytest.mark.parametrize(("source", "dtype", "layouts", "swap"), FORMS)
def test_lowers_for_cuda(source, dtype, layouts, swap):
  problem = converted_problem(
      72, 304, 336, layouts, source, swap=swap, dtype=dtype, batch=3
  ) if swap else converted_problem(
      304, 72, 336, layouts, source, swap=swap, dtype=dtype
  )
  for i, ((kernel, split), tile) in enumerate(
      itertools.product(SPLITS, tiles_for(problem, swap))
  ):
    config = small_config(kernel, swap=swap, num_stages=3, **split, **tile)
    assert KERNELS[kernel].supports(problem, config) is None
    if i % 4 == i // 4:  # A diagonal of them.
      assert f"jaxgemm_{kernel}" in lowered(kernel, problem, config)


@pytest.mark.parametrize(("layouts", "swap"), [("NN", False), ("NN", True), ("NT", True)])
def test_emulated(layouts, swap):
  """The emulator's lhs is converted before, and goes the usual way."""
  problem = converted_problem(72, 80, 208, layouts, swap=swap)
  config = small_config("persistent", swap=swap, **FIELDS | dict(tile_n=64))
  check("persistent", problem, config)


@pytest.mark.parametrize(
    ("problem", "fields", "named"),
    [
        (dict(swap=False), {}, "consumers convert lhs; see swap"),
        (dict(source="float32"), {}, "lhs of dtype float32"),
        (dict(dtype="float32"), dict(tile_k=32), "to 16 bits, not to float32"),
        (dict(n=200), {}, "200 bytes: they take 16"),
        ({}, dict(misaligned="skewed"), "is of operands of 16 bits"),
        ({}, dict(tile_k=128), "tile_k=128"),
        ({}, dict(tile_m=192, consumers=3), "chunks of 128 bytes"),
        ({}, dict(tile_n=64, consumers=2, wg_dim="n"), "all columns of a tile"),
        ({}, dict(cluster_n=2), "excludes cluster_n"),
        ({}, dict(tile_m=128, tile_n=256), "too few registers"),
        (dict(epilogue=Epilogue(beta=1.0, c_dtype="bfloat16")), {}, "excludes c"),
        (dict(epilogue=Epilogue(has_bias=True)), {}, "excludes bias"),
    ],
    ids=str,
)
def test_supports_names_the_constraint(problem, fields, named):
  swap = problem.pop("swap", True)
  problem = dict(dict(m=72, n=208, k=336), **problem)
  problem = converted_problem(**problem, swap=True)
  config = small_config("persistent", **FIELDS | dict(swap=swap) | fields)
  assert named in KERNELS["persistent"].supports(problem, config)


@pytest.mark.parametrize("kernel", ["blocked", "pipelined", "direct", "triton"])
def test_other_kernels_convert_nothing(kernel):
  reason = KERNELS[kernel].supports(
      converted_problem(72, 208, 336), small_config(kernel)
  )
  assert "only persistent and split_k convert" in reason


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "dtype", "layouts", "swap"), FORMS)
def test_on_the_chip(source, dtype, layouts, swap):
  """Partial tiles, several products, k that is no multiple of a tile's."""
  size = (72, 304, 336) if swap else (304, 72, 336)
  for batch in (1, 3):
    problem = converted_problem(
        *size, layouts, source, swap=swap, dtype=dtype, batch=batch
    )
    launches = [
        (kernel, small_config(kernel, swap=swap, num_stages=stages, **split, **tile))
        for kernel, split in SPLITS
        for stages, tile in zip((2, 5, 3, 4), tiles_for(problem, swap), strict=True)
    ]
    gpu_cases.check_all(problem, launches)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["NN", "NT"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_value_on_the_chip(source, dtype, layouts):
  """Times one, where the others are zeros: infinities and NaN make columns of NaN."""
  values = np.arange(256, dtype=np.uint8).view(source)
  wide = values.astype(np.float32)
  w = np.zeros((64, 256), source)
  w[7] = values
  x = np.zeros((16, 64), np.float32)
  x[:, 7] = 1.0
  problem = converted_problem(16, 256, 64, layouts, source, dtype=dtype)
  stored = w if layouts == "NN" else w.T
  operands = jnp.asarray(x, dtype)[None], jnp.asarray(stored)[None]
  config = small_config("persistent", swap=True, **FIELDS)
  found = gpu_cases.launch("persistent", problem, config, operands)[0]
  wanted = np.broadcast_to(wide, found.shape)
  np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)


# -- Plans -------------------------------------------------------------------------


def plans(function, *operands):
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
  return list(record.plans)


def operand_types(m=16, k=4096, n=14336, source="int8", dtype="bfloat16"):
  return (
      jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), source)
  )


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
        "mapped": lambda x, w: jax.vmap(
            lambda x: jaxgemm.matmul(x, w.astype(x.dtype)))(x[:, None]),
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
  with jax.enable_x64(True):
    wide = [jnp.asarray(each, "float64") for each in (x, gate, up, down, bias)]
    exact = block(jnp, *wide)
  xla = jax.jit(block_of(jnp))(x, gate, up, down, bias)
  for a, b, truth in zip(found, xla, exact, strict=True):
    limit = 2 * reference.relative_error(b, np.asarray(truth))
    assert a.dtype == b.dtype
    assert reference.relative_error(a, np.asarray(truth)) <= limit


def test_concatenated_weights_taken_apart(rng):
  x = jnp.asarray(rng.standard_normal((4, 64)), "bfloat16")
  both = jnp.asarray(rng.integers(-9, 9, (64, 192)), "int8")
  layer = lambda x, both: jaxgemm.gated_linear(x, both.astype(x.dtype))
  gate, up = (w.astype("bfloat16") for w in jnp.split(both, 2, 1))
  wanted = jaxgemm.gated_linear(x, gate, up)
  assert reference.relative_error(jax.jit(layer)(x, both), np.asarray(wanted)) < 2e-2
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
        w.astype("bfloat16") * w.astype("bfloat16")[0, 0], w.astype("int4").astype("int8"),
    ):
      found = compat.conversion_of(x)
      seen.append(None if found is None else found.source is not None)
      if found is not None and found.source is not None:
        assert found.source.shape == x.shape and found.source.dtype == jnp.int8
    return w

  jax.make_jaxpr(function)(jnp.ones((3, 4), "int8"))
  assert seen == [True, True, False, None]
  assert compat.conversion_of(np.ones((2, 3))) is None


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
}


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_values(name, emulated, rng):
  """As of the converted array, by XLA and by a kernel."""
  x = jnp.asarray(rng.standard_normal((16, 96)), "bfloat16")
  w = jnp.asarray(rng.standard_normal((96, 256)), "float8_e4m3fn")
  transform = TRANSFORMED[name]
  ours = transform(lambda x, w: jaxgemm.matmul(x, w.astype(x.dtype)))
  xla = transform(lambda x, w: jnp.matmul(x, w.astype(x.dtype)))
  wanted = jax.jit(xla)(x, w)
  if emulated:
    with jaxgemm.emulate():
      found = jax.jit(ours)(x, w)
  else:
    found = jax.jit(ours)(x, w)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype
    assert reference.relative_error(a, np.asarray(b, np.float64)) < 2e-2


@pytest.mark.parametrize("swapped", [False, True])
def test_an_emulated_kernel_gets_the_array(swapped, rng):
  """The plan's own problem, whichever operand the weights are."""
  x = jnp.asarray(rng.standard_normal((16, 512)), "bfloat16")
  w = jnp.asarray(rng.integers(-128, 128, (512, 2048)), "int8")
  function = WRITTEN["in the other place" if swapped else "converted"]
  with jaxgemm.emulate(), recording() as record:
    found = jax.jit(function)(x, w)
  (plan,) = record.plans
  assert plan.problem.converts and plan.kernel != "xla"
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  assert reference.relative_error(found, exact) < 4e-3


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
  problem = converted_problem(*size, source)
  config = small_config("persistent", swap=True, **dict(tile_n=16) | fields)
  found = cost_model.estimate(problem, "persistent", config, H200).time_us
  assert found == pytest.approx(measured, rel=0.15)


def test_candidates_move_less():
  """Half the bytes of the weights, and none in a pass."""
  problem = converted_problem(16, 14336, 4096)
  assert problem.num_bytes < 0.51 * dataclasses.replace(problem, rhs_source="").num_bytes
  found = heuristics.candidates(problem, H200)
  assert {c.kernel for c in found} == {"persistent", "split_k", "xla"}
  assert all("padding" not in c.reason for c in found)

"""lhs in 8 bits that consumers convert: each thread followed, the kernels, the plans."""

from __future__ import annotations

import itertools
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxgemm.device import known_device
from pallas_kernels import KERNELS, conversions, fragments
from pallas_kernels.problem import Epilogue
from tests import gpu_cases, kernel_cases
from tests.kernel_cases import check, lowered, make_problem, small_config

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
  kernel_cases.compute_in_integers(monkeypatch, conversions, fragments)
  monkeypatch.setattr(fragments, "byte_address", lambda _, num_bytes: num_bytes)


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
        for selectors, at in (
            (conversions._PACKED, (0, 1)), (conversions._APART, (0, 2)),
        ):
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

"""The sides of tiles that are worth weighing for a problem."""

from __future__ import annotations

from collections.abc import Iterator

from jaxgemm.device import Device
from jaxgemm.operand_passes import misaligned
from pallas_kernels import lhs_registers, specialised, tiles
from pallas_kernels.problem import Problem

# tile_m, tile_n, consumers, wg_dim of the warp-specialised kernels.
Shape = tuple[int, int, int, str]

_WIDE: Shape = (128, 320, 2, "m")
COOPERATIVE: tuple[Shape, ...] = (
    (128, 256, 2, "m"), (256, 128, 2, "m"), (192, 256, 2, "n"), (128, 224, 2, "m"),
    (128, 192, 2, "m"), (192, 128, 2, "n"), (128, 160, 2, "m"), (128, 128, 2, "m"),
    (64, 256, 2, "n"), (128, 64, 2, "m"), (128, 128, 1, "m"), (128, 64, 1, "m"),
    (64, 192, 1, "m"), (64, 128, 1, "m"), (64, 64, 1, "m"), (64, 32, 1, "m"),
    (128, 384, 2, "m"), _WIDE, (64, 384, 1, "m"), (64, 320, 1, "m"),
    (192, 192, 3, "m"), (192, 128, 3, "m"),
)
# Of consumers that take tiles in turn.
PING_PONG: tuple[Shape, ...] = (
    (128, 192, 2, "tile"), (192, 128, 2, "tile"), (128, 128, 2, "tile"),
    (64, 320, 2, "tile"), (64, 256, 2, "tile"), (64, 128, 2, "tile"),
)
# (tile_m, tile_n, stages), for results whose tiles all run at once. CTAs that come and
# go fall out of step, and no longer ask the L2 for the same rows at the same time.
PIPELINED = ((64, 128, 4), (128, 64, 4), (64, 64, 6), (64, 32, 8))
DIRECT = ((64, 64), (128, 64), (64, 128), (64, 32), (64, 16))
DIRECT_LARGE = ((128, 128), (64, 192), (64, 256))  # Of one or two k tiles.
DIRECT_OVERLAPPING = ((64, 128), (64, 192), (64, 240))  # Of one, in whole sectors.
DIRECT_SPLIT = ((64, 64), (64, 32), (64, 16))  # Larger sums take long to exchange.
# Rows and consumers of tiles of lhs in 8 bits. (128, 1) and (192, 3) were the fastest of
# none of 14 problems (H200).
CONVERTED = ((64, 1), (128, 2), (256, 2))
# The other side and the consumers of tiles whose one side fits a narrow result: rows, or
# columns where the operands change places.
_OTHER_SIDES = ((64, 1), (128, 1), (128, 2), (256, 2))
# Rows and consumers of tiles whose columns are to fill rounds of the SMs.
_FILLING_ROWS = ((64, 1), (128, 1), (128, 2), (256, 2), (192, 3))
_ROUNDS, _FEW_ROUNDS = (1, 2, 3, 4, 5, 6), (1, 2, 3)
_LEAST_COLS = 32  # Of filling tiles.
# Columns of tiles in turns, by their rows: as many as a consumer has registers for sums.
_MOST_IN_TURNS = {128: 192, 192: 128}
_LEAST_IN_TURNS = 96
_MOST_EVENLY = 200  # For which a consumer of 128 rows has registers.
_NARROW = 512  # Rows, or columns, of a result that tiles are to fit.
_MOST_SPLIT = 1024  # Columns where lhs is split in registers, anew for each tile of them.


def fitted(problem: Problem) -> Iterator[Shape]:
  """Tiles of all columns of a result of few, or of equal parts of them.

  wgmma takes any multiple of 8; multiples of 64 are tried anyway.
  """
  if problem.n > _NARROW or problem.itemsize != 2:
    return
  for cols in sorted(_equal_parts(problem)):
    if cols % 64 and cols > 32:
      for rows, consumers in _OTHER_SIDES:
        yield rows, cols, consumers, "m"


def crooked(problem: Problem) -> tuple[Shape, ...]:
  """Tiles that ask for less than 128x256 do, where rows begin within lines of 128 bytes.

  For the transposed problem, too: 160 columns are no whole blocks of an n-major rhs, of
  which 256 are. Of 16 products of whole lines (H200) one is 1.3% faster, the others up to
  61% slower; of other than 16 bits none has been measured.

  Source: the tile of cuBLAS's kernel for 5x4611x6992x2080, as its name tells.
  """
  if problem.itemsize != 2 or not misaligned(problem, tiles.SWIZZLE_BYTES):
    return ()
  return ((256, 160, 2, "m"),)


def swapped(problem: Problem) -> Iterator[Shape]:
  """Tiles of all rows of a result of few, or of equal parts of them.

  wgmma takes any multiple of 8 of them, and multiples of 64 up to 256 from the operands
  in their places.
  """
  if problem.m > _NARROW or problem.itemsize != 2:
    return
  for rows in sorted(_equal_parts(problem.transposed)):
    if rows > 256 or rows % 64 and (rows > 64 or problem.m <= 64):
      for cols, consumers in _OTHER_SIDES:
        yield cols, rows, consumers, "m"


def filling(product: Problem, device: Device) -> list[Shape]:
  """Tiles as narrow as they may be for all SMs to do them in few rounds.

  Source: the tiles of cuBLAS's kernels for Hopper (192x176, 152x128, 128x304, ...), as
  their names tell.
  """
  if product.itemsize != 2:
    return []
  found = set()
  for rows, consumers in _FILLING_ROWS:
    of_rows = product.batch * tiles.cdiv(product.m, rows)
    for sms in (device.num_sms, device.ctas_at_once(4)):
      # Of tiles that are not full the memory is the bound, which knows no rounds.
      for rounds in _ROUNDS if product.m >= rows else _FEW_ROUNDS:
        if (most := rounds * sms // of_rows) > 0:
          for cols in _columns(product, tiles.cdiv(product.product_n, most)):
            if _LEAST_COLS <= cols <= specialised.MAX_TILE_N:
              found.add((rows, cols, consumers, "m"))
  return sorted(found)  # In one order in every process, whatever the hashes of strings.


def in_turns(product: Problem, device: Device) -> list[Shape]:
  """Filling and fitted tiles that consumers take in turns, of crooked rows.

  7x8088x336x624 NT took 38.7 us by 128x176, 40.2 where two consumers share such a tile,
  and 41.7 by 128x192 in turns (H200; XLA 37.9); 2x4976x4728x672 NT 89.2, and 90.3 by the
  best of the others. Of 17 such products three are faster by 1 to 4%.

  Source: the tiles of cuBLAS's kernels for such products, as their names tell.
  """
  if product.itemsize != 2 or not misaligned(product, tiles.SWIZZLE_BYTES):
    return []
  found = {
      (rows, cols, 2, "tile")
      for rows, cols, _, _ in (*filling(product, device), *fitted(product))
      if _LEAST_IN_TURNS <= cols <= _MOST_IN_TURNS.get(rows, 0)
  }
  return sorted(found)


def evenly(problem: Problem) -> list[Shape]:
  """Tiles in turns that share out the rows of a result evenly, from swapped operands.

  Of rows, which are the tiles' columns then, any number is stored as fast. By
  128x200 8192x14336x4096 NN takes 1,353 us, by 128x192 of the operands in their places
  1,375; 8192x2048x1024 43.5 and by 256x168 46.9. Of 15 products 14 are 0.9 to 8% faster
  than by what the best estimate was before, one 1.5% slower (H200, in a burst; four of
  them 0.5 to 3% faster under a load that lasts).

  A gated product has 64 rows of each of its matrices. In their places, n-major ones have
  blocks of 64 columns each, so that no tile in turns has more than 128. Of
  8192x14336x4096, silu, both sums saved, 192x128 takes 2,913 us under a load that lasts,
  128x200 2,855 in bands of eight tiles, 2% more in others.
  """
  product = problem.transposed
  step = tiles.rhs_block(product)
  gated = problem.epilogue.gated
  if problem.itemsize != 2 or step > tiles.column_step(problem.dtype) and not gated:
    return []
  most = _MOST_EVENLY // step * step
  cols = tiles.round_up(tiles.cdiv(product.n, tiles.cdiv(product.n, most)), step)
  return [(128, cols, 2, "tile")] if cols >= _LEAST_IN_TURNS else []


def wide(problem: Problem) -> list[Shape]:
  """Tiles of many columns, from swapped operands, where lhs is m-major.

  It has blocks of 64 rows then, of which few sizes of tiles have whole ones.
  14336x4096x8192 TN takes 1,357 us so, by 128x256 1,382, and under a load that lasts
  1,393 and 1,432; in its place, 4096x14336x8192 TN by the same tile 1,341 and 1,357,
  1,372 and 1,413 (H200).
  """
  large = problem.m > _NARROW
  blocks = tiles.rhs_block(problem.transposed) > tiles.column_step(problem.dtype)
  return [_WIDE] if large and blocks and problem.itemsize == 2 else []


def skewed(product: Problem, device: Device, consumers: int) -> list[int]:
  """Columns of tiles of 64 rows a consumer that are worth weighing for skewed lhs.

  All in one instruction, which registers feed: the fewest tiles of a round of the SMs,
  or equal parts of the result.
  """
  found = {128, 192, 256}
  if product.n <= _NARROW:
    found |= _equal_parts(product)
  for rows, cols, its_consumers, _ in filling(product, device):
    if its_consumers == consumers and rows == 64 * consumers:
      found.add(cols)
  return sorted(cols for cols in found if cols <= tiles.WGMMA_COLS)


def of_runs(product: Problem) -> list[tuple[int, int, str]]:
  """(rows, consumers, what they share out) of tiles of whole rows of lhs.

  Tiles with all of m share no other rows, so that a consumer may have two times 64.
  """
  if product.lhs_layout == "k-major":
    return [(64, 2, "tile"), (128, 2, "m")]
  rows = tiles.round_up(product.m, 64)
  consumers = {64: 1, 128: 2, 192: 3, 256: 2}
  return [(rows, consumers[rows], "m")] if rows in consumers else []


def _equal_parts(product: Problem) -> set[int]:
  """Columns of tiles of which one to four cover those of a result."""
  parts = range(tiles.cdiv(product.n, specialised.MAX_TILE_N), 5)
  return set().union(*(_columns(product, tiles.cdiv(product.n, each)) for each in parts))


def _columns(product: Problem, least: int) -> set[int]:
  """The fewest that tiles may have, that pairs of CTAs can share, in blocks of rhs."""
  steps = tiles.column_step(product.dtype), 16, tiles.rhs_block(product)
  if product.matrices_of("rhs") > 1:  # They share them out.
    steps = (2 * max(tiles.LEAST_COLUMNS, tiles.rhs_block(product)),)
  return {
      tiles.round_up(max(least, tiles.LEAST_COLUMNS), step) for step in steps
  }


def narrow(cols: int, most: int) -> list[int]:
  """Columns of tiles of at most so many, of equal parts of a result of few columns."""
  if cols > _MOST_SPLIT:
    return []
  fewest = tiles.cdiv(cols, most)
  found = {tiles.cdiv(cols, each) for each in (fewest, fewest + 1)}
  return sorted({tiles.round_up(least, lhs_registers.COLUMN_STEP) for least in found})

"""What a config makes of a problem: tiles, steps, and the ways of the operands.

Counts alone: `traffic` and `cost_model` make times of them.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxgemm import operand_passes
from jaxgemm.device import Device
from pallas_kernels import (
  direct,
  epilogue_choice,
  exchange,
  parts,
  persistent,
  run_loads,
  sector_stores,
  specialised,
  staging,
  tiles,
  ways,
)
from pallas_kernels.configs import Config, PersistentConfig
from pallas_kernels.problem import Problem


class Work:
  """What the SMs have to do.

  Attributes:
    asked: the problem.
    problem: what the kernel multiplies, whose operands may have changed places.
    kernel, config: what does it; the kernel by name.
    has_roles: whether a producer loads for the consumers.
    tiles_m, tiles_n: tiles of one product; clusters have no gaps.
    num_tiles: of all products and splits.
    cluster: CTAs of a cluster.
    at_once: CTAs that run at the same time, one an SM.
    per_sm: tiles of the busiest SM.
    num_products: of parts of the operands (see `pallas_kernels.parts`), or one.
    k_steps: k tiles that a CTA multiplies, for each of those products.
    last_share: what is multiplied of the last of all k tiles.
    splits: of k; `cluster_k` of them lie in one cluster.
    sums: partial sums of each element that go through memory; 1: none.
    loads: how often a step brings 128 bytes of each row of lhs, and of rhs.
    weights: how many arrays of its bytes lhs consists of, and rhs.
    loaded: the operands that come through registers.
    padded: those that do not have the rows that the problem says, when they are copied.
    passes: over operands, before the kernel.
    splits_lhs: whether lhs is split into its parts in registers.
    scaled_parts: whether the parts are scaled, and how many operands XLA scales.
    row_bytes: of the result, as it is stored.
    masked: whether threads store it, and mask what lies beyond: TMA stores rows that
      begin a multiple of 16 bytes apart.
    stored_wide: whether they store what TMA could as well: see
      `epilogue_choice.stores_wide`.
    runs: whether its tiles leave in one bulk copy each all the same.
    halo: columns that a tile shares with the next, so that it stores whole sectors.
    lhs_way: see `ways.of_lhs`.
    promotes: whether consumers stop to add their sums to rounded ones.
  """

  def __init__(self, problem: Problem, kernel: str, config: Config, device: Device):
    split = parts.of(problem, config)
    self.splits_lhs = split is not None and split.lhs_in_registers
    stored = problem.transposed if self.splits_lhs and config.swap else problem
    self.row_bytes = stored.n * stored.out_itemsize
    self.scaled_parts = split is not None and split.scaled, 0
    if self.scaled_parts[0]:
      self.scaled_parts = True, operand_passes.scaled_by_xla(stored)
    self.has_roles = isinstance(config, PersistentConfig)
    self.promotes = bool(config.promote) and not (
        self.has_roles and specialised.overlaps(problem, config)
    )
    self.asked, self.kernel, self.config = problem, kernel, config
    product = operand_passes.as_read(operand_passes.product_of(problem, config))
    self.problem = product

    self.splits, self.cluster_k = _of(config, "splits"), _of(config, "cluster_k")
    self.sums = self.splits // self.cluster_k
    self.lhs_way = ways.of_lhs(product, config)
    reordered = self.has_roles and (
        specialised.row_order(problem, config) != "as they are"
    )
    self.stored_wide = self.sums == 1 and self._stores(
        specialised.stores_wide, epilogue_choice.stores_wide
    )
    self.masked = self.sums == 1 and (
        kernel == direct.NAME or self.row_bytes % 16 > 0 or reordered
        or self.stored_wide
    )
    self.runs = self.masked and self._stores(
        specialised.stores_runs, epilogue_choice.stores_runs
    )
    if self.runs:
      self.masked, self.row_bytes = False, tiles.SWIZZLE_BYTES  # Without gaps.
    cluster_m, cluster_n = self.multicast
    self.cluster = cluster_m * cluster_n * self.cluster_k
    self.tiles_m = tiles.round_up(
        tiles.cdiv(product.product_m, config.tile_m), cluster_m
    )
    self.halo = 0
    if getattr(config, "overlap", False):
      self.halo = sector_stores.halo(problem.n)
    along_n = tiles.overlapping(product.product_n, config.tile_n, self.halo)
    self.tiles_n = tiles.round_up(along_n, cluster_n)
    self.num_tiles = product.batch * self.tiles_m * self.tiles_n * self.splits
    self.at_once = device.ctas_at_once(self.cluster)
    self.per_sm = tiles.cdiv(self.num_tiles, self.at_once)

    count, self.num_products = (split.count, split.num_products) if split else (1, 1)
    self.k_steps = tiles.cdiv(tiles.cdiv(product.k, config.tile_k), self.splits)
    self.k_steps *= self.num_products
    self.last_share = 1.0
    if kernel == persistent.NAME and split is None:
      depth = specialised.last_depth(product, config) or config.tile_k
      self.last_share = depth / config.tile_k
    self.loads = count / self.num_products, count / self.num_products
    if product.converts:  # A row's 64 of k, in 8 bits, are 64 bytes.
      self.loads = 0.5, 1.0
    self.weights = count, count
    if self.splits_lhs:  # 32 of k: as many bytes of float32 lhs as of 64 of k of a part.
      self.loads = 1 / self.num_products, count / 2 / self.num_products
      self.weights = 2, count

    self.passes, self.loaded = operand_passes.passes(problem, config), ()
    if kernel == direct.NAME:
      self.passes, self.loaded = (), ("lhs", "rhs")
    elif ways.takes_loads(product, config):
      self.loaded = tuple(operand for _, operand, _ in self.passes)
      self.passes = ()
    self.padded = tuple(operand for _, operand, _ in self.passes)
    self.padded += ("lhs",) * (self.lhs_way == "runs")
    if split:
      self.passes = operand_passes.splitting(problem, config, split)

  def _stores(self, by_ring: Callable[..., bool], by_tile: Callable[..., bool]) -> bool:
    """Whether the result leaves as one of these tells, of configs with a ring or not."""
    if self.kernel == direct.NAME or self.cluster_k > 1:
      return False
    if self.has_roles:
      return by_ring(self.asked, self.config)
    return by_tile(self.asked, self.config.tile_n)

  @property
  def multicast(self) -> tuple[int, int]:
    """CTAs of a cluster that share an rhs tile, and an lhs tile."""
    return _of(self.config, "cluster_m"), _of(self.config, "cluster_n")

  @property
  def shares_crooked(self) -> bool:
    """Whether CTAs share tiles whose rows begin within lines of 128 bytes."""
    along_m, along_n = self.multicast
    crooked = operand_passes.misaligned(self.problem, tiles.SWIZZLE_BYTES)
    return along_m > 1 and "rhs" in crooked or along_n > 1 and "lhs" in crooked

  @property
  def shared_bytes(self) -> int:
    """What a k tile moves in shared memory: TMA writes it, and each wgmma reads its own.

    An instruction multiplies 64 rows, and reads them and its columns. Rows in registers
    were read once.
    """
    config, (wg_m, wg_n) = self.config, operand_passes.warpgroup_tile(self.config)
    parts = config.tile_m // wg_m * (config.tile_n // wg_n)
    count = tiles.cdiv(wg_n, tiles.WGMMA_COLS)
    read = parts * (wg_m // 64) * (64 * count + wg_n)
    return tiles.SWIZZLE_BYTES * (config.tile_m + config.tile_n + read)

  @property
  def conflicts(self) -> float:
    """Times that a warp's load of an lhs that comes in runs takes, for equal banks."""
    if self.lhs_way != "runs":
      return 0.0
    problem = self.problem
    return run_loads.conflicts(
        problem.lhs_shape[2], k_major=problem.lhs_layout == "k-major"
    )

  @property
  def num_shares(self) -> int:
    """CTAs of a cluster that share out a tile's columns, where it shares out k."""
    cols = operand_passes.warpgroup_tile(self.config)[1]
    return cols // exchange.share_cols(cols, self.cluster_k)

  @property
  def _stored_cols(self) -> int:
    """Columns of the result that a warpgroup has of a tile."""
    cols = operand_passes.warpgroup_tile(self.config)[1]
    return cols // (1 + self.asked.epilogue.gated)

  @property
  def stored_within(self) -> bool:
    """Whether TMA stores rows of a tile that begin within sectors of 32 bytes."""
    if self.masked or self.runs or self.sums > 1 or getattr(self.config, "swap", False):
      return False
    return self._stored_cols * self.asked.out_itemsize % tiles.SECTOR_BYTES > 0

  @property
  def sent(self) -> float:
    """What leaves for the result, in multiples of its bytes.

    In 128 bytes of a tile's row, as most pieces have (see `epilogue`): of 144 columns,
    three times 64. Shorter ones share lines: to count their own bytes gained nothing.
    """
    if not self.has_roles or self.runs or self.sums > 1 or self.config.swap:
      return 1.0
    if self.stored_wide:
      return 1.0
    if self._stored_cols >= self.asked.n:
      return 1.0
    row_bytes = self._stored_cols * self.asked.out_itemsize
    return tiles.round_up(row_bytes, tiles.SWIZZLE_BYTES) / row_bytes

  @property
  def more_pieces(self) -> int:
    """Pieces of a consumer's tile beyond the fewest, which have 128 bytes of its rows."""
    if not self.has_roles or hasattr(self.config, "splits"):
      return 0
    rows, cols = specialised.stored_tile(self.asked, self.config)
    row_bytes = cols * self.asked.out_itemsize
    if row_bytes % tiles.SWIZZLE_BYTES == 0:
      return 0
    fewest = rows // staging.PIECE_ROWS * tiles.cdiv(row_bytes, tiles.SWIZZLE_BYTES)
    return max(specialised.pieces(self.asked, self.config) - fewest, 0)


def _of(config: Config, name: str) -> int:
  """A number that only some configs have; else 1."""
  return getattr(config, name, 1)

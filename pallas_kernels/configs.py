"""The numbers that each kernel lets one tune.

A config holds what may be tuned of a kernel and nothing else: what the product is, its
`Problem` says. This module is a leaf, too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

# Fields of configs, and axes of the grid.
CLUSTER_AXES = ALONG_M, ALONG_N, ALONG_K = "cluster_m", "cluster_n", "cluster_k"


@dataclasses.dataclass(frozen=True)
class BlockedConfig:
  """Tile of one CTA: one warpgroup, one shared-memory slot.

  `promote`: see PersistentConfig.
  """

  tile_m: int = 128
  tile_n: int = 128
  tile_k: int = 64
  promote: int = 0


@dataclasses.dataclass(frozen=True)
class PipelinedConfig:
  """Tile of one CTA, and the number of shared-memory slots in its ring.

  `promote`: see PersistentConfig.
  """

  tile_m: int = 128
  tile_n: int = 128
  tile_k: int = 64
  num_stages: int = 4
  promote: int = 0


@dataclasses.dataclass(frozen=True)
class DirectConfig:
  """Tile of one CTA, whose k tiles have a shared-memory slot each.

  The `splits` CTAs of a cluster share the k of one tile. With `overlap` tiles have some
  columns of the next, so that each stores whole sectors (see `sector_stores`). `promote`:
  see PersistentConfig.
  """

  tile_m: int = 64
  tile_n: int = 64
  tile_k: int = 64
  promote: int = 0
  splits: int = 1
  overlap: bool = False

  @property
  def cluster_k(self) -> int:
    """CTAs of a cluster: all that share k."""
    return self.splits


@dataclasses.dataclass(frozen=True)
class PersistentConfig:
  """The numbers of the warp-specialised kernels.

  Attributes:
    tile_m, tile_n, tile_k: tile of one CTA; of a gated product tile_n / 2 columns of
      each rhs, or with `swap` tile_m / 2.
    num_stages: slots of the shared-memory ring.
    consumers: warpgroups that multiply, 1 to 3.
    wg_dim: the dimension of the tile that consumers share out; with "tile" two of
      them take whole tiles in turn, and with "k", of lhs that is normalised, k tiles.
      Three share out "m".
    cluster_m, cluster_n: CTAs of a cluster along m and n; neighbours along m
      share the rhs tile, neighbours along n the lhs tile (multicast).
    grid_minor: the dimension along which consecutive CTAs walk first.
    grid_width: width, in (cluster) tiles, of the band that they walk.
    promote: k tiles after which the sums leave the tensor cores' accumulator for
      ordinary float32 registers; 0: only at the end (see `accumulate`, `parts`).
    misaligned: the way of operands that TMA cannot stride over. "padded": a pass pads
      them first; "loads": the producer loads them through its registers (see
      `register_loads`). Of lhs alone, which then goes to wgmma through the consumers'
      registers, while a pass pads such an rhs: "skewed": TMA copies it skewed (see
      `skewed`); "runs": in tiles of whole rows, all of k or all of m, it comes in bulk
      copies (see `run_loads`).
    swap: multiply transposed: tile_m and cluster_m then count columns of the result,
      tile_n and cluster_n its rows, of which wgmma takes any multiple of 8.
    float16_parts: form products of algorithm bf16_x6 from three of float16 parts,
      where these lose no bits (see `halves`).
    split_lhs: consumers split lhs, which comes in float32, into the parts of bf16_x6 in
      their registers; only rhs has a pass that does so. With `swap` that is the other
      way round, and the result is transposed in a pass of its own.
  """

  tile_m: int = 128
  tile_n: int = 256
  tile_k: int = 64
  num_stages: int = 4
  consumers: int = 2
  wg_dim: Literal["m", "n", "tile", "k"] = "m"
  cluster_m: int = 1
  cluster_n: int = 1
  grid_minor: Literal["m", "n"] = "m"
  grid_width: int = 8
  promote: int = 0
  misaligned: Literal["padded", "loads", "skewed", "runs"] = "padded"
  swap: bool = False
  float16_parts: bool = False
  split_lhs: bool = False

  @property
  def cluster_axes(self) -> dict[str, int]:
    """The axes of a cluster of several CTAs, and how many are along each."""
    sizes = {name: getattr(self, name, 1) for name in CLUSTER_AXES}
    return {name: size for name, size in sizes.items() if size > 1}

  @property
  def cluster(self) -> int:
    """CTAs of a cluster."""
    return math.prod(self.cluster_axes.values())


@dataclasses.dataclass(frozen=True)
class SplitKConfig(PersistentConfig):
  """As PersistentConfig; `splits` CTAs share the k of one tile.

  Attributes:
    splits: parts of k.
    cluster_k: how many of those CTAs make a cluster, which adds its parts up
      through distributed shared memory. Where it is less than `splits`, a second
      kernel adds the sums of the clusters.
  """

  splits: int = 4
  cluster_k: int = 1


@dataclasses.dataclass(frozen=True)
class GemvConfig:
  """`splits` CTAs share the k of the same columns."""

  splits: int = 1


@dataclasses.dataclass(frozen=True)
class TritonConfig:
  """The numbers of the portable kernel, whose forms are one Triton function.

  Attributes:
    tile_m, tile_n, tile_k: tile of one CTA.
    num_stages: shared-memory slots of the loop over k: with 1 the form is blocked,
      with more it is pipelined.
    num_warps: warps of one CTA.
    splits: CTAs that share the k of one tile; with more than 1 the form is split-k.
    grid_width: tiles along m of the band that consecutive CTAs walk.
    promote: see PersistentConfig.
  """

  tile_m: int = 128
  tile_n: int = 128
  tile_k: int = 32
  num_stages: int = 3
  num_warps: int = 8
  splits: int = 1
  grid_width: int = 8
  promote: int = 0


Config = (
    BlockedConfig | DirectConfig | PipelinedConfig | PersistentConfig | SplitKConfig
    | GemvConfig | TritonConfig
)

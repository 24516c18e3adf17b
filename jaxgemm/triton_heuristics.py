"""Candidates of the portable kernel: pure functions of (Problem, Device).

The model is that of `heuristics`, in the little that can be said of every GPU: CTAs
that share an SM hide each other's waits, the SM that has most tiles counts, and a
step takes as long as its slowest part. Its constants are those of the H200, taken
relative to each device's own rates; no other device has been measured.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

from jaxgemm.device import HOPPER, Device, portable
from jaxgemm.exactness import promotion
from jaxgemm.heuristics import Candidate
from pallas_kernels import tiles, triton
from pallas_kernels.configs import TritonConfig
from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Model:
  """Constants of the cost model; times in us, rates in bytes/us."""

  launch: float = 2.0  # From the first instruction to the loop, and the way out.
  latency: float = 0.9  # From asking for a tile to having it.
  l2_rate: float = 100e3  # L2 to shared memory, of one SM.
  store_rate: float = 120e3  # Registers to memory, of one SM.
  odd_store: float = 2.5  # Stores of single elements, against those of 16 bytes.
  narrow: float = 6.0  # Rows' or columns' worth of time that each tile adds,
  narrow_mma: float = 16.0  # and where operands go through registers (mma.sync).
  memory: float = 0.9  # Share of the bandwidth that a product reaches.
  promote: float = 0.25  # Adding the accumulator to a sum, in k tiles.
  pass_launch: float = 2.0  # Launch of a pass over an operand or over the parts.
  pass_rate: float = 1.0  # Bytes of a pass, against the memory's.
  parts_rate: float = 1.0  # Bytes of the parts, which the L2 may hold.


MODEL = Model()

# Tiles, each with its warps: those that fill the SM's registers first.
_TILES = (
    (128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4),
    (256, 64, 4), (128, 64, 4), (64, 128, 4), (64, 64, 4), (32, 64, 4), (64, 32, 4),
    (16, 128, 4), (128, 16, 4), (32, 32, 4), (16, 64, 4), (64, 16, 4),
)
_MAX_STAGES = 5
_REGISTERS, _THREADS, _RESERVED_SMEM = 65536, 1536, 1024  # Of an SM, and of a CTA.


def why_not(device: Device | None) -> str | None:
  """The reason why the portable kernel cannot run on a device, or None."""
  if not portable(device):
    needs = "it needs an NVIDIA GPU of compute capability 8.0, 8.6, 8.9, 9.0 or 12.0"
    if device is None:
      return f"{needs}, and the default device is none"
    return f"{needs}, and {device.kind} has {device.compute_capability}"
  package = triton.missing_package()
  if package is not None:
    return f"it needs the package {package}: pip install jaxgemm[triton]"
  return None


def supports(problem: Problem, config: TritonConfig, device: Device) -> str | None:
  """The reason why the kernel cannot serve on this device, or None."""
  reason = triton.supports(problem, config)
  if reason is not None:
    return reason
  smem_bytes = _smem_bytes(problem, config, device)
  if smem_bytes > device.smem_bytes:
    return (
        f"{smem_bytes} bytes of shared memory exceed the {device.smem_bytes} of one"
        f" CTA on {device.kind}"
    )
  return None


def _smem_bytes(problem: Problem, config: TritonConfig, device: Device) -> int:
  return triton.smem_bytes(problem, config, reads_smem=_reads_smem(config, device))


def _reads_smem(config: TritonConfig, device: Device) -> bool:
  """Whether Triton multiplies by wgmma, of 64 rows a warpgroup, not by mma.sync."""
  wgmma = device.compute_capability == HOPPER
  return wgmma and config.tile_m >= 64 and config.num_warps >= 4


@functools.lru_cache(maxsize=4096)
def candidates(problem: Problem, device: Device) -> tuple[Candidate, ...]:
  """Every candidate for a problem, the fastest by estimate first."""
  found = []
  for config in _configs(problem, device):
    if supports(problem, config, device) is None:
      time_us, reason = estimate(problem, config, device)
      found.append(Candidate(triton.NAME, config, time_us, reason))
  return tuple(sorted(found, key=lambda candidate: candidate.time_us))


# -- Which configs there are ---------------------------------------------------------


def _configs(problem: Problem, device: Device) -> Iterator[TritonConfig]:
  tile_k = tiles.swizzle_elems(problem.dtype)
  k_steps = tiles.cdiv(problem.k, tile_k)
  promote = promotion(problem, k_steps)
  for tile_m, tile_n, num_warps in ((128, 128, 8), (64, 64, 4)):
    yield TritonConfig(tile_m, tile_n, tile_k, 1, num_warps, promote=promote)
  for tile_m, tile_n, num_warps in _TILES:
    if tile_m > 2 * max(problem.m, 16) or tile_n > 2 * max(problem.n, 16):
      continue
    tile = TritonConfig(tile_m, tile_n, tile_k, num_warps=num_warps)
    for splits in (1, *_splits(problem, tile, device, k_steps)):
      part = promotion(problem, tiles.cdiv(k_steps, splits))
      split = dataclasses.replace(tile, splits=splits, promote=part)
      yield from _with_stages(problem, split, device)


def _with_stages(
    problem: Problem, config: TritonConfig, device: Device
) -> Iterator[TritonConfig]:
  """The config with as many stages as shared memory holds, and with one less."""
  for num_stages in range(_MAX_STAGES, 1, -1):
    staged = dataclasses.replace(config, num_stages=num_stages)
    if supports(problem, staged, device) is None:
      yield staged
      if num_stages > 3:
        yield dataclasses.replace(config, num_stages=num_stages - 1)
      return


def _splits(
    problem: Problem, config: TritonConfig, device: Device, k_steps: int
) -> list[int]:
  """Numbers of splits that fill the SMs once or twice, or half of them."""
  most = min(device.num_sms // triton.num_ctas(problem, config), k_steps // 4)
  wanted = {most, most // 2, most * 2 // 3, most * 2}
  return sorted(s for s in wanted if 2 <= s <= k_steps // 4)


# -- What they cost ------------------------------------------------------------------


def estimate(
    problem: Problem, config: TritonConfig, device: Device, model: Model = MODEL
) -> tuple[float, str]:
  """(estimated time in us, what it consists of)."""
  splits = config.splits
  num_tiles = triton.num_ctas(problem, config)
  k_steps = tiles.cdiv(tiles.cdiv(problem.k, config.tile_k), splits)
  per_sm = tiles.cdiv(num_tiles, device.num_sms)
  together = min(_resident(problem, config, device), per_sm)

  # One k tile of one CTA: multiplied, supplied, waited for.
  rate = device.matrix_tflops[problem.dtype] * 1e6 / device.num_sms  # FLOP/us
  matrix = 2 * config.tile_m * config.tile_n * config.tile_k / rate
  narrow = model.narrow if _reads_smem(config, device) else model.narrow_mma
  matrix *= 1 + narrow / config.tile_m + narrow / config.tile_n
  if config.promote:
    matrix *= 1 + model.promote / config.promote
  loaded = (config.tile_m + config.tile_n) * config.tile_k * problem.itemsize
  in_flight = together * max(config.num_stages - 1, 0.5)
  step = max(matrix, loaded / model.l2_rate, model.latency / in_flight)

  # The tiles of one SM. CTAs that share it store while others multiply.
  itemsize = 4 if splits > 1 else problem.out_itemsize
  store = config.tile_m * config.tile_n * itemsize / model.store_rate
  if problem.n * itemsize % 16:
    store *= model.odd_store
  busy = per_sm * (k_steps * step + store / together)

  bandwidth = device.bandwidth_tbps * 1e6
  memory = problem.num_bytes / (bandwidth * model.memory)
  time = model.launch + model.latency + max(busy, memory) + 0.1 * min(busy, memory)
  passes, what = _passes(problem, splits, bandwidth, model)
  shape = f"{num_tiles} tiles, {per_sm} an SM, {k_steps} k tiles each"
  bound = "the memory" if memory > busy else "the SMs"
  return time + passes, f"{shape}; bound by {bound}{what}"


def _resident(problem: Problem, config: TritonConfig, device: Device) -> int:
  """CTAs that share an SM."""
  threads = 32 * config.num_warps
  smem_bytes = _smem_bytes(problem, config, device) + _RESERVED_SMEM
  sums = 2 if config.promote else 1
  registers = min(sums * config.tile_m * config.tile_n // threads + 64, 255)
  return max(
      1,
      min(
          (device.smem_bytes + _RESERVED_SMEM) // smem_bytes,
          _REGISTERS // (threads * registers),
          _THREADS // threads,
      ),
  )


def _passes(
    problem: Problem, splits: int, bandwidth: float, model: Model
) -> tuple[float, str]:
  """Time of the passes beside the kernel, and their names."""
  time, names = 0.0, []
  if splits > 1:
    part_bytes = 4 * problem.batch * problem.m * problem.n * splits
    time += model.pass_launch + part_bytes / (bandwidth * model.parts_rate)
    names.append("adding the parts")
  for name, (batch, rows, cols) in (
      ("lhs", problem.lhs_shape), ("rhs", problem.rhs_shape)
  ):
    padded = cols % tiles.tma_stride_elems(problem.dtype) != 0
    if padded or problem.dtype == "float32":
      num_bytes = 2 * batch * rows * cols * problem.itemsize
      time += model.pass_launch + num_bytes / (bandwidth * model.pass_rate)
      names.append(f"{'padding' if padded else 'rounding'} {name}")
  return time, "".join(f", + {name}" for name in names)

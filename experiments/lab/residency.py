"""How many CTAs share an SM, and what keeps further ones out: theoretical occupancy."""

from __future__ import annotations

import dataclasses

from experiments.lab.rows import Row

# Of one SM of Hopper, as the CUDA programming guide has them.
_WARPS = 64
_CTAS = 32
_REGISTERS = 64 << 10
_SMEM_BYTES = 228 << 10
_SYSTEM_BYTES = 1 << 10  # Shared memory that the system takes for each CTA.
_SMEM_UNIT = 128
_REGISTER_UNIT = 256  # In which a warp gets its registers.
_WARP_THREADS = 32


@dataclasses.dataclass(frozen=True)
class Residency:
  """What an SM can hold of a kernel at the same time.

  Attributes:
    ctas: how many CTAs.
    occupancy: their warps, as a share of all that an SM can hold.
    limit: what keeps the next CTA out.
  """

  ctas: int
  occupancy: float
  limit: str


def of(threads: int, smem_bytes: int, registers: int | None = None) -> Residency:
  """Returns the residency of CTAs; without `registers` these limit nothing."""
  warps = -(-threads // _WARP_THREADS)
  smem = -(-(smem_bytes + _SYSTEM_BYTES) // _SMEM_UNIT) * _SMEM_UNIT
  limits = {
      "shared memory": _SMEM_BYTES // smem, "threads": _WARPS // warps, "CTAs": _CTAS,
  }
  if registers:
    a_warp = -(-registers * _WARP_THREADS // _REGISTER_UNIT) * _REGISTER_UNIT
    limits["registers"] = _REGISTERS // (a_warp * warps)
  limit = min(limits, key=limits.__getitem__)
  return Residency(limits[limit], limits[limit] * warps / _WARPS, limit)


def of_row(row: Row) -> Residency | None:
  """Returns the residency of a row's kernel: as it was launched, or else as reckoned.

  Reckoned is from the shared memory and the `threads` that its details give.
  """
  if row.launch is not None:
    return of(row.launch.threads, row.launch.smem_bytes, row.launch.registers)
  if row.smem_bytes is None or "threads" not in row.details:
    return None
  return of(row.details["threads"], row.smem_bytes)

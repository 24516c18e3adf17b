"""The constants of the cost model: what an H200 was measured to do.

They are fitted to measured times (see experiments/fit_heuristics.py), but for those that
say so, and those of parts of float32 operands (lhs_split to beside, guard, scales), which
are by hand, as `factors` is: no sweep has it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
  """Constants of the cost model; times in us, rates in bytes/us of one SM."""

  roles: float = 0.574  # Of a kernel with a producer: to part the registers.
  team: float = 0.571  # Of each consumer but the first, to get going.
  cluster: float = 0.0757  # Of each CTA of a cluster, to be launched together.
  launch: float = 0.4  # Of as many CTAs as SMs, where they come and go.
  latency: float = 0.868  # From asking for a tile to having it.
  wait: float = 0.67  # The same, while all SMs ask, beside what its bytes take.
  descriptors: float = 0.454  # Until TMA has fetched them, and of its last store.
  l2_rate: float = 137e3  # L2 to shared memory.
  multicast: float = 0.37  # What an SM receives, beside what it asks for.
  shared_slot: float = 0.0275  # A k tile of crooked rows waits for slots of all CTAs.
  short_rows: float = 0.0165  # Of operands copied in rows of 128 bytes; less if longer.
  crooked_rows: float = 1.78  # As `short_rows`, of rows that begin within 128 bytes.
  crooked_memory: float = 0.248  # What crooked rows cost the memory itself.
  stores: float = 1.13  # Of the result's bytes,
  odd_stores: float = 1.21  # and more, where its rows begin within 16 bytes,
  direct_units: float = 1.70  # where by direct, in units of 2 or 4 bytes,
  direct_half_units: float = 0.45  # in units of 8 bytes,
  crooked_stores: float = 0.6  # where within 32,
  crooked_wide: float = 0.4  # where threads store these in wide pieces,
  crooked_sectors: float = 0.03  # where at multiples of them.
  crooked_beside: float = 0.35  # Of what they cost the L2 while a result leaves.
  crooked_32: float = 0.48  # Of crooked rows' costs, of those at multiples of 32 bytes.
  crooked_64: float = 0.2  # The same, of 64 bytes.
  same_lines: float = 1.0  # As rows: of each that shares a line. By hand, of k < 64.
  hot: float = 0.143  # A k tile of an operand that all CTAs ask for at once.
  reread: float = 0.221  # Share of an operand that each second tile fetches anew.
  load_rate: float = 24.8e3  # Memory to shared memory through registers, shifted.
  aligned_rate: float = 37.9e3  # The same, where rows are aligned to 16 bytes.
  direct: float = 0.995  # Of direct: from its launch to the first loads.
  direct_spread: float = 0.047  # For each doubling of the CTAs that wait at once.
  direct_memory: float = 0.17  # Of the memory's time, which it does not overlap.
  direct_aligned: float = 0.0459  # Of 16 bytes that each thread of a CTA loads,
  direct_shifted: float = 0.0678  # and shifts,
  direct_copied: float = 0.0165  # or that are copied in place of that,
  direct_copied_crooked: float = 0.0175  # more of rows that begin within lines,
  direct_step: float = 0.0366  # and of each k tile.
  direct_copies_memory: float = 0.326  # Of the memory's time for these.
  direct_store: float = 0.232  # Of 64x64 elements of 16 bits,
  direct_odd: float = 0.268  # of rows that begin within 16 bytes.
  direct_sectors: float = 0.243  # of whole sectors of rows that begin within some.
  direct_small: float = 0.16  # The last tile's way to memory, in small units or shifted.
  direct_beside: float = 0.796  # Of what a CTA takes, beside another on its SM.
  direct_later: float = 0.59  # Of that, of those beyond the first few of an SM,
  direct_later_memory: float = 0.295  # of the memory's time, and more, the more they are.
  direct_cluster: float = 0.443  # Of clusters: to be launched, and to exchange.
  direct_cta: float = 0.0869  # The same, of each CTA.
  direct_sums: float = 0.689  # They exchange 64x64 sums.
  store_rate: float = 33.9e3  # Registers of a warpgroup to memory.
  masked_rate: float = 48.7e3  # The same, not by TMA,
  odd_rate: float = 20.5e3  # and of rows that begin within 16 bytes.
  half_sectors: float = 1.8  # Times as long as by the first: rows that begin within 32.
  piece: float = 0.11  # Each piece beyond the fewest that a tile could be stored in.
  step: float = 0.0262  # Barriers and bookkeeping of a k tile.
  shared_step: float = 0.0134  # The same, where another consumer's wgmma runs meanwhile.
  solo: float = 0.32  # Of pipelined's steps, where one CTA has an SM to itself.
  single: float = 0.945  # Of the tensor cores' time, one warpgroup at a time.
  wide: float = 1.09  # The same, two wgmma a k tile: one holds 256 columns at most.
  narrow: float = 83.6  # Columns of a wgmma that takes no less time with fewer.
  shared_rate: float = 256e3  # Shared memory, of what TMA writes and wgmma reads.
  promotion: float = 0.0181  # Of the sums, once.
  factors: float = 0.04  # The same, with factors of blocks, beside the tensor cores.
  lhs_split: float = 0.41  # Of 32 of k in registers, by one consumer.
  lhs_split_two: float = 0.61  # The same, by two at once.
  lhs_split_three: float = 0.70
  beside: float = 1.8  # Power of the mean of that and its wgmma: partly at once.
  skew: float = 0.15  # Of a k tile of lhs that comes skewed: into registers.
  run: float = 0.11  # Of 64 rows of one that comes in runs, for each of equal banks.
  convert: float = 0.05  # Of 64 rows of a k tile of lhs in 8 bits: to 16, in registers.
  convert_alone: float = 0.75  # More such rows, where one consumer waits for itself.
  convert_rows: float = 1.25  # Times as long, of k-major ones,
  convert_strips: float = 1.4  # again, where each of two consumers has 128 such rows,
  convert_floats: float = 1.15  # and of floating-point numbers.
  exchange_rate: float = 11e3  # Through distributed shared memory.
  k_cluster: float = 1.09  # Of k tiles, where a cluster shares out k.
  energy: float = 1.2  # Of an operation, at the highest clocks: 1 is what power allows.
  fill_energy: float = 8.0  # The same, of an element on its way into shared memory,
  read_energy: float = 8.0  # and of a row that wgmma reads there, by its columns.
  memory: float = 1.09  # Share of the bandwidth that a product reaches, of a copy's.
  tail: float = 1.68  # Of a tile that some SMs have more than others, beside the memory.
  many_rows: float = 0.02  # What it loses by each doubling of a tile's k-major rows.
  apart: float = 0.235  # What the memory loses where k is split: rows far apart.
  reduce: float = 1.61  # Launch of the kernel that adds the parts of split-k.
  reduce_rate: float = 4.87e6  # Its bytes, out of the L2; of the whole chip.
  part: float = 0.0175  # Of each part of an element, one after the other.
  guard: float = 8.0  # Of float16 parts: to see whether they do, in small kernels.
  scales: float = 4.0  # Of an operand that XLA's kernels scale, not ours.
  pass_launch: float = 0.809  # Launch of a pass over an operand.
  pass_rate: float = 3.57e6  # Bytes read and written; of the whole chip.
  pad_launch: float = 1.3  # The same two of a pass that pads rows of odd lengths, both
  pad_rate: float = 4.2e6  # operands' in one launch; by hand, of cold operands.
  gemv: float = 0.44  # Launch of gemv. Its seven: 72 times of 36 products, off by 10%.
  gemv_memory: float = 0.955  # Of the memory's time.
  gemv_narrow: float = 0.16  # More of it, each time that a thread loads half of 16 bytes.
  gemv_group: float = 0.73  # Of rows of the matrix that are loaded at once.
  gemv_row: float = 0.13  # Share of both that a further row adds, of 32 bits.
  gemv_sum: float = 0.33  # To add up the sums of splits,
  gemv_part: float = 0.04  # and of each of them.


MODEL = Model()

"""Kernels for matrix products: Pallas (Mosaic GPU) on NVIDIA Hopper, Triton elsewhere.

Pure functions of arrays, a Problem and a config. They know neither dispatch nor
differentiation: see `jaxgemm` for both. Each module of KERNELS, and of GROUPED_KERNELS,
exports NAME, Config, supports, smem_bytes and launch.
"""

from pallas_kernels import (
  blocked,
  direct,
  gemv,
  grouped_k,
  grouped_m,
  persistent,
  pipelined,
  split_k,
  triton,
)

# Users' tables of measured plans are kept for one version. Raise it when a kernel's
# speed, a config's meaning, what configs there are or how times are taken changes, so
# that what was measured before is forgotten.
KERNEL_VERSION = 40

# Those that multiply tiles on the tensor cores, and serve nearly every product.
TILE_KERNELS = {
    kernel.NAME: kernel for kernel in (blocked, direct, pipelined, persistent, split_k)
}
KERNELS = {**TILE_KERNELS, gemv.NAME: gemv, triton.NAME: triton}
# Those of products in groups of rows, which none of the others serves.
GROUPED_KERNELS = {kernel.NAME: kernel for kernel in (grouped_m, grouped_k)}
ALL_KERNELS = KERNELS | GROUPED_KERNELS

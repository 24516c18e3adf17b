"""Pallas (Mosaic GPU) kernels for matrix products on NVIDIA Hopper.

Pure functions of arrays, a Problem and a config. They know neither dispatch nor
differentiation: see `jaxgemm` for both. Each module of KERNELS exports NAME,
Config, supports, smem_bytes and launch.
"""

from pallas_kernels import blocked, persistent, pipelined, split_k

KERNELS = {kernel.NAME: kernel for kernel in (blocked, pipelined, persistent, split_k)}

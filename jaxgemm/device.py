"""Devices: what the plan must know of a GPU, and the one place that asks JAX.

Nothing here runs at import: `current_device` asks for the backend when called.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools

import jax

HOPPER = "9.0"
_CLUSTERS_OF_132_SMS = (132, 66, 38, 30, 19, 14, 13, 15)
PORTABLE = ("8.0", "8.6", "8.9", HOPPER, "12.0")  # Where the portable kernel runs.


@dataclasses.dataclass(frozen=True)
class Device:
  """What the heuristics need to know of a GPU.

  Attributes:
    kind: the name that the driver gives.
    num_sms: streaming multiprocessors.
    smem_bytes: most shared memory that one CTA can have.
    l2_bytes: size of the L2 cache.
    bandwidth_tbps: bandwidth of the memory, in terabytes a second.
    compute_capability: "8.0" for the A100, "8.6" for other Ampere GPUs, "8.9" for
      Ada, "9.0" for Hopper, "12.0" for consumer and workstation Blackwell.
    matrix_tflops: rate of the tensor cores in TFLOP/s for each operand dtype.
  """

  kind: str
  num_sms: int
  smem_bytes: int
  l2_bytes: int
  bandwidth_tbps: float
  compute_capability: str
  # A dict does not hash; the kind already tells devices apart.
  matrix_tflops: Mapping[str, float] = dataclasses.field(hash=False)

  def tflops(self, dtype: str) -> float:
    """Rate of the tensor cores; of 8-bit operands twice that of 16-bit ones, on paper."""
    if dtype in self.matrix_tflops:
      return self.matrix_tflops[dtype]
    return 2 * self.matrix_tflops["bfloat16"]

  def max_clusters(self, size: int) -> int:
    """Clusters of `size` CTAs, one CTA an SM, that run at the same time.

    A cluster lies within one GPC, whose SMs it cannot always share out evenly, and how
    many of them work differs from chip to chip. Of 4 and 8 as many as the driver
    (cudaOccupancyMaxActiveClusters) allowed on three H200, and ran at once on two; of
    others less, as on another 20 clusters of 5 and 16 of 6 ran in two waves although it
    allowed 22 and 17.
    """
    return _CLUSTERS_OF_132_SMS[size - 1] * self.num_sms // 132

  def ctas_at_once(self, cluster: int) -> int:
    """CTAs that run at the same time, one an SM, in clusters of `cluster`."""
    return cluster * self.max_clusters(cluster)


# Rates and bandwidth of the H200 are measured on normal data, for a burst. Those of the
# H100 follow from its clocks, multiprocessors and memory; one was seen to reach them (and
# 3% more of the rate), and other bandwidths made no better plans.
_H200 = Device(
    kind="NVIDIA H200",
    num_sms=132,
    smem_bytes=232448,
    l2_bytes=60 << 20,
    bandwidth_tbps=4.3,
    compute_capability=HOPPER,
    matrix_tflops={"bfloat16": 805.0, "float16": 805.0, "float32": 402.0},
)
_H100 = dataclasses.replace(
    _H200, kind="NVIDIA H100 80GB HBM3", l2_bytes=50 << 20, bandwidth_tbps=3.0
)


def _hopper(
    kind: str, bandwidth_tbps: float, tflops_16: float, num_sms: int = 132
) -> Device:
  """Another Hopper GPU, by its data sheet and the H200's shares of its own.

  That has 4.8 TB/s and 989 TFLOP/s of bfloat16 (dense) there.
  """
  share = tflops_16 / 989.0
  rates = {dtype: round(rate * share, 1) for dtype, rate in _H200.matrix_tflops.items()}
  return dataclasses.replace(
      _H100, kind=kind, num_sms=num_sms, matrix_tflops=rates,
      bandwidth_tbps=round(bandwidth_tbps * _H200.bandwidth_tbps / 4.8, 2),
  )


def _on_paper(
    kind: str, compute_capability: str, num_sms: int, smem_kib: int, l2_mib: int,
    bandwidth_tbps: float, tflops_16: float, tflops_tf32: float,
) -> Device:
  """A device by its data sheet: dense rates, with sums in float32."""
  return Device(
      kind, num_sms, smem_kib << 10, l2_mib << 20, bandwidth_tbps, compute_capability,
      {"bfloat16": tflops_16, "float16": tflops_16, "float32": tflops_tf32},
  )


# Not measured here: from NVIDIA's data sheets and architecture white papers.
_A100 = _on_paper("NVIDIA A100-SXM4-80GB", "8.0", 108, 163, 40, 2.04, 312.0, 156.0)
_RTX_3090 = _on_paper("NVIDIA GeForce RTX 3090", "8.6", 82, 99, 6, 0.94, 71.0, 35.6)
_RTX_4090 = _on_paper("NVIDIA GeForce RTX 4090", "8.9", 128, 99, 72, 1.01, 165.2, 82.6)
_RTX_5090 = _on_paper("NVIDIA GeForce RTX 5090", "12.0", 170, 99, 96, 1.79, 209.5, 104.8)
_PRO_6000 = _on_paper(
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "12.0", 188, 99, 128, 1.79, 503.8, 251.9,
)

KNOWN_DEVICES = {
    device.kind: device
    for device in (
        _H200,
        _H100,
        _hopper("NVIDIA H100 PCIe", 2.0, 756.0, 114),
        _hopper("NVIDIA H100 NVL", 3.9, 835.0),
        _hopper("NVIDIA H200 NVL", 4.8, 835.0),
        _hopper("NVIDIA H800", 3.35, 989.0),
        _hopper("NVIDIA H20", 4.0, 148.0, 78),
        _hopper("NVIDIA GH200 480GB", 4.0, 989.0),
        _A100,
        dataclasses.replace(_A100, kind="NVIDIA A100-SXM4-40GB", bandwidth_tbps=1.56),
        dataclasses.replace(_A100, kind="NVIDIA A100 80GB PCIe", bandwidth_tbps=1.94),
        _on_paper("NVIDIA A10", "8.6", 72, 99, 6, 0.6, 125.0, 62.5),
        _RTX_3090,
        _on_paper("NVIDIA L4", "8.9", 58, 99, 48, 0.3, 121.0, 60.0),
        _on_paper("NVIDIA L40S", "8.9", 142, 99, 96, 0.86, 362.0, 183.0),
        _RTX_4090,
        _RTX_5090,
        _PRO_6000,
        dataclasses.replace(
            _PRO_6000, kind="NVIDIA RTX PRO 6000 Blackwell Server Edition"
        ),
    )
}
# Whose figures an unknown device gets, by its compute capability.
_RELATIVES = {
    device.compute_capability: device
    for device in (_H200, _A100, _RTX_3090, _RTX_4090, _RTX_5090)
}


def known_device(kind: str) -> Device:
  """The device of that name; raises ValueError with the known names otherwise."""
  try:
    return KNOWN_DEVICES[kind]
  except (KeyError, TypeError):  # The latter where it does not hash.
    known = ", ".join(repr(name) for name in KNOWN_DEVICES)
    raise ValueError(f"unknown device {kind!r}; known devices: {known}") from None


def supported(device: Device | None) -> bool:
  """Whether the Mosaic kernels, which need Hopper's instructions, run on `device`."""
  return device is not None and device.compute_capability == HOPPER


def portable(device: Device | None) -> bool:
  """Whether the portable kernel can run on `device`, if its packages are there."""
  return device is not None and device.compute_capability in PORTABLE


@functools.cache
def current_device() -> Device | None:
  """The first of this process's GPUs; None on a CPU or an unknown GPU.

  It stands for all of them: one process has GPUs of one kind.

  A GPU that is not in KNOWN_DEVICES gets the figures of one of its compute capability
  (the H200's for Hopper), scaled to its number of multiprocessors; a part of a known
  one (MIG) gets that one's, and its share of the memory's bandwidth.
  """
  if jax.default_backend() != "gpu":
    return None
  gpu = jax.local_devices()[0]
  if gpu.device_kind in KNOWN_DEVICES:
    return KNOWN_DEVICES[gpu.device_kind]
  whole, is_part, _ = gpu.device_kind.partition(" MIG ")
  relative = _RELATIVES.get(getattr(gpu, "compute_capability", None))
  if relative is None:
    return None
  if is_part:
    relative = KNOWN_DEVICES.get(whole, relative)
  num_sms = getattr(gpu, "core_count", None) or relative.num_sms
  scale = num_sms / relative.num_sms
  of_memory = scale if is_part else 1.0
  return dataclasses.replace(
      relative,
      kind=gpu.device_kind,
      num_sms=num_sms,
      l2_bytes=int(relative.l2_bytes * of_memory),
      bandwidth_tbps=relative.bandwidth_tbps * of_memory,
      matrix_tflops={k: v * scale for k, v in relative.matrix_tflops.items()},
  )

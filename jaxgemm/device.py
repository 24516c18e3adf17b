"""Devices: what the plan must know of a GPU, and the one place that asks JAX.

Nothing here runs at import: `current_device` asks for the backend when called.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools

import jax

HOPPER = "9.0"


@dataclasses.dataclass(frozen=True)
class Device:
  """What the heuristics need to know of a GPU.

  Attributes:
    kind: the name that the driver gives.
    num_sms: streaming multiprocessors.
    smem_bytes: most shared memory that one CTA can have.
    l2_bytes: size of the L2 cache.
    bandwidth_tbps: bandwidth of the memory, in terabytes a second.
    compute_capability: "9.0" for Hopper.
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


# Rates and bandwidth of the H200 are measured on normal data, for a burst; those
# of the H100 follow from its clocks, multiprocessors and memory.
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
KNOWN_DEVICES = {device.kind: device for device in (_H200, _H100)}


def known_device(kind: str) -> Device:
  """The device of that name; raises ValueError with the known names otherwise."""
  try:
    return KNOWN_DEVICES[kind]
  except KeyError:
    known = ", ".join(repr(name) for name in KNOWN_DEVICES)
    raise ValueError(f"unknown device {kind!r}; known devices: {known}") from None


def supported(device: Device | None) -> bool:
  """Whether the kernels, which need Hopper's instructions, can run on `device`."""
  return device is not None and device.compute_capability == HOPPER


@functools.cache
def current_device() -> Device | None:
  """The GPU that JAX computes on by default; None on a CPU or an unknown GPU.

  A Hopper GPU that is not in KNOWN_DEVICES gets the H200's figures, scaled to its
  number of multiprocessors.
  """
  if jax.default_backend() != "gpu":
    return None
  gpu = jax.local_devices()[0]
  if gpu.device_kind in KNOWN_DEVICES:
    return KNOWN_DEVICES[gpu.device_kind]
  if getattr(gpu, "compute_capability", None) != HOPPER:
    return None
  num_sms = getattr(gpu, "core_count", _H200.num_sms)
  scale = num_sms / _H200.num_sms
  return dataclasses.replace(
      _H200,
      kind=gpu.device_kind,
      num_sms=num_sms,
      matrix_tflops={k: v * scale for k, v in _H200.matrix_tflops.items()},
  )

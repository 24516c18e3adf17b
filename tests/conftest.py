"""Four emulated CPU devices, and the tests that need a GPU skipped without one."""

from __future__ import annotations

import os

# XLA reads it when the CPU backend starts, which no import does.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from jaxgemm import device  # noqa: E402


def pytest_collection_modifyitems(items):
  marked = [item for item in items if "gpu" in item.keywords]
  if marked and not device.supported(device.current_device()):
    skip = pytest.mark.skip(reason="needs an NVIDIA Hopper GPU, and JAX finds none")
    for item in marked:
      item.add_marker(skip)


@pytest.fixture
def rng() -> np.random.Generator:
  return np.random.default_rng(0)

"""Four emulated CPU devices, and the tests that need a GPU skipped without one.

No test reads or writes the table of plans of the user who runs it.
"""

from __future__ import annotations

import collections
import os
from pathlib import Path
import shutil
import tempfile
import zlib

# XLA reads both when the CPU backend starts, which no import does. Each emulated CTA of a
# cluster holds one of its threads while it waits for the others; more make tests slower.
os.environ["PJRT_NPROC"] = "12"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
# An emulated kernel runs once: it is not worth optimising. A GPU's programs are.
if shutil.which("nvidia-smi") is None:
  os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
_cache_dir = tempfile.TemporaryDirectory(prefix="jaxgemm-tests-")
os.environ["JAXGEMM_CACHE_DIR"] = _cache_dir.name

from experiment_cases import MARK, Gpu  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from experiments import timing  # noqa: E402
from jaxgemm import device, plan, user_table  # noqa: E402
from jaxgemm.autotune import timing as autotune_timing  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # Before what -m leaves out is left out.
def pytest_collection_modifyitems(items):
  _sample(items)
  marked = [item for item in items if "gpu" in item.keywords]
  found = device.current_device() if marked else None
  for item in marked:
    if "portable" in item.keywords:
      served, needs = device.portable(found), "a GPU that Triton serves"
    else:
      served, needs = device.supported(found), "an NVIDIA Hopper GPU"
    if not served:
      reason = f"needs {needs}, and JAX finds none"
      item.add_marker(pytest.mark.skip(reason=reason))


def _sample(items):
  """Has the smaller sets have some cases of tests that have many.

  The short set has the first case of a test and about an eighth of the others; `make
  test` has the first and a quarter of the others of slow ones with three cases or more,
  and of any with six or more.
  """
  slow, more = pytest.mark.slow, pytest.mark.more
  tests = collections.defaultdict(list)
  for item in items:
    if "gpu" not in item.keywords:
      tests[item.nodeid.partition("[")[0]].append(item)
  for cases in tests.values():
    for item in cases[1:]:
      drawn = zlib.crc32(item.nodeid.encode())  # The same in every process.
      if drawn % 4 and len(cases) >= (3 if "slow" in item.keywords else 6):
        item.add_marker(more)
      if drawn % 8:
        item.add_marker(slow)


@pytest.fixture
def rng() -> np.random.Generator:
  return np.random.default_rng(0)


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
  """The GPU that `timing` sees."""
  gpu = Gpu()

  def mark():
    gpu.launch(MARK[0], 0.05)
    gpu.launch(MARK[1], 0.001, 0.4)
    return np.uint32(1)

  monkeypatch.setattr(timing.profile, "kernels", gpu.kernels)
  monkeypatch.setattr(autotune_timing, "_make_mark", lambda: mark)
  monkeypatch.setattr(autotune_timing, "_mark_names", lambda: MARK)
  return gpu


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
  """An empty folder for the tables of one test."""
  monkeypatch.setenv(user_table.ENVIRONMENT, str(tmp_path / "cache"))
  plan.forget_tables()
  yield tmp_path / "cache"
  plan.forget_tables()

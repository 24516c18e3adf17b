"""Faults: tables that cannot be used, GPUs without kernels.

Whatever becomes of the user's table, a product is right, there is one warning, and no
row is lost. That a table of spoilt content is ignored and replaced, and that eight
processes can write at once, is shown in tests/test_user_table.py; that a candidate which
fails leaves the others alone, in tests/test_autotune_measure.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import tempfile
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import device, heuristics, plan, reference, table, user_table
from jaxgemm.autotune import measure
from jaxgemm.user_table import TableWarning
from pallas_kernels import KERNELS
from pallas_kernels.configs import PipelinedConfig
from pallas_kernels.problem import Problem
from tests.test_user_table import GOOD, GOOD_ROW, H200, ROOT, make_row

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

SIZES = 24, 16, 40
SMALL = Problem(*SIZES)
SMALL_ROW = make_row(SMALL, "pipelined", PipelinedConfig(64, 64, num_stages=2))


@pytest.fixture(autouse=True)
def nothing_is_planned(folder):
  """Each test has a folder for tables of its own, and has traced nothing yet."""
  del folder
  jax.clear_caches()
  yield
  jax.clear_caches()


def check_product() -> None:
  """A product by the kernel that the tables or the heuristics choose is right."""
  m, n, k = SIZES
  rng = np.random.default_rng(0)
  a, b = (
      jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((m, k), (k, n))
  )
  with jaxgemm.emulate():
    found = jaxgemm.matmul(a, b)
  assert reference.relative_error(found, reference.matmul(a, b)) < 4e-3


def stored() -> set[Problem]:
  """The problems of the table on the disk, which must be whole."""
  content = json.loads(user_table.path(H200.kind).read_text())
  return {row.problem for row in table.parse(content, H200.kind)}


def others(count: int) -> list[Problem]:
  return [dataclasses.replace(SMALL, n=SMALL.n + 8 * i) for i in range(1, 1 + count)]


def test_the_table_is_read_by_such_a_product(folder):
  """Without a fault there is no warning, and the row counts."""
  user_table.store([SMALL_ROW], H200.kind)
  plan.forget_tables()
  check_product()
  assert plan.make_plan(SMALL, H200).config == SMALL_ROW.config


# -- Tables that cannot be read ----------------------------------------------------


def write(text: str):
  def spoil(file: Path) -> None:
    file.write_text(text)

  return spoil


def link_to_itself(file: Path) -> None:
  file.symlink_to(file)


TOO_LARGE = GOOD_ROW | {
    "kernel": "pipelined", "config": {"num_stages": 9},
    "problem": {"m": 24, "n": 16, "k": 40},
}
UNUSABLE = {
    "truncated": (write(json.dumps(GOOD)[:-40]), "is ignored: JSONDecodeError"),
    "of a foreign form": (write('{"plans": {}}'), "is ignored: KeyError"),
    "of another version": (write(json.dumps(GOOD | {"jax": "0.1"})), "jax is '0.1', not"),
    "of a word that is none": (
        write(json.dumps(GOOD | {
            "rows": [GOOD_ROW | {"kernel": "persistent", "config": {"wg_dim": "rows"}}]
        })), r"wg_dim is 'rows', which is no m\|n\|tile\|k"),
    "too little shared memory": (
        write(json.dumps(GOOD | {"rows": [TOO_LARGE]})),
        "bytes of shared memory exceed the 232448 of one CTA"),
    "a folder in its place": (Path.mkdir, "cannot be read: IsADirectoryError"),
    "a link to itself": (link_to_itself, "cannot be read: OSError: .* symbolic links"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_product_without_its_table(folder, name):
  spoil, message = UNUSABLE[name]
  folder.mkdir()
  spoil(user_table.path(H200.kind))
  with pytest.warns(TableWarning, match=message) as caught:
    check_product()
    assert plan.make_plan(SMALL, H200).source == "heuristic"
    user_table.store([SMALL_ROW], H200.kind)  # Replaces it, or says no other word.
    assert user_table.lookup(SMALL, H200) == SMALL_ROW
  assert len(caught) == 1 and f"JAXGEMM_CACHE_DIR={str(folder)!r}" in str(caught[0])
  assert not list(folder.glob("*.tmp"))


def test_a_table_that_cannot_be_read_is_not_replaced(folder, monkeypatch):
  """It may be good: it takes the rows once it can be read."""
  user_table.store([SMALL_ROW], H200.kind)
  plan.forget_tables()
  first, second = others(2)

  def refuse(*args, **kwargs):
    raise PermissionError(errno.EACCES, "not yours")

  with pytest.warns(TableWarning, match="not yours") as caught:
    with monkeypatch.context() as patch:
      patch.setattr(Path, "read_text", refuse)
      user_table.store([make_row(first)], H200.kind)
    assert stored() == {SMALL}
    user_table.store([make_row(second)], H200.kind)
  assert len(caught) == 1 and stored() == {SMALL, first, second}


NONSENSE = {
    "nobody's home": "~nobody-at-all/plans",
    "in a file": "/dev/null/plans",
    "in a folder of the kernel's": "/proc/jaxgemm",
    "too long": "/tmp/" + 300 * "x",
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_variable_that_names_no_folder(monkeypatch, name):
  value = NONSENSE[name]
  monkeypatch.setenv(user_table.ENVIRONMENT, value)
  with pytest.warns(TableWarning, match="JAXGEMM_CACHE_DIR=") as caught:
    check_product()
    for problem in others(2):
      user_table.store([make_row(problem)], H200.kind)
      assert user_table.lookup(problem, H200) is not None
  assert len(caught) == 1 and repr(value) in str(caught[0].message)
  assert not Path("~nobody-at-all").exists()


# -- Tables that cannot be written -------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(num_bytes: int):
  """What is written beyond is refused, as on a disk that becomes full."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("what", ["a file's half", "mkstemp", "fsync", "replace"])
def test_a_full_disk_loses_nothing(folder, monkeypatch, what):
  def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")

  user_table.store([SMALL_ROW], H200.kind)
  kept = user_table.path(H200.kind).read_bytes()
  *lost, last = others(3)
  message = "cannot be written.*(No space|too large)"
  with pytest.warns(TableWarning, match=message) as caught:
    with contextlib.ExitStack() as stack:
      if what == "a file's half":
        stack.enter_context(files_of_at_most(len(kept) // 2))
      else:
        patch = stack.enter_context(monkeypatch.context())
        patch.setattr(tempfile if what == "mkstemp" else os, what, full)
      for problem in lost:
        user_table.store([make_row(problem)], H200.kind)
      assert {path.suffix for path in folder.iterdir()} == {".json", ".lock"}
      assert user_table.path(H200.kind).read_bytes() == kept
      assert all(user_table.lookup(problem, H200) for problem in (SMALL, *lost))
    check_product()
    user_table.store([make_row(last)], H200.kind)  # There is room again.
  assert len(caught) == 1 and stored() == {SMALL, *lost, last}


_UNPRIVILEGED = """
import os, sys, warnings
import filelock, jax
from jaxgemm import plan, user_table
from tests import test_faults as faults
faults.check_product()  # What is imported late may lie where only root can read.
plan.forget_tables()
jax.clear_caches()
os.environ[user_table.ENVIRONMENT] = sys.argv[1]
if os.geteuid() == 0:
  os.setuid(65534)
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter("always", user_table.TableWarning)
  faults.check_product()
  user_table.store([faults.make_row(faults.others(1)[0])], faults.H200.kind)
  assert user_table.lookup(faults.others(1)[0], faults.H200)
print(plan.make_plan(faults.SMALL, faults.H200).source, *(w.message for w in caught))
"""


def environment(**changes) -> dict[str, str]:
  return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | changes


@pytest.mark.parametrize(
    ("mode", "source", "message"),
    [(0o444, "user table", "cannot be written"), (0, "heuristic", "cannot be read")],
    ids=["read-only", "unreadable"],
)
def test_files_of_another_user(monkeypatch, mode, source, message):
  """In a process without root's rights."""
  with tempfile.TemporaryDirectory(prefix="jaxgemm-faults-") as name:
    monkeypatch.setenv(user_table.ENVIRONMENT, name)
    user_table.store([SMALL_ROW], H200.kind)
    file = user_table.path(H200.kind)
    kept = file.read_bytes()
    file.chmod(mode)
    Path(name).chmod(0o555)
    run = subprocess.run(
        [sys.executable, "-c", _UNPRIVILEGED, name], cwd=ROOT, text=True,
        env=environment(JAXGEMM_CACHE_DIR=""), capture_output=True,
    )
    Path(name).chmod(0o755)
    file.chmod(0o644)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(source) and message in run.stdout
    assert run.stdout.count("jaxgemm's table") == 1
    assert file.read_bytes() == kept


# -- Other processes ---------------------------------------------------------------

_DIES_WITH_THE_LOCK = """
import os, signal, sys
import filelock
filelock.FileLock(sys.argv[1]).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""

_DIES_WRITING = """
import os, signal, sys
from jaxgemm import user_table
from tests import test_faults as faults

def die(*args):
  if sys.argv[1] == "replace":
    replace(*args)
  else:
    os.truncate(args[0], 100)  # What had reached the disk.
  os.kill(os.getpid(), signal.SIGKILL)

replace = os.replace
setattr(os, sys.argv[1], die)
user_table.store([faults.make_row(faults.others(1)[0])], faults.H200.kind)
"""


def killed(script: str, argument: str) -> None:
  run = subprocess.run(
      [sys.executable, "-c", script, argument], cwd=ROOT, env=environment(), text=True,
      capture_output=True,
  )
  assert run.returncode == -9, run.stderr


def test_a_lock_of_a_process_that_died(folder):
  folder.mkdir()
  lock = Path(f"{user_table.path(H200.kind)}.lock")
  killed(_DIES_WITH_THE_LOCK, str(lock))
  assert lock.exists()
  start = time.monotonic()
  user_table.store([SMALL_ROW], H200.kind)  # Any warning is an error.
  assert time.monotonic() - start < user_table._LOCK_TIMEOUT_S / 2
  assert stored() == {SMALL}
  check_product()


def test_a_lock_that_is_never_released(folder, monkeypatch):
  """It is waited for once, not for each row."""
  monkeypatch.setattr(user_table, "_LOCK_TIMEOUT_S", 1.0)
  user_table.store([SMALL_ROW], H200.kind)
  *waiting, last = others(3)
  with open(f"{user_table.path(H200.kind)}.lock", "w") as held:
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.warns(TableWarning, match="could not be acquired") as caught:
      times = [time.monotonic()]
      for problem in waiting:
        user_table.store([make_row(problem)], H200.kind)
        times.append(time.monotonic())
      check_product()
    assert len(caught) == 1
    first, second = np.diff(times)
    assert first >= 1.0 > second
    assert stored() == {SMALL} and user_table.lookup(waiting[1], H200) is not None
  user_table.store([make_row(last)], H200.kind)
  assert stored() == {SMALL, *waiting, last}


@pytest.mark.parametrize(("call", "written"), [("fsync", False), ("replace", True)])
def test_a_process_killed_while_it_writes(folder, call, written):
  """The table is the old one or the new one, and what the process left goes."""
  user_table.store([SMALL_ROW], H200.kind)
  kept = user_table.path(H200.kind).read_bytes()
  killed(_DIES_WRITING, call)
  first, second = others(2)
  assert stored() == {SMALL, *([first] if written else [])}
  assert (user_table.path(H200.kind).read_bytes() == kept) != written
  assert len(list(folder.glob("*.tmp"))) == (not written)
  plan.forget_tables()
  check_product()  # Any warning is an error.
  user_table.store([make_row(second)], H200.kind)
  assert stored() == {SMALL, second, *([first] if written else [])}
  assert {path.suffix for path in folder.iterdir()} == {".json", ".lock"}


# -- Devices -----------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
  """A function that makes JAX's default device one of some attributes."""
  def be(**attributes) -> device.Device | None:
    found = types.SimpleNamespace(**attributes)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [found])
    device.current_device.cache_clear()
    return device.current_device()

  yield be
  monkeypatch.undo()
  device.current_device.cache_clear()


@pytest.mark.parametrize(
    "attributes",
    [dict(device_kind="NVIDIA B200", compute_capability="10.0", core_count=148),
     dict(device_kind="Tesla T4", compute_capability="7.5", core_count=40),
     dict(device_kind="AMD Instinct MI300X")],
    ids=lambda attributes: attributes["device_kind"],
)
def test_a_gpu_that_no_kernel_serves(gpu, attributes):
  assert gpu(**attributes) is None
  chosen = plan.make_plan(SMALL, device.current_device())
  assert (chosen.kernel, chosen.source) == ("xla", "fallback")
  assert "compute capability 9.0 (Hopper)" in chosen.reason
  a = jnp.ones((24, 40), jnp.bfloat16)
  np.testing.assert_array_equal(jaxgemm.matmul(a, a.T), 40.0)
  with pytest.raises(ValueError, match="'persistent' cannot run: .*Hopper"):
    jaxgemm.matmul(a, a.T, implementation="persistent")


@pytest.mark.parametrize(
    ("attributes", "num_sms"),
    [(dict(device_kind="NVIDIA GH200 144G HBM3e", core_count=132), 132),
     (dict(device_kind="NVIDIA H200 MIG 1g.18gb", core_count=16), 16),
     (dict(device_kind="NVIDIA H20", core_count=78), 78),
     (dict(device_kind="NVIDIA H30", core_count=None), 132)],
    ids=lambda value: value["device_kind"] if isinstance(value, dict) else None,
)
def test_a_hopper_gpu_of_another_name(gpu, attributes, num_sms):
  """It is planned for with its own number of multiprocessors, and has its own table."""
  found = gpu(compute_capability="9.0", **attributes)
  assert found.num_sms == num_sms and device.supported(found)
  assert user_table.path(found.kind) != user_table.path(H200.kind)
  for size in ((24, 16, 40), (64, 64, 65536), (4096, 4096, 4096), (8, 50257, 768)):
    listed = heuristics.candidates(Problem(*size), found)
    assert listed
    for candidate in listed:
      cluster = getattr(candidate.config, "cluster", 1)
      assert candidate.kernel == "xla" or found.ctas_at_once(cluster) >= cluster


def test_a_part_of_a_gpu_has_a_part_of_the_memory(gpu):
  whole = device.known_device("NVIDIA H100 80GB HBM3")
  kind = f"{whole.kind} MIG 1g.10gb"
  found = gpu(compute_capability="9.0", device_kind=kind, core_count=16)
  assert found.bandwidth_tbps == pytest.approx(whole.bandwidth_tbps * 16 / 132)
  assert found.tflops("bfloat16") == pytest.approx(whole.tflops("bfloat16") * 16 / 132)
  pcie = gpu(compute_capability="9.0", device_kind="NVIDIA H100 PCIe", core_count=114)
  assert pcie.num_sms == 114 and pcie.bandwidth_tbps < whole.bandwidth_tbps


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA L4"])
def test_a_target_that_is_no_hopper(kind):
  a = jnp.ones((24, 40), jnp.bfloat16)
  with jaxgemm.target(kind):
    with pytest.raises(ValueError, match=f"'blocked' cannot run: .*Hopper.*{kind} has 8"):
      jaxgemm.matmul(a, a.T, implementation="blocked")
    assert jaxgemm.explain(a, a.T).kernel in ("triton", "xla")
    np.testing.assert_array_equal(jaxgemm.matmul(a, a.T), 40.0)


def test_too_little_shared_memory():
  """A config that is named gets an error; what is planned fits."""
  a = jnp.ones((512, 512), jnp.bfloat16)
  config = PipelinedConfig(num_stages=8)
  with jaxgemm.target("NVIDIA H200"):
    message = "'pipelined' cannot serve 512x512x512 .* bytes of shared memory exceed the"
    with pytest.raises(ValueError, match=message):
      jaxgemm.matmul(a, a, config=config)
  for size in ((512, 512, 512), (4096, 4096, 4096), (64, 64, 65536)):
    for problem in (Problem(*size), Problem(*size, out_dtype="float32")):
      chosen = plan.make_plan(problem, H200)
      needed = KERNELS[chosen.kernel].smem_bytes(problem, chosen.config)
      assert needed <= H200.smem_bytes


def test_out_of_memory_is_a_failure_with_its_name(monkeypatch):
  """Of one problem that is tuned: those after it are measured."""
  def no_room(problem):
    def make_set(key):
      raise MemoryError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    compiled = types.SimpleNamespace(compile=lambda: make_set)
    return types.SimpleNamespace(lower=lambda key: compiled)

  make_inputs = measure.make_inputs
  monkeypatch.setattr(
      measure, "make_inputs",
      lambda problem: (no_room if problem == SMALL else make_inputs)(problem),
  )
  jobs = [
      measure.Job(problem, (measure.Choice("xla", None),))
      for problem in (SMALL, others(1)[0])
  ]
  timer = lambda variants, sets, repeats: {name: [1.0] for name in variants}
  (failed,), (measured,) = measure.measure(jobs, H200, timer=timer)
  assert failed.failure == (
      "MemoryError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
  )
  assert measured.times_us == (1.0,) and measured.failure is None


def test_emulated_clusters_have_threads(monkeypatch):
  """On two cores they waited for ever, now and then, for CTAs that had none."""
  monkeypatch.delenv("PJRT_NPROC", raising=False)
  jaxgemm.emulate()
  assert os.environ["PJRT_NPROC"] == "32"
  monkeypatch.setenv("PJRT_NPROC", "12")
  jaxgemm.emulate()
  assert os.environ["PJRT_NPROC"] == "12"

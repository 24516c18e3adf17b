"""The user's table: where it lies, what spoils it, and who writes it at once."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys

import filelock
import jax
import platformdirs
import pytest

from jaxgemm import device, plan, table, user_table
from jaxgemm.user_table import TableWarning
import pallas_kernels
from pallas_kernels.configs import BlockedConfig, PersistentConfig
from pallas_kernels.problem import Epilogue, Problem

ROOT = Path(__file__).parent.parent
H200 = device.known_device("NVIDIA H200")
SQUARE = Problem(4096, 4096, 4096)
EVIDENCE = {
    "time_us": 150.0, "xla_time_us": 172.0, "jax": jax.__version__,
    "date": "2026-11-20", "command": "a test",
}


def make_row(problem=SQUARE, kernel="blocked", config=None, **evidence) -> table.Row:
  if config is None and kernel != "xla":
    config = BlockedConfig()
  return table.Row(problem, kernel, config, tuple((EVIDENCE | evidence).items()))


# -- Rows and files ----------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        make_row(),
        make_row(kernel="xla"),
        make_row(
            Problem(
                65, 40, 33, batch=3, rhs_batched=False, lhs_layout="m-major",
                dtype="float16", out_dtype="float32", algorithm="f16_f32",
                epilogue=Epilogue(0.5, 2.0, "bfloat16"),
            ),
            "persistent", PersistentConfig(tile_n=128, num_stages=2, promote=1),
        ),
    ],
    ids=lambda row: row.kernel,
)
def test_rows_come_back_from_the_disk(folder, row):
  assert user_table.lookup(row.problem, H200) is None
  user_table.store([row], H200.kind)
  assert user_table.lookup(row.problem, H200) == row
  user_table.forget()
  assert user_table.lookup(row.problem, H200) == row


def test_the_file_names_its_device_and_versions(folder, monkeypatch):
  user_table.store([make_row()], H200.kind)
  file = user_table.path(H200.kind)
  assert file.parent == folder and file.name == (
      f"nvidia_h200-jax{jax.__version__}-kernels{pallas_kernels.KERNEL_VERSION}.json"
  )
  content = json.loads(file.read_text())
  assert content["device"] == H200.kind and content["jax"] == jax.__version__
  assert content["kernels"] == pallas_kernels.KERNEL_VERSION
  # Another version of the kernels or of JAX, and another device, have other files.
  for owner, name in ((user_table, "KERNEL_VERSION"), (jax, "__version__")):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, "other")
      user_table.forget()
      assert user_table.lookup(SQUARE, H200) is None
  user_table.forget()
  other = dataclasses.replace(H200, kind="NVIDIA H100 80GB HBM3")
  assert user_table.lookup(SQUARE, other) is None
  assert user_table.lookup(SQUARE, H200) is not None


def test_a_new_row_replaces_the_one_of_its_problem(folder):
  other = dataclasses.replace(SQUARE, m=8)
  user_table.store([make_row(), make_row(other)], H200.kind)
  user_table.store([make_row(kernel="xla")], H200.kind)
  user_table.forget()
  assert user_table.lookup(SQUARE, H200).kernel == "xla"
  assert user_table.lookup(other, H200).kernel == "blocked"


def test_the_folder(monkeypatch):
  monkeypatch.delenv(user_table.ENVIRONMENT)
  cache = platformdirs.user_cache_path("jaxgemm", appauthor=False)
  assert user_table.path(H200.kind).parent == cache
  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, "platformdirs", None)  # As if it were not installed.
    assert user_table.path(H200.kind) is None
  monkeypatch.setenv(user_table.ENVIRONMENT, "~/plans")
  assert user_table.path(H200.kind).parent == Path.home() / "plans"


@pytest.mark.parametrize("cache", [RuntimeError("no home"), Path("~/.cache/jaxgemm")])
def test_a_user_without_a_home(monkeypatch, cache):
  """As in a container that runs under a number: there is one warning, and no table."""
  def user_cache_path(*args, **kwargs):
    if isinstance(cache, Exception):
      raise cache
    return cache

  monkeypatch.delenv(user_table.ENVIRONMENT)
  monkeypatch.setattr(platformdirs, "user_cache_path", user_cache_path)
  plan.forget_tables()
  with pytest.warns(TableWarning, match="has no folder: .*(no home|HOME)") as caught:
    assert user_table.lookup(SQUARE, H200) is None
    assert plan.make_plan(SQUARE, H200).source in ("table", "heuristic")
  assert len(caught) == 1


def test_a_bad_row_leaves_the_others(folder):
  """One of a newer version, whose configs this one refuses, is named and ignored."""
  others = [dataclasses.replace(SQUARE, m=8 * i) for i in range(1, 4)]
  user_table.store([make_row(p) for p in (SQUARE, *others)], H200.kind)
  file = user_table.path(H200.kind)
  content = json.loads(file.read_text())
  content["rows"][1]["config"]["tile_n"] = 20
  content["rows"][2] = "nonsense"
  content["rows"].append(content["rows"][0])  # A row twice.
  file.write_text(json.dumps(content))
  plan.forget_tables()
  with pytest.warns(TableWarning, match=r"ignored \(3\), the first: row 1 .* tile_n=20"):
    assert user_table.lookup(SQUARE, H200) == make_row()
  assert user_table.lookup(others[0], H200) is None
  assert user_table.lookup(others[2], H200) == make_row(others[2])


def test_an_empty_variable_means_no_table(monkeypatch):
  monkeypatch.setenv(user_table.ENVIRONMENT, "")
  plan.forget_tables()
  assert user_table.lookup(SQUARE, H200) is None
  with pytest.warns(TableWarning, match="no folder: see JAXGEMM_CACHE_DIR"):
    user_table.store([make_row()], H200.kind)
  assert user_table.lookup(SQUARE, H200) == make_row()  # In this process alone.
  plan.forget_tables()
  assert user_table.lookup(SQUARE, H200) is None


def test_reading_needs_no_package_of_the_extra(folder, monkeypatch):
  user_table.store([make_row()], H200.kind)
  user_table.forget()
  for name in ("filelock", "platformdirs", "tqdm"):
    monkeypatch.setitem(sys.modules, name, None)
  assert user_table.lookup(SQUARE, H200) == make_row()


# -- The plan ----------------------------------------------------------------------


def test_the_order_of_the_plan(folder, monkeypatch):
  heuristic = plan.make_plan(SQUARE, H200)
  assert heuristic.source == "heuristic"
  shipped = make_row(kernel="persistent", config=PersistentConfig(tile_n=128))
  monkeypatch.setattr(table, "_load", lambda kind: {SQUARE: shipped})
  plan.forget_tables()
  assert plan.make_plan(SQUARE, H200).source == "table"
  user_table.store([make_row(time_us=123.0)], H200.kind)
  plan.forget_tables()
  chosen = plan.make_plan(SQUARE, H200)
  assert (chosen.kernel, chosen.config) == ("blocked", BlockedConfig())
  assert chosen.source == "user table" and "123.0 us" in chosen.reason
  assert plan.make_plan(SQUARE, H200, implementation="xla").source == "override"
  # A kernel that is named gets the config that was measured for it, in either table.
  named = plan.make_plan(SQUARE, H200, implementation="persistent")
  assert named.source == "override" and named.config == shipped.config
  user_table.store([make_row(kernel="xla")], H200.kind)
  plan.forget_tables()
  assert plan.make_plan(SQUARE, H200).kernel == "xla"


def test_a_table_is_read_once(folder):
  user_table.store([make_row()], H200.kind)
  plan.forget_tables()
  assert plan.make_plan(SQUARE, H200).source == "user table"
  user_table.path(H200.kind).unlink()
  plan.make_plan.cache_clear()
  assert plan.make_plan(SQUARE, H200).source == "user table"
  plan.forget_tables()
  assert plan.make_plan(SQUARE, H200).source == "heuristic"


# -- What spoils a table -----------------------------------------------------------

GOOD = user_table._header(H200.kind) | {"rows": [table.as_json(make_row())]}
GOOD_ROW = GOOD["rows"][0]
SPOILT = {
    "empty": "",
    "truncated": json.dumps(GOOD)[:-40],
    "binary": b"\x80\x81\xff\x00",
    "another type": "[1, 2]",
    "null": "null",
    "nested": "[" * 100_000,
    "another device": json.dumps(GOOD | {"device": "NVIDIA B200"}),
    "another JAX": json.dumps(GOOD | {"jax": "0.1.0"}),
    "other kernels": json.dumps(GOOD | {"kernels": -1}),
    "no version": json.dumps({"device": H200.kind, "rows": []}),
    "no rows": json.dumps(GOOD | {"rows": None}),
    "a row of no kernel": json.dumps(GOOD | {"rows": [GOOD_ROW | {"kernel": "fast"}]}),
    "a tile of no size": json.dumps(
        GOOD | {"rows": [GOOD_ROW | {"config": {"tile_m": 0}}]}
    ),
    "a float for a size": json.dumps(
        GOOD | {"rows": [GOOD_ROW | {"config": {"tile_m": 128.0}}]}
    ),
    "a list for a size": json.dumps(
        GOOD | {"rows": [GOOD_ROW | {"problem": {"m": [1], "n": 1, "k": 1}}]}
    ),
}


@pytest.mark.parametrize("content", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_table_is_ignored_with_one_warning(folder, content):
  file = user_table.path(H200.kind)
  folder.mkdir()
  file.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.warns(TableWarning, match="nvidia_h200.* ignored") as caught:
    assert plan.make_plan(SQUARE, H200).source == "heuristic"
    assert plan.make_plan(dataclasses.replace(SQUARE, m=8), H200).kernel
    # The next row that is stored heals it, without another word.
    user_table.store([make_row()], H200.kind)
  assert len(caught) == 1
  plan.forget_tables()
  assert plan.make_plan(SQUARE, H200).source == "user table"


def test_an_unreadable_table_is_ignored(folder, monkeypatch):
  user_table.store([make_row()], H200.kind)

  def refuse(*args, **kwargs):
    raise PermissionError("not yours")

  plan.forget_tables()
  monkeypatch.setattr(Path, "read_text", refuse)
  with pytest.warns(TableWarning, match="not yours") as caught:
    assert plan.make_plan(SQUARE, H200).source == "heuristic"
  assert len(caught) == 1


@pytest.mark.parametrize("how", ["replace", "lock", "folder", "no locks"])
def test_a_table_that_cannot_be_written(folder, monkeypatch, how):
  """It is named once; its rows hold in this process."""
  user_table.store([make_row()], H200.kind)
  kept = user_table.path(H200.kind).read_text()

  def refuse(*args, **kwargs):
    raise NotImplementedError("no flock") if how == "no locks" else OSError("read-only")

  if how == "replace":
    monkeypatch.setattr(os, "replace", refuse)
  elif how == "folder":
    monkeypatch.setenv(user_table.ENVIRONMENT, str(user_table.path(H200.kind)))
  else:
    monkeypatch.setattr(filelock, "FileLock", refuse)
  others = [dataclasses.replace(SQUARE, m=m) for m in (8, 16)]
  with pytest.warns(TableWarning, match="hold in this process alone") as caught:
    for other in others:
      user_table.store([make_row(other)], H200.kind)
  assert len(caught) == 1
  for problem in (SQUARE, *others):
    assert user_table.lookup(problem, H200) is not None
  monkeypatch.setenv(user_table.ENVIRONMENT, str(folder))
  assert user_table.path(H200.kind).read_text() == kept
  assert {path.suffix for path in folder.iterdir()} <= {".json", ".lock"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes all")
def test_a_read_only_folder(folder):
  user_table.store([make_row()], H200.kind)
  folder.chmod(0o500)
  try:
    plan.forget_tables()
    assert plan.make_plan(SQUARE, H200).source == "user table"
    with pytest.warns(TableWarning, match="cannot be written"):
      user_table.store([make_row(kernel="xla")], H200.kind)
  finally:
    folder.chmod(0o700)


def test_a_write_that_is_cut_short_leaves_the_table_as_it_was(folder, monkeypatch):
  user_table.store([make_row()], H200.kind)
  kept = user_table.path(H200.kind).read_text()

  def die(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
      user_table.store([make_row(kernel="xla")], H200.kind)
  assert user_table.path(H200.kind).read_text() == kept
  assert not list(folder.glob("*.json.?*[!k]"))  # Nothing but the lock beside it.
  user_table.store([make_row(kernel="xla")], H200.kind)  # The lock is free again.


# -- Several processes -------------------------------------------------------------

_WRITER = """
import dataclasses, sys
from jaxgemm import user_table
from tests.test_user_table import H200, make_row, SQUARE
for i in range(8):
  problem = dataclasses.replace(SQUARE, m=int(sys.argv[1]), n=8 + i)
  user_table.store([make_row(problem)], H200.kind)
"""


@pytest.mark.slow
def test_writers_at_once_lose_nothing(folder):
  """Eight processes store eight rows each; every state on the disk is a whole table."""
  writers = [
      subprocess.Popen(
          [sys.executable, "-W", "error", "-c", _WRITER, str(m)], cwd=ROOT,
          env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
      )
      for m in range(1, 9)
  ]
  file = user_table.path(H200.kind)
  while any(writer.poll() is None for writer in writers):
    if file.exists():
      table.parse(json.loads(file.read_text()), H200.kind)
  assert all(writer.returncode == 0 for writer in writers)
  for m in range(1, 9):
    for i in range(8):
      problem = dataclasses.replace(SQUARE, m=m, n=8 + i)
      assert user_table.lookup(problem, H200) is not None, (m, i)

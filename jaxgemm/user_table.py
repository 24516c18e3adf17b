"""The user's own measured plans: what jaxgemm.autotune stores, and every plan reads.

One JSON file for each kind of device, version of JAX and version of the kernels:

  {"device": "NVIDIA H200", "jax": "0.11.2", "kernels": 1, "rows": [...]}

with rows as in jaxgemm/table.py. It lies in the folder $JAXGEMM_CACHE_DIR, or in the
platform's cache folder for jaxgemm; with JAXGEMM_CACHE_DIR set to nothing there is
no such table. It is a cache: whatever is wrong with it, or with some of its rows, is
ignored with one warning, and the next row that is stored replaces it. What cannot be read
at all is left as it is. Rows that could not be written are written with the next that are
stored.
"""

from __future__ import annotations

from collections.abc import Iterable
import glob
import json
import os
from pathlib import Path
import tempfile
import threading
import warnings

import jax

from jaxgemm import table
from jaxgemm.device import Device
from jaxgemm.table import Row
from pallas_kernels import KERNEL_VERSION
from pallas_kernels.problem import Problem

ENVIRONMENT = "JAXGEMM_CACHE_DIR"
_LOCK_TIMEOUT_S = 60.0
_UNFINISHED = ".tmp"

Rows = dict[Problem, Row]

_lock = threading.RLock()
_loaded: dict[str, Rows] = {}  # By kind of device.
_unwritten: dict[str, Rows] = {}
_warned: set[Path | None] = set()
_stuck: set[Path] = set()  # Whose locks were waited for in vain.


class TableWarning(UserWarning):
  """The user's table of measured plans cannot be read or written."""


def lookup(problem: Problem, device: Device) -> Row | None:
  """The user's measured plan of this problem on this device, or None."""
  rows = _loaded.get(device.kind)
  return (_load(device.kind) if rows is None else rows).get(problem)


def path(kind: str) -> Path | None:
  """The table of a device for these versions; None where there is no folder for it."""
  folder = _folder()
  if folder is None:
    return None
  stem = table.file_name(kind).removesuffix(".json").replace("/", "_")
  return folder / f"{stem}-jax{jax.__version__}-kernels{KERNEL_VERSION}.json"


def store(rows: Iterable[Row], kind: str) -> None:
  """Merges rows into the table of a device, on the disk and in this process.

  What other processes have stored meanwhile is kept. Where the file cannot be
  written, a TableWarning says so, and the rows hold in this process alone, until a later
  call can write them.
  """
  with _lock:
    rows = _unwritten.get(kind, {}) | {row.problem: row for row in rows}
    _unwritten[kind] = rows
    file = path(kind)
    try:
      merged = _merge(file, kind, rows)
      del _unwritten[kind]
    except (OSError, NotImplementedError) as error:  # The latter: no file locks here.
      _warn(file, f"cannot be written, and its plans hold in this process alone: {error}")
      merged = _load(kind) | rows
    _loaded[kind] = merged


def forget() -> None:
  """Makes the next lookup read the tables anew."""
  with _lock:
    _loaded.clear()
    _unwritten.clear()
    _warned.clear()
    _stuck.clear()


def _folder() -> Path | None:
  value = os.environ.get(ENVIRONMENT)
  if value == "":
    return None
  try:
    if value is not None:
      return Path(value).expanduser()
    import platformdirs

    folder = platformdirs.user_cache_path("jaxgemm", appauthor=False)
    if not folder.is_absolute():  # What some versions make of no home.
      raise RuntimeError(f"{folder} is no folder: HOME is not set")
    return folder
  except ImportError:  # It comes with the extra that also brings the tuner.
    return None
  except RuntimeError as error:  # "~nobody/plans", or a user without a home.
    _warn(None, f"has no folder: {error}")
    return None


def _load(kind: str) -> Rows:
  """The rows of a device, from the disk if they have not been read yet."""
  with _lock:  # Else two threads would both read, and both warn.
    if kind not in _loaded:
      file = path(kind)
      # Should warnings be errors, the table is still read and named once only.
      _loaded[kind] = {}
      if file is not None:
        try:
          _loaded[kind] = _read(file, kind)
        except OSError as error:
          _warn(file, f"cannot be read: {type(error).__name__}: {error}")
    return _loaded[kind]


def _read(file: Path, kind: str) -> Rows:
  """The rows of a file: none if there is no file, or with a warning, if it is bad.

  Raises:
    OSError: the file cannot be read, and may well be good.
  """
  try:
    content = json.loads(file.read_text(encoding="utf-8"))
    for name, value in _header(kind).items():
      if content[name] != value:
        raise ValueError(f"{name} is {content[name]!r}, not {value!r}")
    bad: list[str] = []
    rows = {row.problem: row for row in table.parse(content, kind, bad)}
    if bad:  # Perhaps of a newer version of ours.
      _warn(file, f"has rows that are ignored ({len(bad)}), the first: {bad[0]}")
    return rows
  except FileNotFoundError:
    return {}
  except OSError:
    raise
  # A file that anyone may have written fails in ways that no list names, and a
  # product must not fail with it.
  except Exception as error:
    _warn(file, f"is ignored: {type(error).__name__}: {error}")
    return {}


def _header(kind: str) -> dict[str, object]:
  return {"device": kind, "jax": jax.__version__, "kernels": KERNEL_VERSION}


def _warn(file: Path | None, what: str) -> None:
  if file not in _warned:
    _warned.add(file)
    name = "jaxgemm's table" if file is None else f"jaxgemm's table {file}"
    if value := os.environ.get(ENVIRONMENT):
      name = f"{name} ({ENVIRONMENT}={value!r})"
    warnings.warn(f"{name} {what}", TableWarning, stacklevel=2)


def _merge(file: Path | None, kind: str, rows: Rows) -> Rows:
  """The rows of the file and these, written back; raises OSError."""
  import filelock  # The extra `autotune` brings it: reading needs no lock.

  if file is None:
    raise OSError(f"it has no folder: see {ENVIRONMENT}")
  file.parent.mkdir(parents=True, exist_ok=True)
  # Once is enough to wait in vain: a tuner stores row after row.
  lock = filelock.FileLock(
      f"{file}.lock", timeout=0.0 if file in _stuck else _LOCK_TIMEOUT_S
  )
  try:
    lock.acquire()
  except filelock.Timeout:
    _stuck.add(file)
    raise
  try:
    _stuck.discard(file)
    for leftover in file.parent.glob(f"{glob.escape(file.name)}.*{_UNFINISHED}"):
      leftover.unlink(missing_ok=True)  # A killed process's: who has the lock writes.
    merged = _read(file, kind) | rows
    content = _header(kind) | {"rows": [table.as_json(row) for row in merged.values()]}
    _replace(file, json.dumps(content, indent=1) + "\n")
  finally:
    lock.release()
  return merged


def _replace(file: Path, text: str) -> None:
  """Writes a file so that no reader ever sees a part of it."""
  descriptor, name = tempfile.mkstemp(_UNFINISHED, f"{file.name}.", file.parent)
  try:
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
      stream.write(text)
      stream.flush()
      os.fsync(stream.fileno())  # Else a crash may leave the new name without its text.
    os.replace(name, file)
  except BaseException:
    os.unlink(name)
    raise

"""Measured plans: one JSON file a device in tables/, each row with its evidence.

  {"device": "NVIDIA H200",
   "rows": [{"problem": {"m": 4096, "n": 4096, "k": 4096},
             "kernel": "persistent",
             "config": {"tile_m": 128, "tile_n": 256},
             "evidence": {"time_us": 171.0, "xla_time_us": 172.9,
                          "jax": "0.11.2", "date": "2026-11-20",
                          "command": "..."}}]}

`problem` holds the fields of a Problem and `config` those of the kernel's config;
what is left out has the class's default. A row of a kernel also answers problems that
are `alike`. Kernel "xla" records that no kernel of ours was faster; its config is null,
and it answers exactly its problem.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import numbers
import typing
from typing import Any, Literal

from jaxgemm.device import Device
from pallas_kernels import ALL_KERNELS
from pallas_kernels.configs import Config
from pallas_kernels.problem import Epilogue, Problem

EVIDENCE = ("time_us", "xla_time_us", "jax", "date", "command")
FAILURES = "failures"  # More evidence: why no kernel could be measured.
_ROWS = (1, 2, 4, 8, 16, 32, 64)  # Of lhs, that tables have: tokens to be decoded.
_FEWEST = 16  # Columns of the narrowest tile of the transposed product.


@dataclasses.dataclass(frozen=True)
class Row:
  """One measured plan."""

  problem: Problem
  kernel: str
  config: Config | None
  evidence: tuple[tuple[str, Any], ...]

  def reason(self, problem: Problem) -> str:
    """Why the row answers `problem`, in words."""
    evidence = dict(self.evidence)
    if FAILURES in evidence:
      return f"{evidence[FAILURES]} ({evidence['date']}, JAX {evidence['jax']})"
    rows = self.problem.m
    return (
        f"measured {evidence['time_us']} us, XLA {evidence['xla_time_us']} us"
        f" ({evidence['date']}, JAX {evidence['jax']})"
        f"{'' if rows == problem.m else f', with m={rows}'}"
    )


def alike(problem: Problem) -> tuple[Problem, ...]:
  """Problems whose measured kernels serve this one as well, the nearest first.

  The product with its c, then alone. Few rows of lhs take as long as the next power of
  two, or as any number that the narrowest tile holds: rhs takes the time. Of 13 products
  (NN) of 5, 11, 24 and 48 rows such plans took 2.8% less on an H200 than what the
  heuristics chose, by geometric mean; 10% less at best, 2% more at worst. Products
  in groups of rows have but their own, and sums of products those of one product of as
  long a k.
  """
  if problem.grouped:
    return (problem,)
  problem = dataclasses.replace(problem, terms=1)
  more = [rows for rows in _ROWS if rows >= problem.m]
  more = [rows for rows in more if rows <= _FEWEST] or more[:1]
  found = [problem.unfused, problem.alone]
  found += [dataclasses.replace(problem.alone, m=rows) for rows in more]
  return tuple(dict.fromkeys(found))


def lookup(problem: Problem, device: Device) -> Row | None:
  """The measured plan of this problem on this device, or None."""
  return _load(device.kind).get(problem)


def file_name(kind: str) -> str:
  """Name of the file in tables/ that holds the plans of a device."""
  return kind.lower().replace(" ", "_") + ".json"


def as_json(row: Row) -> dict[str, Any]:
  """What `parse` reads back as the same row: every field, defaults included."""
  return {
      "problem": dataclasses.asdict(row.problem),
      "kernel": row.kernel,
      "config": None if row.config is None else dataclasses.asdict(row.config),
      "evidence": dict(row.evidence),
  }


@functools.cache
def _load(kind: str) -> dict[Problem, Row]:
  path = importlib.resources.files("jaxgemm") / "tables" / file_name(kind)
  if not path.is_file():
    return {}
  rows = parse(json.loads(path.read_text(encoding="utf-8")), kind)
  return {row.problem: row for row in rows}


def parse(
    table: dict[str, Any], kind: str, bad: list[str] | None = None
) -> list[Row]:
  """The rows of a table as read from its file.

  Args:
    table: what the file holds.
    kind: the device whose table it must be.
    bad: gets a message for each bad row, in place of an error: one that is malformed,
      that repeats a problem, or whose kernel cannot serve its problem.

  Raises:
    ValueError: the table is another device's, or a row is bad; the message names it.
  """
  if table.get("device") != kind:
    raise ValueError(f"table of {table.get('device')!r} where {kind!r} was wanted")
  rows: list[Row] = []
  seen: set[Problem] = set()
  for index, raw in enumerate(table["rows"]):
    try:
      row = _parse_row(raw)
      if row.problem in seen:
        raise ValueError(f"repeats {row.problem}")
    except Exception as error:  # What anyone may have written fails in any way.
      message = f"row {index} of the table of {kind}: {error}"
      if bad is None:
        raise ValueError(message) from error
      bad.append(message)
      continue
    seen.add(row.problem)
    rows.append(row)
  return rows


def _parse_row(raw: dict[str, Any]) -> Row:
  if set(raw) != {"problem", "kernel", "config", "evidence"}:
    raise ValueError(f"the fields are {sorted(raw)}")
  missing = [name for name in EVIDENCE if name not in raw["evidence"]]
  if missing:
    raise ValueError(f"the evidence lacks {missing}")
  fields = dict(raw["problem"])
  epilogue = Epilogue(**fields.pop("epilogue", {}))
  problem = Problem(**fields, epilogue=epilogue)
  check_types(problem)
  config = None
  if raw["kernel"] == "xla":
    if raw["config"] is not None:
      raise ValueError("XLA takes no config")
  elif raw["kernel"] not in ALL_KERNELS:
    raise ValueError(f"unknown kernel {raw['kernel']!r}")
  else:
    kernel = ALL_KERNELS[raw["kernel"]]
    config = kernel.Config(**raw["config"])
    check_types(config)
    reason = kernel.supports(problem, config)
    if reason is not None:
      raise ValueError(reason)
  return Row(problem, raw["kernel"], config, tuple(raw["evidence"].items()))


def check_types(values: Problem | Config) -> None:
  """Raises TypeError, with the field's name, where a value is not what its type says.

  A size of 128.0 equals 128, and would pass until a kernel is built with it.
  """
  for name, wanted in _types(type(values)).items():
    value = getattr(values, name)
    if wanted is int:
      fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    elif typing.get_origin(wanted) is Literal:
      fits = isinstance(value, str) and value in typing.get_args(wanted)
      wanted = "|".join(typing.get_args(wanted))
    else:
      fits = wanted not in (bool, str) or type(value) is wanted
    if not fits:
      raise TypeError(
          f"{name} is {value!r}, which is no {getattr(wanted, '__name__', wanted)}"
      )


@functools.cache
def _types(cls: type) -> dict[str, Any]:
  return typing.get_type_hints(cls)

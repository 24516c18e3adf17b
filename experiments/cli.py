"""What the programs that run problems share: flags, the device, the rows' file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import pathlib
import sys
from typing import Protocol

from absl import app, flags, logging
import jax

from experiments import common_flags, progress, provenance, report, suites
import jaxgemm
from jaxgemm import device as device_lib
from pallas_kernels import compat
from pallas_kernels.problem import ALGORITHM_OF_DTYPE

flags.adopt_module_key_flags(common_flags)
_SUITE = flags.DEFINE_enum(
    "suite", "demo", suites.SUITES, "Named problems; see experiments/suites.py."
)
_SHAPES = flags.DEFINE_multi_string(
    "shapes",
    [],
    "A problem instead of a suite's, [batch,]m,n,k[:LAYOUTS] with layouts joined"
    " by '+'; may be repeated.",
)
_DTYPES = flags.DEFINE_list(
    "dtypes",
    None,
    "Operand dtypes. A suite keeps only its problems with one of them, a random one"
    " draws from them; --shapes run in each (default bfloat16).",
)
_LAYOUTS = flags.DEFINE_list(
    "layouts",
    None,
    "Layouts (NN, NT, TN, TT). A suite keeps only its problems with one of them, a"
    " random one draws from them; --shapes that name none run in each (default NN).",
)
_CLASSES = flags.DEFINE_list(
    "classes", None, "Classes of problems to keep; see experiments/suites.py."
)
_PRECISION = flags.DEFINE_enum(
    "precision", "default", ["default", "high", "highest"],
    "Precision of products of float32 operands, of XLA's as of ours.",
)
_PART = flags.DEFINE_string(
    "part", "1/1", "I/N: the I-th of N equal parts, for runs that must be short."
)
_DRAW = flags.DEFINE_integer("draw", 20, "Problems of --suite=random.", lower_bound=1)
_TIMING = flags.DEFINE_boolean(
    "timing", True, "Whether to time what passed the gate; a CPU never does."
)
_REPEATS = flags.DEFINE_integer(
    "repeats",
    None,
    "Timed calls of each program (default 20, 5 in a sweep).",
    lower_bound=1,
)
_NAME = flags.DEFINE_string(
    "name", None, "NAME of the files; by default it names the suite, or 'shapes'."
)

EMULATED_DEVICE = "NVIDIA H200"
# Emulation takes about a second for 256^3; beyond this a problem takes minutes.
_EMULATED_FLOPS = 2 * 1024**3
_RANDOM_LARGEST = {"gpu": 8192, "cpu": 256}


def member_check(allowed: Sequence[str]):
  """Returns a validator of a list flag; None passes, an empty list does not."""
  return lambda values: values is None or set() < set(values) <= set(allowed)


for _flag, _allowed in (
    (_DTYPES, suites.DTYPES),
    (_LAYOUTS, suites.LAYOUTS),
    (_CLASSES, suites.CLASSES),
):
  flags.register_validator(
      _flag.name, member_check(_allowed), f"must be among {', '.join(_allowed)}"
  )


@dataclasses.dataclass(frozen=True)
class Platform:
  """Where a program runs.

  Attributes:
    on_gpu: whether the kernels run on a GPU; else they are emulated on the CPU.
    device: the device to plan for, or None if it is unknown.
    name: what the rows call it.
  """

  on_gpu: bool
  device: device_lib.Device | None
  name: str

  def context(self) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which the products run."""
    return contextlib.nullcontext() if self.on_gpu else jaxgemm.emulate()


def start(
    argv: Sequence[str], without_gpu: str = "the kernels run in emulation, none is timed"
) -> Platform:
  """Returns the platform; the first call of a program's main, with its arguments.

  What happens without a GPU is printed, in the words of `without_gpu`.
  """
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  compat.give_threads()  # Before JAX starts.
  if flags.FLAGS.verbosity == logging.INFO:  # app.run's default.
    logging.set_verbosity(logging.WARNING)  # JAX informs of each absent platform.
  if jax.default_backend() == "gpu":
    return Platform(
        True, device_lib.current_device(), jax.devices()[0].device_kind
    )
  print(f"No GPU: with the plans of an {EMULATED_DEVICE}, {without_gpu}.")
  device = device_lib.known_device(EMULATED_DEVICE)
  return Platform(False, device, f"cpu (emulating {EMULATED_DEVICE})")


def cases(platform: Platform) -> tuple[str, list[suites.Case]]:
  """Returns the suite's name and the cases that the flags ask for."""
  suite, found = _selected("gpu" if platform.on_gpu else "cpu")
  found = _part(suites.select(found, classes=_CLASSES.value))
  found = [suites.at_precision(case, _PRECISION.value) for case in found]
  if not found:
    raise app.UsageError(
        "no problem is left: none has these --layouts, --dtypes and --classes, or --part"
        " is of few"
    )
  for case in found:
    if not platform.on_gpu and case.problem.flops > _EMULATED_FLOPS:
      raise app.UsageError(
          f"{case.name} is too large to emulate on a CPU: run it on a GPU, or give"
          f" smaller --shapes (at most {_EMULATED_FLOPS:.1e} operations)"
      )
  return suite, found


def _part(found: list[suites.Case]) -> list[suites.Case]:
  """Returns the part that --part asks for: every N-th case from the I-th on."""
  index, slash, count = _PART.value.partition("/")
  if slash and index.isdecimal() and count.isdecimal():
    if 1 <= int(index) <= int(count):
      return found[int(index) - 1 :: int(count)]
  raise app.UsageError(f"--part={_PART.value} is not I/N with 1 <= I <= N")


def shapes(otherwise: Sequence[str] = ()) -> list[suites.Case]:
  """Returns the cases of --shapes, or of the same texts `otherwise`."""
  try:
    return [
        case
        for shape in _SHAPES.value or otherwise
        for case in suites.parse_shape(
            shape, _LAYOUTS.value or ["NN"], _DTYPES.value or ["bfloat16"]
        )
    ]
  except ValueError as error:
    raise app.UsageError(f"--shapes: {error}") from error


def _selected(platform: str) -> tuple[str, list[suites.Case]]:
  if _SHAPES.value:
    return "shapes", shapes()
  if _SUITE.value == "demo":
    found = suites.demo_suite(platform == "gpu")
  elif _SUITE.value == "issue2":
    found = suites.issue2_suite()
  elif _SUITE.value == "full":
    found = suites.full_suite()
  elif _SUITE.value == "float32":
    found = suites.float32_suite()
  elif _SUITE.value == "neighbours":
    found = suites.neighbours_suite()
  else:
    found = suites.random_suite(
        _DRAW.value,
        common_flags.SEED.value,
        _RANDOM_LARGEST[platform],
        _LAYOUTS.value or suites.LAYOUTS,
        _DTYPES.value or tuple(ALGORITHM_OF_DTYPE),
    )
  return _SUITE.value, suites.select(found, _LAYOUTS.value, _DTYPES.value)


def repeats(platform: Platform, default: int) -> int:
  """Returns how often to time each program; 0 where nothing is timed."""
  if not (platform.on_gpu and _TIMING.value):
    return 0
  return default if _REPEATS.value is None else _REPEATS.value


def row_provenance(suite: str, platform: Platform, module: str) -> report.Provenance:
  """Returns what the rows of this run of `module` share."""
  return report.Provenance(
      suite=suite,
      device=platform.name,
      jax=jax.__version__,
      commit=provenance.commit(),
      date=provenance.date(),
      command=provenance.command(module),
  )


def output_path(default_name: str) -> pathlib.Path:
  """Returns the path of the run's files, less their suffix; makes the folder."""
  name = _NAME.value or default_name
  if pathlib.PurePath(name).name != name:
    raise app.UsageError(f"--name={name} is no name of a file in the folder --output")
  return common_flags.output_folder() / name


class _Record(Protocol):
  """A row of any file: named, and a line of JSON."""

  name: str

  def to_json(self) -> str: ...


class _Judged(Protocol):
  """A row of any file that may have failed."""

  @property
  def failed(self) -> bool: ...


def record[RowT: _Record](
    rows_of_cases: Iterable[Sequence[RowT]], num_cases: int, path: pathlib.Path
) -> list[RowT]:
  """Returns all rows; shows a bar and writes the rows of each case as they come."""
  rows: list[RowT] = []
  with (
      path.open("w", encoding="utf-8") as file,
      progress.bar(total=num_cases, unit="problem") as shown,
  ):
    for case_rows in rows_of_cases:
      rows.extend(case_rows)
      file.writelines(row.to_json() + "\n" for row in case_rows)
      file.flush()  # A run that is cut short keeps what it measured.
      shown.set_postfix_str(case_rows[0].name, refresh=False)
      shown.update()
  return rows


def conclude(rows: Sequence[_Judged], text: str, path: pathlib.Path) -> None:
  """Prints what was found and where its rows are; exits with 1 if one of them failed."""
  print(text)
  print(f"rows: {path}")
  if any(row.failed for row in rows):
    sys.exit(1)


def exit_if_failed(rows: Sequence[report.Row]) -> None:
  """Names the rows that the gate rejected and exits with 1, if there are any."""
  failed = [row for row in rows if row.failed]
  if failed:
    print(f"{len(failed)} of {len(rows)} results failed:", file=sys.stderr)
    for row in failed:
      print(f"  {row.name} under {row.implementation}: {row.plan}", file=sys.stderr)
    sys.exit(1)

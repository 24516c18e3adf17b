r"""Checks and times GEMMs: a table, JSONL and a chart.

Every result passes the gate (experiments/gate.py) before anything is timed. On a
GPU the kernels are timed (experiments/timing.py); on a CPU they run in emulation,
with the plan that an H200 would get, and nothing is timed. The exit status is 1
if any result failed.

  python -m experiments.run
  python -m experiments.run --suite=issue2 --name=burst --output=results
  python -m experiments.run --suite=random --draw=200 --seed=1 --notiming
  python -m experiments.run --shapes=4096,4096,4096:NN+TN --shapes=8,300,20,40 \
      --dtypes=bfloat16,float32 --implementations=persistent,split_k
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import pathlib
import sys

from absl import app, flags, logging
import jax
from tqdm import tqdm

from experiments import products, provenance, report, runner, suites
import jaxgemm
from jaxgemm import device as device_lib

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
    "Operand dtypes. A suite keeps only its problems with one of them; --shapes"
    " run in each (default bfloat16).",
)
_LAYOUTS = flags.DEFINE_list(
    "layouts",
    None,
    "Layouts (NN, NT, TN, TT). A suite keeps only its problems with one of them;"
    " --shapes that name none run in each (default NN).",
)
_IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations",
    list(products.IMPLEMENTATIONS),
    "What to run; XLA always runs, as the baseline.",
)
_DRAW = flags.DEFINE_integer("draw", 20, "Problems of --suite=random.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random suite and of all inputs.")
_TIMING = flags.DEFINE_boolean(
    "timing", True, "Whether to time what passed the gate; a CPU never does."
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 20, "Timed calls of each implementation.", lower_bound=1
)
_SUSTAINED = flags.DEFINE_float(
    "sustained",
    0.0,
    "Seconds of load before each problem's timing: 0 measures bursts.",
    lower_bound=0.0,
)
_OUTPUT = flags.DEFINE_string(
    "output", "results", "Folder of NAME.jsonl and NAME.png."
)
_NAME = flags.DEFINE_string(
    "name", None, "NAME of the files; by default the suite's, or 'shapes'."
)

EMULATED_DEVICE = "NVIDIA H200"
# Emulation takes about a second for 256^3; beyond this a problem takes minutes.
_EMULATED_FLOPS = 2 * 1024**3
_RANDOM_LARGEST = {"gpu": 8192, "cpu": 256}


def _member_check(allowed: Sequence[str]):
  return lambda values: values is None or set(values) <= set(allowed)


for _flag, _allowed in (
    (_DTYPES, suites.DTYPES),
    (_LAYOUTS, suites.LAYOUTS),
    (_IMPLEMENTATIONS, products.IMPLEMENTATIONS),
):
  flags.register_validator(
      _flag.name, _member_check(_allowed), f"must be among {', '.join(_allowed)}"
  )


def _cases(platform: str) -> tuple[str, list[suites.Case]]:
  """Returns the suite's name and the cases that the flags ask for."""
  if _SHAPES.value:
    try:
      cases = [
          case
          for shape in _SHAPES.value
          for case in suites.parse_shape(
              shape, _LAYOUTS.value or ["NN"], _DTYPES.value or ["bfloat16"]
          )
      ]
    except ValueError as error:
      raise app.UsageError(str(error)) from error
    return "shapes", cases
  if _SUITE.value == "demo":
    cases = suites.demo_suite(platform == "gpu")
  elif _SUITE.value == "issue2":
    cases = suites.issue2_suite()
  else:
    cases = suites.random_suite(_DRAW.value, _SEED.value, _RANDOM_LARGEST[platform])
  cases = suites.select(cases, _LAYOUTS.value, _DTYPES.value)
  if not cases:
    raise app.UsageError("no problem of the suite has these layouts and dtypes")
  return _SUITE.value, cases


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if flags.FLAGS.verbosity == logging.INFO:  # app.run's default.
    logging.set_verbosity(logging.WARNING)  # JAX informs of each absent platform.
  on_gpu = jax.default_backend() == "gpu"
  suite, cases = _cases("gpu" if on_gpu else "cpu")
  if on_gpu:
    device = device_lib.current_device()
    device_name = jax.devices()[0].device_kind
    context = contextlib.nullcontext()
  else:
    device = device_lib.known_device(EMULATED_DEVICE)
    device_name = f"cpu (emulating {EMULATED_DEVICE})"
    context = jaxgemm.emulate()
    for case in cases:
      if case.problem.flops > _EMULATED_FLOPS:
        raise app.UsageError(
            f"{case.name} is too large to emulate on a CPU: run it on a GPU, or"
            f" smaller --shapes (at most {_EMULATED_FLOPS:.1e} operations)"
        )
    print(
        f"No GPU: the kernels run in emulation with the plans of an {EMULATED_DEVICE};"
        " nothing is timed."
    )

  name = _NAME.value or suite
  output = pathlib.Path(_OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  jsonl = output / f"{name}.jsonl"
  rows_of = runner.Runner(
      implementations=["xla", *(x for x in _IMPLEMENTATIONS.value if x != "xla")],
      device=device,
      on_gpu=on_gpu,
      seed=_SEED.value,
      repeats=_REPEATS.value if on_gpu and _TIMING.value else 0,
      burn_in_s=_SUSTAINED.value,
      provenance=report.Provenance(
          suite=suite,
          device=device_name,
          jax=jax.__version__,
          commit=provenance.commit(),
          date=provenance.date(),
          command=provenance.command("experiments.run"),
      ),
  )
  rows: list[report.Row] = []
  with (
      context,
      jsonl.open("w") as file,
      tqdm(total=len(cases), unit="problem") as progress,
  ):
    for case_rows in rows_of.rows(cases):
      rows.extend(case_rows)
      file.writelines(row.to_json() + "\n" for row in case_rows)
      file.flush()  # A run that is cut short keeps what it measured.
      progress.update()
      progress.set_postfix_str(case_rows[0].name)

  timed = any(row.time_us is not None for row in rows)
  print(report.table(rows) if timed else report.check_table(rows))
  print(f"rows: {jsonl}")
  if timed:
    png = output / f"{name}.png"
    report.chart(rows, png, f"{name}: {device_name}, JAX {jax.__version__}")
    print(f"chart: {png}")
  failed = [row for row in rows if row.plan.startswith("failed: ")]
  if failed:
    print(f"{len(failed)} of {len(rows)} results failed:", file=sys.stderr)
    for row in failed:
      print(f"  {row.name} under {row.implementation}: {row.plan}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)

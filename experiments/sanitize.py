r"""compute-sanitizer's tools over one small problem of each kernel and class of configs.

  memcheck    accesses out of bounds or misaligned, of global and shared memory
  racecheck   hazards in shared memory
  initcheck   reads of global memory that nothing has written
  synccheck   barriers that are used wrongly

A run is one process of a few cases (experiments/sanitize_cases.py) that a tool watches,
and of its kernels those whose name has "jaxgemm" in it. Each array has an allocation of
its own, XLA tunes nothing, and no CUDA graph is made. The tools are bound by the host (up
to two minutes of a core for one kernel), so that --at_once runs share the GPU. Where a
tool dies, or is not done within --minutes, the case that was running and those behind it
run once more when all first runs are over: each in a run of its own, a quarter as many at
once.

Whatever a tool says of such a kernel is a finding, and so are a run that it does not
finish, and what initcheck says of other kernels, which read what ours wrote. Findings
that say nothing against a kernel are listed in experiments/sanitize_reports.py, each with
the reason; that a run ended early is explained by a second one that did not. The exit
status is 1 if there is any other finding, or a case that never began.
sanitize.jsonl has a line for each case and tool, sanitize_TOOL.log what the tool said;
while runs go on, they tell of those that are over.

  python -m experiments.sanitize
  python -m experiments.sanitize --tools=racecheck --cases=cluster
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from absl import app, flags
import tabulate

from experiments import common_flags, progress, provenance, sanitize_cases
from experiments.sanitize_reports import (
  NOT_OVER,
  OURS,
  Finding,
  explain,
  is_early,
  parse,
)

flags.adopt_module_key_flags(common_flags)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_TOOLS = flags.DEFINE_list("tools", list(TOOLS), "Tools of compute-sanitizer.")
_CASES = flags.DEFINE_string("cases", "", "Part of the names of the cases to run.")
_MINUTES = flags.DEFINE_float(
    "minutes", 60.0, "Minutes that a tool may take for the few cases of one run.",
    lower_bound=0.1,
)
_AT_ONCE = flags.DEFINE_integer(
    "at_once", None,
    "Runs at a time (default: one for each core); a quarter of that for second runs.",
    lower_bound=1,
)
flags.register_validator(
    _TOOLS.name, lambda tools: set() < set(tools) <= set(TOOLS),
    f"must be among {', '.join(TOOLS)}",
)

CASES_OF_RUN = 6  # At most: enough to pay for starting JAX, few enough to lose.
SLOWEST_FIRST = ("racecheck", "memcheck", "initcheck", "synccheck")
JSONL = "sanitize.jsonl"
_POLL_S = 0.05
_FOLDERS = ("CUDA_HOME", "CUDA_PATH")  # Of the toolkit, by environment variables.
_DEFAULT_ROOT = "/usr/local/cuda"
_MODULE = "experiments.sanitize_cases"
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cuda",
    "JAXGEMM_CACHE_DIR": "",
    # Else all arrays lie in one allocation, and none is ever out of bounds.
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
}
# Not of every version; each is given if the tool's help names it.
_OPTIONS = {
    "--show-backtrace": "no",
    # Nothing is printed of the cases behind the one that reaches it.
    "--print-limit": "100000",
    # Later cases run all the same.
    "--destroy-on-device-error": "kernel",
}
_OPTIONS_OF = {
    # XLA asks the driver for what it may not have, and copes.
    "memcheck": {"--check-tensor-ops": "yes", "--report-api-errors": "no"},
}
_TRACKS_OTHERS = "--initcheck-track-filtered-global-memory"


@dataclasses.dataclass(frozen=True)
class Run:
  """One process that a tool watches.

  Attributes:
    tool: that watches.
    cases: of the process, in their order.
    first: the run that ended early, of which this one repeats a case; None of a first.
  """

  tool: str
  cases: tuple[str, ...]
  first: Run | None = None


@dataclasses.dataclass(frozen=True)
class Row:
  """What one tool found in one case.

  Attributes:
    tool, case: which; no case for what is of none.
    ran: whether the case began: without findings it is clean, if it did.
    findings: of the case.
  """

  tool: str
  case: str | None
  ran: bool
  findings: tuple[Finding, ...]

  def to_json(self, facts: dict[str, str]) -> str:
    """Returns the row as one line of JSON."""
    return json.dumps(dataclasses.asdict(self) | facts)


_REPEATED = (
    "this run ended early; a second one of the case, alone and with fewer others at once,"
    " ended well"
)
Said = tuple[list[Finding], str]  # What came of a run: its findings, and its output.


# -- Runs --------------------------------------------------------------------------


def deal(names: Sequence[str]) -> list[tuple[str, ...]]:
  """Returns the cases of each run, dealt in turn: the slow ones lie side by side."""
  count = -(-len(names) // CASES_OF_RUN)
  return [tuple(names[first::count]) for first in range(count)]


def find_sanitizer() -> str | None:
  """Returns the path of compute-sanitizer: on PATH, or under the CUDA toolkit."""
  roots = [os.environ[name] for name in _FOLDERS if name in os.environ]
  folders = [
      str(pathlib.Path(root) / part)
      for root in [*roots, _DEFAULT_ROOT] for part in ("bin", "compute-sanitizer")
  ]
  return shutil.which("compute-sanitizer") or shutil.which(
      "compute-sanitizer", path=os.pathsep.join(folders)
  )


def command(sanitizer: str, usage: str, tool: str, names: Sequence[str]) -> list[str]:
  """Returns the command line of a tool over some cases.

  `usage` is the sanitizer's help, which says what options its version has.
  """
  options = _OPTIONS | _OPTIONS_OF.get(tool, {})
  found = [x for key, value in options.items() if key in usage for x in (key, value)]
  # Without that option initcheck knows nothing of what kernels write that it ignores.
  if tool != "initcheck" or _TRACKS_OTHERS in usage:
    key = "--kernel-name" if "--kernel-name " in usage else "--kernel-regex"
    found += [key, f"kernel_substring={OURS}"]
  return [
      sanitizer, "--tool", tool, *found, sys.executable, "-m", _MODULE, *names
  ]


def watch(
    tool: str, line: Sequence[str], minutes: float, stop: threading.Event
) -> Said:
  """Returns the findings of a tool by its command line, and the output.

  It ends early, with what processes it has started, after some minutes or by `stop`.
  """
  with tempfile.TemporaryFile() as file:
    process = subprocess.Popen(
        line, cwd=pathlib.Path(__file__).parent.parent, env=os.environ | _ENVIRONMENT,
        stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
    )
    try:
      over = _wait(process.pid, time.monotonic() + 60 * minutes, stop)
    finally:
      # The tool may leave the process that it watches behind, however it ends itself.
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    file.seek(0)
    output = file.read().decode(errors="replace")
  findings = parse(tool, output)
  if not over:
    begun = _begun(output)
    findings.append(
        Finding(begun[-1] if begun else None, None, f"{NOT_OVER}{minutes:g} min")
    )
  return findings, output


def _wait(pid: int, deadline: float, stop: threading.Event) -> bool:
  """Whether a process ended in time; it remains a zombie, so that its number stays."""
  options = os.WEXITED | os.WNOHANG | os.WNOWAIT
  while os.waitid(os.P_PID, pid, options) is None:
    if time.monotonic() > deadline or stop.wait(_POLL_S):
      return False
  return True


def _begun(output: str) -> list[str]:
  """Returns the cases that began, in their order."""
  return [
      line.removeprefix(sanitize_cases.CASE)
      for line in output.splitlines() if line.startswith(sanitize_cases.CASE)
  ]


def run_all(
    lines: Mapping[Run, Sequence[str]], at_once: int, minutes: float,
    over: Callable[[Run, Said], None],
) -> None:
  """Calls `over` with each run and what came of it, as it is over.

  `lines` has the command lines of the runs; those of the slowest tools begin first.
  """
  stop = threading.Event()
  with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
    try:
      jobs = {
          pool.submit(watch, run.tool, lines[run], minutes, stop): run
          for run in sorted(lines, key=lambda run: SLOWEST_FIRST.index(run.tool))
      }
      for job in concurrent.futures.as_completed(jobs):
        over(jobs[job], job.result())
    finally:  # Else an interrupted program would wait for what is running.
      stop.set()
      pool.shutdown(cancel_futures=True)


def second_runs(said: Mapping[Run, Said]) -> list[Run]:
  """Returns the runs that repeat what first runs have lost, one for each case.

  There are none of a tool under which no case of any run began: none would now.
  """
  works = {run.tool for run, (_, output) in said.items() if _begun(output)}
  return [
      Run(run.tool, (case,), run)
      for run, found in said.items() if run.tool in works for case in _lost(run, found)
  ]


def _lost(run: Run, found: Said) -> tuple[str, ...]:
  """Returns the cases of a run that ended early, from the one that was running."""
  findings, output = found
  if not any(is_early(finding) for finding in findings):
    return ()
  return run.cases[max(len(_begun(output)) - 1, 0) :]


# -- Results -----------------------------------------------------------------------


def settle(over: Mapping[Run, Said]) -> list[Finding]:
  """Returns the findings of runs of a tool, some of which may be second ones.

  What a second run finds again counts once. If it ended well, that is the reason of the
  first one's early end.
  """
  findings = []
  for run, found in over.items():
    # The first of what was lost was running, or would have been the first to run.
    second = Run(run.tool, _lost(run, found)[:1], run)
    if second not in over:
      findings += found[0]
      continue
    again = over[second][0]
    alike = {(finding.case, finding.kernel, finding.what) for finding in again}
    reason = None if any(is_early(finding) for finding in again) else _REPEATED
    findings += [
        dataclasses.replace(finding, reason=reason) if is_early(finding) else finding
        for finding in found[0]
        if (finding.case, finding.kernel, finding.what) not in alike
    ]
  return findings


def rows_of(
    tool: str, names: Sequence[str], findings: Sequence[Finding], output: str
) -> list[Row]:
  """Returns a row for each case, and one for what is of none, if there is any."""
  begun = set(_begun(output))
  found: dict[str | None, list[Finding]] = {name: [] for name in names}
  for finding in explain(tool, findings):
    found.setdefault(finding.case, []).append(finding)
  return [
      Row(tool, case, case in begun, tuple(of_case)) for case, of_case in found.items()
  ]


def write(
    folder: pathlib.Path, said: Mapping[Run, Said | None], facts: dict[str, str]
) -> list[Row]:
  """Writes the files of what was found and said so far; returns the rows.

  `said` has the runs in the order of their cases, second ones behind the first, and None
  for one that is not over.
  """
  rows = []
  for tool in dict.fromkeys(run.tool for run in said):
    over = {run: found for run, found in said.items() if run.tool == tool and found}
    output = "".join(  # The last line of a run that was ended may lack its end.
        text if not text or text.endswith("\n") else f"{text}\n"
        for _, text in over.values()
    )
    (folder / f"sanitize_{tool}.log").write_text(output, encoding="utf-8")
    cases = {case for run in over for case in run.cases}
    rows += rows_of(
        tool, [name for name in sanitize_cases.CASES if name in cases],
        settle(over), output,
    )
  (folder / JSONL).write_text(
      "".join(row.to_json(facts) + "\n" for row in rows), encoding="utf-8"
  )
  return rows


def table(rows: Sequence[Row]) -> str:
  """Returns how often each tool has found anything in each case that ran.

  What is explained is counted apart.
  """
  tools = list(dict.fromkeys(row.tool for row in rows))
  cells = {(row.case, row.tool): _cell(row) for row in rows if row.ran or row.findings}
  cases = dict.fromkeys(row.case for row in rows)
  return tabulate.tabulate(
      [(case or "(none)", *(cells.get((case, tool), "-") for tool in tools))
       for case in cases],
      ["case", *tools],
  )


def _cell(row: Row) -> str:
  explained = sum(finding.count for finding in row.findings if finding.reason)
  others = sum(finding.count for finding in row.findings if not finding.reason)
  return f"{others} ({explained} explained)" if explained else str(others)


def failures(rows: Sequence[Row]) -> list[str]:
  """Returns the findings that have no reason, and which cases never began."""
  found = [
      f"{row.tool}, {row.case or 'no case'}: {finding.count} x {finding.what}"
      f" ({finding.kernel or 'the run'})"
      for row in rows for finding in row.findings if not finding.reason
  ]
  never: dict[str, list[str]] = {}
  for row in rows:
    if row.case is not None and not row.ran:
      never.setdefault(row.tool, []).append(row.case)
  return found + [
      f"{tool}, never began: {', '.join(cases)}" for tool, cases in never.items()
  ]


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  names = [name for name in sanitize_cases.CASES if _CASES.value in name]
  if not names:
    raise app.UsageError(f"--cases={_CASES.value} is part of no case's name")
  sanitizer = find_sanitizer()
  if sanitizer is None:
    sys.exit(
        "compute-sanitizer is neither on PATH nor under the CUDA toolkit, which has it:"
        f" set {' or '.join(_FOLDERS)} to that"
    )
  usage = subprocess.run(
      [sanitizer, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ).stdout
  facts = dict(
      commit=provenance.commit(), date=provenance.date(),
      command=provenance.command("experiments.sanitize"),
  )
  folder = common_flags.output_folder()
  first = [Run(tool, cases) for tool in _TOOLS.value for cases in deal(names)]
  said: dict[Run, Said | None] = dict.fromkeys(first)
  write(folder, said, facts)
  at_once = _AT_ONCE.value or os.cpu_count() or 1
  with progress.bar(total=len(first), unit="run") as shown:

    def over(run: Run, found: Said) -> None:
      said[run] = found
      write(folder, said, facts)
      shown.update()

    def finish(runs: Sequence[Run], at_once: int) -> None:
      lines = {run: command(sanitizer, usage, run.tool, run.cases) for run in runs}
      run_all(lines, at_once, _MINUTES.value, over)

    finish(first, at_once)
    second = second_runs(said)
    said |= dict.fromkeys(second)
    shown.total += len(second)
    # What ended early may have lacked the memory that so many at once take.
    finish(second, max(at_once // 4, 1))
  rows = write(folder, said, facts)
  print(table(rows))
  for reason in dict.fromkeys(
      finding.reason for row in rows for finding in row.findings if finding.reason
  ):
    print(f"explained: {reason}")
  print(f"rows: {folder / JSONL}; what the tools said: sanitize_TOOL.log beside it")
  if failed := failures(rows):
    print("\n".join(failed), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)

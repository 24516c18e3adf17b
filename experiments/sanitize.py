r"""compute-sanitizer's tools over one small problem of each kernel and class of configs.

  memcheck    accesses out of bounds or misaligned, of global and shared memory
  racecheck   hazards in shared memory
  initcheck   reads of global memory that nothing has written
  synccheck   barriers that are used wrongly

Each tool watches one process that runs all cases (experiments/sanitize_cases.py), and of
its kernels those whose name has "jaxgemm" in it. Each array has an allocation of its own,
XLA tunes nothing, and no CUDA graph is made. Whatever a tool says of such a kernel is a
finding, and so is a run that it does not finish; sanitize.jsonl has a line for each case
and tool. The exit status is 1 if there is any finding.

  python -m experiments.sanitize
  python -m experiments.sanitize --tools=racecheck --cases=cluster
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from absl import app, flags
import tabulate

from experiments import common_flags, progress, provenance, sanitize_cases

flags.adopt_module_key_flags(common_flags)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_TOOLS = flags.DEFINE_list("tools", list(TOOLS), "Tools of compute-sanitizer.")
_CASES = flags.DEFINE_string("cases", "", "Part of the names of the cases to run.")
_MINUTES = flags.DEFINE_float(
    "minutes", 60.0, "Minutes that one tool may take for all cases.", lower_bound=0.1
)
flags.register_validator(
    _TOOLS.name, lambda tools: set() < set(tools) <= set(TOOLS),
    f"must be among {', '.join(TOOLS)}",
)

OURS = "jaxgemm"  # In the names of our kernels.
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
    "--show-backtrace": "no", "--print-limit": "1000",
    # Later cases run all the same.
    "--destroy-on-device-error": "kernel",
}
_OPTIONS_OF = {
    # XLA asks the driver for what it may not have, and copes.
    "memcheck": {"--check-tensor-ops": "yes", "--report-api-errors": "no"},
}
_TRACKS_OTHERS = "--initcheck-track-filtered-global-memory"


@dataclasses.dataclass(frozen=True)
class Finding:
  """What a tool reports.

  Attributes:
    case: that ran then; None before the first.
    kernel: that it is of; None if it is of the run.
    what: in the tool's words, without threads and addresses.
    count: how often.
  """

  case: str | None
  kernel: str | None
  what: str
  count: int = 1


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


# -- Reports -----------------------------------------------------------------------

_LINE = re.compile(r"^\s*=========(?: (.*))?$")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")


def parse(output: str) -> list[Finding]:
  """Returns the findings in the output of a tool and the cases that it watched.

  A report begins with one blank behind the tool's prefix, and goes on with more. Reports
  alike in kernel and words are one finding. That there was no summary, or one of reports
  that are not here, is a finding, too.
  """
  counts: dict[tuple[str | None, str | None, str], int] = {}
  case, report, summary, reports = None, [], None, 0

  def close():
    nonlocal reports
    if report:
      kernel, what, count = _read(report)
      reports += 1
      # Other kernels are watched where a tool must know what they write.
      if kernel is None or OURS in kernel:
        counts[case, kernel, what] = counts.get((case, kernel, what), 0) + count
      report.clear()

  for line in output.splitlines():
    if line.startswith(sanitize_cases.CASE):
      close()
      case = line.removeprefix(sanitize_cases.CASE)
    elif match := _LINE.match(line):
      text = match[1] or ""
      if text.startswith("  ") and report:
        report.append(text.strip())
        continue
      close()
      if found := _SUMMARY.match(text):
        summary = (summary or 0) + int(found[1])
      elif text.strip() and text != "COMPUTE-SANITIZER" and "SUMMARY" not in text:
        report.append(text.strip())
  close()
  findings = [Finding(*key, count) for key, count in counts.items()]
  if summary is None:
    findings.append(Finding(case, None, "the tool gave no summary"))
  elif summary and not reports:
    findings.append(Finding(None, None, f"a summary of {summary}, and no report of any"))
  if sanitize_cases.DONE not in output.splitlines():
    findings.append(Finding(case, None, "the cases ended early"))
  return findings


def _read(report: Sequence[str]) -> tuple[str | None, str, int]:
  """Returns the kernel of a report, its words, and how many hazards it tells of."""
  whole = " ".join(report)
  # Behind "at", or of a function that a kernel calls, the frame that calls it.
  places = re.findall(r"(?:\bat |Device Frame: ?)([^\s(]+?)(?:\(.*?\))?\+0x", whole)
  ours = [place for place in places if OURS in place]
  kernel = (ours or places or [None])[-1]
  hazards = re.search(r"\[(\d+) hazards?\]", whole)
  what = report[0]
  if len(report) > 1 and report[1].startswith("and "):  # The other access of a race.
    what = f"{what} {report[1]}"
  what = re.sub(r"\bat [^\s(]+(\(.*?\))?\+0x[0-9a-f]+( in \S+)?", "", what)
  what = re.sub(r"\[\d+ hazards?\]|\(\d+,\d+,\d+\)|0x[0-9a-f]+", "", what)
  return kernel, " ".join(what.split()), int(hazards[1]) if hazards else 1


# -- Runs --------------------------------------------------------------------------


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


def watch(line: Sequence[str], minutes: float) -> tuple[list[Finding], str]:
  """Returns the findings of a tool's command line, and its output."""
  try:
    run = subprocess.run(
        line, cwd=pathlib.Path(__file__).parent.parent, env=os.environ | _ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        timeout=60 * minutes,
    )
  except subprocess.TimeoutExpired as error:
    output = (error.stdout or b"").decode(errors="replace")
    return [*parse(output), Finding(None, None, f"not over in {minutes:g} min")], output
  return parse(run.stdout), run.stdout


def rows_of(
    tool: str, names: Sequence[str], findings: Sequence[Finding], output: str
) -> list[Row]:
  """Returns a row for each case, and one for what is of none, if there is any."""
  lines = set(output.splitlines())
  found: dict[str | None, list[Finding]] = {name: [] for name in names}
  for finding in findings:
    found.setdefault(finding.case, []).append(finding)
  return [
      Row(tool, case, f"{sanitize_cases.CASE}{case}" in lines, tuple(of_case))
      for case, of_case in found.items()
  ]


def table(rows: Sequence[Row]) -> str:
  """Returns how often each tool has found anything in each case that ran."""
  tools = list(dict.fromkeys(row.tool for row in rows))
  counts = {
      (row.case, row.tool): sum(finding.count for finding in row.findings)
      for row in rows if row.ran or row.findings
  }
  cases = dict.fromkeys(row.case for row in rows)
  return tabulate.tabulate(
      [(case or "(none)", *(counts.get((case, tool), "-") for tool in tools))
       for case in cases],
      ["case", *tools],
  )


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
  path = folder / "sanitize.jsonl"
  rows = []
  with (
      path.open("w", encoding="utf-8") as file,
      progress.bar(total=len(_TOOLS.value), unit="tool") as shown,
  ):
    for tool in _TOOLS.value:
      findings, output = watch(command(sanitizer, usage, tool, names), _MINUTES.value)
      (folder / f"sanitize_{tool}.log").write_text(output, encoding="utf-8")
      found = rows_of(tool, names, findings, output)
      rows += found
      file.writelines(row.to_json(facts) + "\n" for row in found)
      file.flush()
      shown.update()
  print(table(rows))
  print(f"rows: {path}; what the tools said: sanitize_TOOL.log beside it")
  if findings := [(row, finding) for row in rows for finding in row.findings]:
    for row, finding in findings:
      where = finding.kernel or "the run"
      print(
          f"{row.tool}, {row.case or 'no case'}: {finding.count} x {finding.what}"
          f" ({where})",
          file=sys.stderr,
      )
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)

"""What the tools of compute-sanitizer say: reports as findings, and what explains some.

See experiments/sanitize.py, which runs the tools.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re

from experiments import sanitize_cases

OURS = "jaxgemm"  # In the names of our kernels.


@dataclasses.dataclass(frozen=True)
class Finding:
  """What a tool reports.

  Attributes:
    case: that ran then; None before the first.
    kernel: that it is of; None if it is of the run.
    what: in the tool's words, without threads and addresses.
    count: how often.
    reason: why it says nothing against the kernel; None where nobody knows one.
  """

  case: str | None
  kernel: str | None
  what: str
  count: int = 1
  reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
  """Why findings say nothing against a kernel.

  Attributes:
    tool: whose they are.
    kernel: pattern of its whole name.
    what: pattern of all their words.
    reason: why.
  """

  tool: str
  kernel: str
  what: str
  reason: str


EXPLAINED = (
    Explanation(
        "initcheck", rf"(?!.*{OURS}).+",
        r"Uninitialized __global__ memory read of size \d+ bytes",
        "a kernel of XLA's that reads what ours wrote by TMA, which initcheck does not"
        " see",
    ),
)
_DROPPED = "Warning: Error buffer overflow has been detected."
# At the end of a process, for all of its cases.
_SKIPPED = re.compile(r"\d+ errors? (?:were|was) skipped \(error buffer overflow\)")
_FULL = (
    "findings of this case that are explained fill the tool's buffer, which may hide"
    " others of this case"
)
_NO_SUMMARY = "the tool gave no summary"
_ENDED_EARLY = "the cases ended early"
NOT_OVER = "not over in "
_LINE = re.compile(r"^\s*=========(?: (.*))?$")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")
_NOT_PRINTED = "were not printed"  # In a second summary.


def parse(tool: str, output: str) -> list[Finding]:
  """Returns the findings in the output of a tool and the cases that it watched.

  A report begins with one blank behind the tool's prefix, and goes on with more. Reports
  alike in kernel and words are one finding. That there was no summary, or one of reports
  that are not here, is a finding, too. That errors were skipped belongs to the last case
  whose records were dropped.
  """
  counts: dict[tuple[str | None, str | None, str], int] = {}
  case, report, summary, reports = None, [], None, 0
  overflowed = None
  hidden: list[Finding] = []

  def close():
    nonlocal reports, overflowed
    if report:
      kernel, what, count = _read(report)
      reports += 1
      if what.startswith(_DROPPED):
        overflowed = case
      # Other kernels read what ours wrote, which is a matter for initcheck alone.
      if kernel is None or OURS in kernel or tool == "initcheck":
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
      if _NOT_PRINTED in text:
        hidden.append(Finding(None, None, text))
      elif _SKIPPED.match(text):
        hidden.append(Finding(overflowed, None, text.strip()))
      elif found := _SUMMARY.match(text):
        summary = (summary or 0) + int(found[1])
      elif text.strip() and text != "COMPUTE-SANITIZER" and "SUMMARY" not in text:
        report.append(text.strip())
  close()
  findings = [Finding(*key, count) for key, count in counts.items()] + hidden
  if summary is None:
    findings.append(Finding(case, None, _NO_SUMMARY))
  elif summary and not reports:
    findings.append(Finding(None, None, f"a summary of {summary}, and no report of any"))
  if sanitize_cases.DONE not in output.splitlines():
    findings.append(Finding(case, None, _ENDED_EARLY))
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


def explain(tool: str, findings: Sequence[Finding]) -> list[Finding]:
  """Returns the findings of a tool, each with its reason, if it has one.

  That records were dropped, or errors skipped, is explained in a case of which EXPLAINED
  has others.
  """
  cases = {finding.case for finding in findings if _reason(tool, finding)} - {None}

  def reason(finding: Finding) -> str | None:
    overflow = finding.what.startswith(_DROPPED) or _SKIPPED.match(finding.what)
    if overflow and finding.case in cases:
      return _FULL
    return finding.reason or _reason(tool, finding)

  return [dataclasses.replace(finding, reason=reason(finding)) for finding in findings]


def _reason(tool: str, finding: Finding) -> str | None:
  for one in EXPLAINED:
    if (
        tool == one.tool and re.fullmatch(one.kernel, finding.kernel or "")
        and re.fullmatch(one.what, finding.what)
    ):
      return one.reason
  return None


def is_early(finding: Finding) -> bool:
  """Whether a finding is that a run ended early; what the tool said then is another."""
  return finding.kernel is None and (
      finding.what in (_NO_SUMMARY, _ENDED_EARLY) or finding.what.startswith(NOT_OVER)
  )

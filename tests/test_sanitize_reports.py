"""What compute-sanitizer says: findings, which of them are explained, their table."""

from __future__ import annotations

import dataclasses
import json

import pytest

from experiments import sanitize
from experiments.sanitize_reports import Finding, explain, parse
from tests.sanitizer_outputs import (
  CLEAN,
  CRASHED,
  DROPPED,
  ENDED_EARLY,
  INITCHECK,
  KERNEL,
  MEMCHECK,
  NO_SUMMARY,
  NOT_PRINTED,
  RACECHECK,
  READ,
  READ_4,
  READ_BY_XLA,
  REDUCE,
  SKIPPED,
  SYNCCHECK,
  TRANSPOSE,
  WARNING,
  WRITE,
  ended,
)

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


@pytest.mark.parametrize(
    ("tool", "output", "findings"),
    [
        ("memcheck", CLEAN, []),
        ("memcheck", MEMCHECK, [
            Finding("persistent nn", KERNEL, WRITE, 2),
            Finding("halves", KERNEL, "Invalid __shared__ read of size 16 bytes"),
        ]),
        ("racecheck", RACECHECK, [Finding(
            "split_k", KERNEL,
            "Error: Race reported between Write access and Read access", 508,
        )]),
        ("synccheck", SYNCCHECK, [
            Finding(
                "direct", KERNEL, "Barrier error detected. Divergent thread(s) in warp"),
            Finding(
                "direct", None,
                "Warning: Detected overflow of tracked cuda::barrier structures."),
        ]),
        ("initcheck", INITCHECK, [
            Finding("x6", "loop_convert_fusion", READ_4), Finding("x6", KERNEL, READ_4),
        ]),
        ("memcheck", INITCHECK, [Finding("x6", KERNEL, READ_4)]),  # Of our kernel alone.
        ("memcheck", CRASHED, [
            Finding("blocked", None, "Error: process didn't terminate successfully"),
            Finding("blocked", None, "Target application returned an error"),
            Finding("blocked", None, NO_SUMMARY), Finding("blocked", None, ENDED_EARLY),
        ]),
        ("memcheck", "", [
            Finding(None, None, NO_SUMMARY), Finding(None, None, ENDED_EARLY),
        ]),
        # In a form that is not known.
        ("memcheck", CLEAN.replace("0 errors", "7 errors"), [
            Finding(None, None, "a summary of 7, and no report of any"),
        ]),
        ("memcheck", CLEAN + f"========= {NOT_PRINTED}\n", [
            Finding(None, None, NOT_PRINTED),
        ]),
        ("initcheck", ended(CLEAN, "blocked", DROPPED), [
            Finding("blocked", None, WARNING), Finding("blocked", None, SKIPPED),
        ]),
        ("initcheck", ended(INITCHECK, "x6", f"{DROPPED}case: x9\n{DROPPED}case: x3\n"), [
            Finding("x6", None, WARNING), Finding("x9", None, WARNING),
            Finding("x3", "loop_convert_fusion", READ_4), Finding("x3", KERNEL, READ_4),
            Finding("x9", None, SKIPPED),
        ]),
        ("initcheck", ended(CLEAN, "blocked", ""), [Finding(None, None, SKIPPED)]),
    ],
    ids=["clean", "memcheck", "racecheck", "synccheck", "initcheck", "of ours alone",
         "crashed", "nothing", "unknown", "not printed", "skipped", "skipped twice",
         "skipped nowhere"],
)
def test_reports_become_findings(tool, output, findings):
  assert parse(tool, output) == findings


def test_rows_and_their_table():
  rows = sanitize.rows_of(
      "memcheck", ["persistent nn", "halves", "blocked", "x3"],
      parse("memcheck", MEMCHECK), MEMCHECK,
  )
  assert [len(row.findings) for row in rows] == [1, 1, 0, 0]
  assert [row.ran for row in rows] == [True, True, True, False]
  rows += sanitize.rows_of("racecheck", ["blocked"], parse("racecheck", ""), "")
  lines = [line.split() for line in sanitize.table(rows).splitlines()]
  assert lines[0] == ["case", "memcheck", "racecheck"]
  assert lines[2:] == [
      ["persistent", "nn", "2", "-"], ["halves", "1", "-"], ["blocked", "0", "-"],
      ["x3", "-", "-"], ["(none)", "-", "2"],
  ]
  line = json.loads(rows[0].to_json({"commit": "abc"}))
  assert line["commit"] == "abc" and line["findings"][0]["what"] == WRITE


def reasons(tool: str, *findings: Finding) -> list[bool]:
  return [finding.reason is not None for finding in explain(tool, findings)]


def test_what_xla_reads_of_ours_is_explained():
  case = "split_lhs swap"
  for what in (READ, READ_4, READ.replace("8 bytes", "16 bytes")):
    assert reasons("initcheck", Finding(case, TRANSPOSE, what)) == [True]
    # Of ours, wherever that stands in the name; or of nobody known.
    for kernel in (f"the_{KERNEL}", KERNEL, None):
      assert reasons("initcheck", Finding(case, kernel, what)) == [False]
    for tool in set(sanitize.TOOLS) - {"initcheck"}:
      assert reasons(tool, Finding(case, TRANSPOSE, what)) == [False]
  assert reasons("initcheck", Finding(case, TRANSPOSE, WRITE)) == [False]


@pytest.mark.parametrize("overflow", [WARNING, SKIPPED])
def test_an_overflow_is_explained_where_others_are(overflow):
  explained = Finding("split_k", REDUCE, READ)
  for finding, wanted in (
      (Finding("split_k", None, overflow), True),
      (Finding("split_k fused", None, overflow), False),
      (Finding("split_k", None, "Warning: something else"), False),
  ):
    assert reasons("initcheck", finding, explained) == [wanted, True]
  finding = Finding("split_k", None, overflow)
  assert reasons("initcheck", finding) == [False]
  assert reasons("racecheck", finding, explained) == [False, False]
  # That the case ended early, and why that is no matter, says nothing of an overflow.
  early = Finding("split_k", None, ENDED_EARLY, reason="it ran once more")
  assert reasons("initcheck", finding, early) == [False, True]
  nowhere = [Finding(None, None, overflow), dataclasses.replace(explained, case=None)]
  assert reasons("initcheck", *nowhere) == [False, True]


def test_an_overflow_fails_no_later_case():
  """As one of 256 reports of XLA's kernel did, and its count at the end."""
  said = 256 * READ_BY_XLA + DROPPED
  output = ended(CLEAN.replace("case: b", "case: split_lhs swap\ncase: b"),
                 "split_lhs swap", said)
  names = ["split_lhs swap", "blocked", "pipelined"]
  rows = sanitize.rows_of("initcheck", names, parse("initcheck", output), output)
  assert sanitize.failures(rows) == []
  assert [sum(finding.count for finding in row.findings) for row in rows] == [258, 0, 0]
  assert "0 (258 explained)" in sanitize.table(rows)


def test_the_table_shows_apart_what_is_explained():
  case = "split_k"
  found = [Finding(case, REDUCE, READ, 256), Finding(case, None, WARNING)]
  for extra, cell in (
      ([], "0 (257 explained)"), ([Finding(case, KERNEL, READ, 3)], "3 (257 explained)"),
  ):
    rows = sanitize.rows_of("initcheck", [case], found + extra, f"case: {case}\n")
    assert cell in sanitize.table(rows)
    assert len(sanitize.failures(rows)) == len(extra)

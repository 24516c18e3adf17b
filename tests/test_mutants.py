"""The program that removes waits and arrivals from the kernels, and what it must kill."""

from __future__ import annotations

import dataclasses

from absl import app, flags
from absl.testing import flagsaver
import pytest

from experiments import mutants
from tests.kernel_cases import more

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def test_sites_are_found_and_named_apart():
  names = [site.name for site in mutants.sites()]
  assert len(names) == len(set(names)) >= 39
  assert set(mutants.SURVIVORS) <= set(names)
  for call in mutants.CALLS:
    assert any(call in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("pipelined.launch._kernel._multiply.barrier_wait", "killed by pipelined"),
        ("pipelined.launch._kernel._multiply.wgmma_wait", "survives"),
        ("cotangents.launch._kernel.compute.commit_smem", "killed by cotangents: race"),
        more("norms.Norm.hand_over.barrier_arrive", "hang"),
    ],
)
def test_verdicts(name, outcome):
  (site,) = (site for site in mutants.sites() if site.name == name)
  verdict = mutants.judge(site, patience_s=12.0 if outcome == "hang" else 25.0)
  assert outcome in verdict.outcome
  assert mutants.unexplained([verdict]) == []


def test_what_is_not_explained():
  site = next(iter(mutants.SURVIVORS))
  survived = mutants.Verdict(site, None, True, None)
  killed = dataclasses.replace(survived, killed="race", case="blocked")
  assert mutants.unexplained([survived]) == []
  assert mutants.unexplained([killed]) == [f"{site}: killed by blocked: race"]
  other = dataclasses.replace(survived, name="other", reached=False)
  assert mutants.unexplained([other]) == ["other: not run in emulation"]


def test_no_site_of_that_name():
  with flagsaver.flagsaver():
    flags.FLAGS(["program", "--sites=nothing"])
    with pytest.raises(app.UsageError, match="nothing"):
      mutants.main(["program"])

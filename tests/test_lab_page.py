"""The laboratory's page: whole, without a network, and sortable."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
import json
import os
import re
import shutil
import subprocess

from lab_cases import made_up_rows
import pytest

from experiments.lab import markdown, page, roofline, rows, tables
from experiments.lab.questions import QUESTIONS

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


@pytest.fixture(scope="module")
def answers():
  return {name: made_up_rows(name, quick=True) for name in QUESTIONS}


@pytest.fixture(scope="module")
def html(answers):
  return page.render(answers)


class _Page(HTMLParser):
  """Counts tags and remembers ids and addresses."""

  def __init__(self, text: str):
    super().__init__()
    self.tags: dict[str, int] = {}
    self.ids: list[str] = []
    self.addresses: list[str] = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags[tag] = self.tags.get(tag, 0) + 1
    for name, value in attrs:
      if name == "id":
        self.ids.append(value)
      if name in ("src", "href", "xlink:href", "srcset", "data"):
        self.addresses.append(value)


@pytest.mark.slow
def test_the_page_needs_nothing_else(html):
  found = _Page(html)
  within = [x[1:] for x in found.addresses if x.startswith("#")]
  assert within and set(within) <= set(found.ids)
  # What is drawn as pixels comes along.
  assert all(x.startswith(("#", "data:image/png;base64,")) for x in found.addresses)
  assert "@import" not in html and not re.search(r"url\((?!#)", html)
  assert len(found.ids) == len(set(found.ids))


def test_the_page_has_all_answers(html, answers):
  found = _Page(html)
  shown = [
      table for name in answers for table in QUESTIONS[name].tables(answers[name])
  ]
  figures = sum(len(QUESTIONS[name].figures(answers[name])) for name in answers)
  assert found.tags["table"] == len(shown)
  assert found.tags["svg"] == figures + 1  # And the roofline.
  for table in shown:
    assert table.title.replace("&", "&amp;") in html
  assert found.tags["script"] == 1 and "ariaSort" in html
  for name, module in QUESTIONS.items():
    assert f'<section id="{name}">' in html and module.TITLE in html
  assert "<metadata>" not in html and "#000000" not in html


def test_markdown_has_the_same_tables(answers):
  text = markdown.render(answers)
  for name in answers:
    for table in QUESTIONS[name].tables(answers[name]):
      assert f"### {table.title}" in text
    assert QUESTIONS[name].finding(answers[name]) in text


def test_only_questions_with_rows_are_shown(answers):
  text = page.render({"sgemm": answers["sgemm"]})
  assert '<section id="sgemm">' in text and '<section id="ladder">' not in text


def test_cells_are_escaped_and_empty_ones_sort_last():
  table = tables.make_table("t", [{"a": "<b>", "n": 1.23456}, {"a": "x|y", "n": None}])
  assert table.text("n", 1.23456) == "1.23" and table.text("n", None) == ""
  assert [table.is_numeric(i) for i in range(2)] == [False, True]
  with pytest.raises(ValueError, match="1 cells under 2 headers"):
    tables.Table("t", ("a", "b"), (("x",),))


def test_the_roofline_has_the_best_of_each_problem(answers):
  every = [row for found in answers.values() for row in found]
  best = roofline.best(every)
  assert len({(row.name, row.is_xla) for row in best}) == len(best)
  assert {row.name for row in best} == {row.name for row in rows.timed(every)}
  assert roofline.figures([dataclasses.replace(best[0], times_us=None)]) == []


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500, 375])
def test_the_page_in_a_browser(html, width, tmp_path):
  browser = next(filter(None, map(shutil.which, BROWSERS)), None)
  if browser is None:
    pytest.skip("needs a Chromium")
  script = """<script>
    const outside = [...document.querySelectorAll("body *")].filter(
      e => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1);
    const table = document.querySelector("#stages table");
    const column = [...table.tHead.rows[0].cells].findIndex(e => e.innerText == "us");
    const values = () => [...table.tBodies[0].rows].map(
      row => row.cells[column].dataset.value);
    const button = table.tHead.rows[0].cells[column].firstChild;
    button.click(); const up = values(); button.click();
    document.title = JSON.stringify({width: document.documentElement.scrollWidth,
      window: innerWidth, outside: outside.length, up: up, down: values()});
  </script>"""
  path = tmp_path / "lab.html"
  path.write_text(html.replace("</body>", f"{script}</body>"), encoding="utf-8")
  done = subprocess.run(
      [browser, "--headless", "--no-sandbox", "--disable-gpu",
       f"--window-size={width},900", "--dump-dom", path.as_uri()],
      capture_output=True, text=True, timeout=120, check=True,
      env=os.environ | {"HOME": str(tmp_path)},
  )
  found = json.loads(re.search("<title>(.*?)</title>", done.stdout).group(1))
  assert found["width"] <= found["window"] and found["outside"] == 0
  up = [float(x) for x in found["up"] if x]
  assert up == sorted(up) and len(set(up)) > 3
  assert [float(x) for x in found["down"] if x] == up[::-1]
  assert all(not x for x in found["up"][len(up):])

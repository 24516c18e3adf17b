"""The laboratory: one file a question, one page for all answers.

`python -m experiments.lab` asks the questions of questions.py one after another, each
in a process of its own. Each is a module with the same four functions:

  measure(lab)    yields rows, one for each variant of each problem
  tables(rows)    what was measured, as tables
  figures(rows)   the same as pictures; none of rows without times
  finding(rows)   the answer in words, computed from the rows

and a docstring that gives its Question, Expectation and Command. Its rows lie in
lab_NAME.jsonl; page.py and markdown.py make lab.html and lab.md of all such files that
there are. measuring.py is the one place that checks and times. The modules named
kernels_* hold kernels that no library needs: rungs of a ladder that a faster kernel
left behind, and ways to share out k that were weighed.
"""

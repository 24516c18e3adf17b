"""Programs that use jaxgemm from outside: the GEMM runner and a language model.

`python -m experiments.run` checks and times problems, `python -m
experiments.sweep` all candidates of the heuristics, to which `python -m
experiments.fit_heuristics` fits the cost model; `python -m experiments.determinism`
repeats products, `python -m experiments.overhead` times what precedes them; `python -m
experiments.train_lm` trains a decoder-only transformer; `python -m experiments.lab`
answers questions on one page. BUILD.md has a table of them
all. Neither jaxgemm nor pallas_kernels imports anything from here.
"""

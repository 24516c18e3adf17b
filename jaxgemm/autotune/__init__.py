"""Measuring which kernel is the fastest for the products of a program."""

from jaxgemm.autotune.tuner import Result as Result
from jaxgemm.autotune.tuner import Results as Results
from jaxgemm.autotune.tuner import autotune as autotune

"""Problems, and a clock in the place of a GPU, that the tests of the tuner share."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxgemm
from jaxgemm import device
from jaxgemm.autotune import tuner
from jaxgemm.autotune.measure import Job, Measurement
from jaxgemm.autotune.programs import Choice
from pallas_kernels.problem import Problem

ROOT = Path(__file__).parent.parent
H200 = device.known_device("NVIDIA H200")
XLA = Choice("xla", None)


def shape(*sizes, dtype="bfloat16") -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, dtype)


def loss(a, b):
  # Squared, that the gradient needs the product itself, too.
  return jnp.sum(jaxgemm.matmul(a, b).astype(jnp.float32) ** 2)


class Stopwatch:
  """Stands in for the GPU: `time_us` says how long each choice takes.

  It returns a time, several, or a string: why the choice fails.
  """

  def __init__(self, time_us):
    self.time_us = time_us
    self.jobs: list[Job] = []

  def __call__(self, jobs, where):
    for job in jobs:
      self.jobs.append(job)
      found = [self.time_us(choice) for choice in job.choices]
      yield [
          Measurement(failure=one) if isinstance(one, str)
          else Measurement(tuple(np.atleast_1d(one)))
          for one in found
      ]


def blocked_wins(choice: Choice) -> float:
  return {"blocked": 5.0, "xla": 8.0}.get(choice.kernel, 7.0)


def collected(fn, *args) -> list[Problem]:
  with jaxgemm.target("NVIDIA H200"):
    return tuner.collect(fn, *args, device=H200)


A, B = shape(64, 96), shape(96, 128)
NN = Problem(64, 128, 96)
NT = Problem(64, 96, 128, rhs_layout="k-major")  # d a = ct @ b^T
TN = Problem(96, 128, 64, lhs_layout="m-major")  # d b = a^T @ ct


def tuned(fn, *args, **options) -> tuner.Results:
  with jaxgemm.target("NVIDIA H200"):
    return jaxgemm.autotune(fn, *args, **options)


def environment() -> dict[str, str]:
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def lowered_text() -> str:
  gradient = jax.jit(jax.grad(loss, (0, 1)))
  with jaxgemm.target("NVIDIA H200"):
    return gradient.trace(A, B).lower(lowering_platforms=("cuda",)).as_text()

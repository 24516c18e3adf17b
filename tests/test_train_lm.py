"""The language model: its products, its training and its text."""

from __future__ import annotations

import collections
import dataclasses
import math

import jax
import numpy as np
from product_cases import count_primitives
import pytest

from experiments import blocks, corpus, gpt2, kernel_count, train_lm, transformer
import jaxgemm
from jaxgemm.autotune import profile

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

TINY = transformer.Config(layers=1, width=16, heads=2, vocabulary=256, sequence=16)
TRAINING = train_lm.Training(steps=3, batch=4, learning_rate=0.01, seed=0)


@pytest.fixture(scope="module")
def runs() -> list[train_lm.Run]:
  text = np.frombuffer(b"abc " * 100, np.uint8)
  return train_lm.train(
      list(train_lm.DOT_GENERALS), TINY, TRAINING, text, time_kernels=False
  )


@pytest.mark.slow
def test_training_lowers_the_loss_alike(runs):
  for one in runs:
    assert len(one.losses) == 3
    assert one.losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert one.losses[2] < one.losses[0] - 0.1
  xla, *others = runs
  for ours in others:
    np.testing.assert_allclose(ours.losses, xla.losses, rtol=1e-3)
  assert train_lm.failures(runs, on_hopper=False) == []


@pytest.mark.slow
@pytest.mark.more
def test_training_takes_turns(runs, monkeypatch):
  order = []
  train = train_lm.Trainee.train

  def recorded(self, steps):
    order.append((self._implementation, steps))
    train(self, steps)

  monkeypatch.setattr(train_lm.Trainee, "train", recorded)
  nine = dataclasses.replace(TRAINING, steps=9)
  text = np.frombuffer(b"abc " * 100, np.uint8)
  names = list(train_lm.DOT_GENERALS)
  found = train_lm.train(names, TINY, nine, text, time_kernels=False)
  blocks = [2, 2, 2, 2, 1]
  assert order == [(name, steps) for steps in blocks for name in names]
  for one in found:
    assert len(one.losses) == 9 and one.kernel_ms is None
    tokens = TRAINING.batch * TINY.sequence
    assert one.tokens_per_second == pytest.approx(1e3 * tokens / one.step_ms)
  # What a run learns does not depend on its turns.
  (alone,) = train_lm.train(["xla"], TINY, nine, text, time_kernels=False)
  assert alone.losses == found[0].losses


def test_training_times_kernels(monkeypatch):
  def kernels(run):
    run()
    return [profile.Kernel(0.0, 5e6, "one", ""), profile.Kernel(4e6, 8e6, "other", "")]

  monkeypatch.setattr(train_lm.timing.profile, "kernels", kernels)
  text = np.frombuffer(b"abc " * 100, np.uint8)
  (one,) = train_lm.train(["jaxgemm"], TINY, TRAINING, text, time_kernels=True)
  assert one.kernel_ms == 2.0 and len(one.losses) == TRAINING.steps


def test_ratio_of_runs(runs):
  timed = [
      dataclasses.replace(one, step_ms=ms)
      for one, ms in zip(runs[:2], (3.0, 2.0), strict=True)
  ]
  assert train_lm.ratio(timed, "step_ms") == 1.5
  assert train_lm.ratio(timed[:1], "step_ms") is None
  assert train_lm.ratio(timed, "kernel_ms") is None


def test_training_fails_loudly(runs):
  xla, ours, accelerated = runs
  lost = dataclasses.replace(ours, losses=[1.0, math.nan, 1.0])
  found = train_lm.failures([xla, lost], on_hopper=False)
  assert "jaxgemm: a loss is not finite" in found and "differ" in found[1]
  share = 1 + 2 * train_lm.MAX_DIFFERENCE
  worse = dataclasses.replace(ours, losses=[share * loss for loss in xla.losses])
  assert train_lm.failures([xla, worse], on_hopper=False) == [
      "the final losses differ by 2.00%"
  ]
  idle = dataclasses.replace(ours, gemms=kernel_count.GemmCount({}, {"dot": 1}))
  found = train_lm.failures([xla, idle], on_hopper=True)
  assert found == ["jaxgemm: no kernel of ours is in the compiled step"]
  found = train_lm.failures([xla, accelerated], on_hopper=True)
  assert found == ["accelerated: no kernel of ours is in the compiled step"]


def test_every_product_of_the_model_is_jaxgemms():
  """Six products in a block and the output layer, each with two in its gradient."""
  params = transformer.init(TINY, jax.random.key(0))
  tokens = np.zeros((2, 17), np.int32)
  counts = collections.Counter()
  for name, dot_general in train_lm.DOT_GENERALS.items():
    step = jax.grad(lambda p, f=dot_general: transformer.loss(p, tokens, TINY, f))
    if name == "accelerated":
      step = jaxgemm.accelerate(step)
    found = count_primitives(step, params)
    counts[name] = (found["dot_general"], found["jaxgemm"])
  assert counts == {"xla": (21, 0), "jaxgemm": (0, 21), "accelerated": (0, 21)}


def test_corpus_is_real_text_and_batches_repeat():
  text = corpus.load(100_000)
  assert text.shape == (100_000,) and b"import" in text.tobytes()
  settings = dict(steps=2, batch=3, sequence=5)
  first, same, other = (
      list(corpus.batches(text, **settings, seed=seed)) for seed in (0, 0, 1)
  )
  assert [batch.shape for batch in first] == [(3, 6)] * 2
  np.testing.assert_array_equal(first, same)
  assert not np.array_equal(first, other)


@pytest.mark.slow
def test_the_model_in_flax_learns_alike():
  """And none of its layers' products are XLA's."""
  pytest.importorskip("flax")
  from experiments import transformer_nnx

  text = np.frombuffer(b"abc " * 100, np.uint8)
  training = dataclasses.replace(TRAINING, model="nnx")
  names = list(train_lm.DOT_GENERALS)
  xla, *others = train_lm.train(names, TINY, training, text, time_kernels=False)
  for ours in others:
    np.testing.assert_allclose(ours.losses, xla.losses, rtol=1e-3)
    assert ours.losses[2] < ours.losses[0] - 0.1
  params = transformer_nnx.init(TINY, jax.random.key(0))
  tokens = np.zeros((2, TINY.sequence + 1), np.int32)
  dot_general = train_lm.DOT_GENERALS["jaxgemm"]
  step = jax.grad(lambda p: transformer_nnx.loss(p, tokens, TINY, dot_general))
  found = count_primitives(step, params)
  assert found["jaxgemm"] == 3 * 7 and found["dot_general"] == 6  # Attention's own.


@pytest.mark.slow
def test_gpt_2_learns_alike():
  """And all layers of a block have what follows the product in its kernel."""
  text = np.frombuffer(b"abc " * 100, np.uint8)
  training = dataclasses.replace(TRAINING, model="gpt2")
  xla, *others = train_lm.train(
      list(train_lm.DOT_GENERALS), TINY, training, text, time_kernels=False
  )
  for ours in others:
    np.testing.assert_allclose(ours.losses, xla.losses, rtol=1e-3)
    assert ours.losses[2] < ours.losses[0] - 0.1
  params = gpt2.init(TINY, jax.random.key(0))
  tokens = np.zeros((2, TINY.sequence + 1), np.int32)
  layers = blocks.LAYERS["jaxgemm"]
  found = count_primitives(
      jax.grad(lambda p: gpt2.loss(p, tokens, TINY, layers)), params
  )
  names = ("jaxgemm_linear", "jaxgemm", "jaxgemm_gradients", "jaxgemm_cotangents")
  # Of the eight backward products that of the input gradient behind gelu has its slopes,
  # and three pairs go together.
  assert [found[name] for name in names] == [4 + 1, 1 + 3, 3, 4]

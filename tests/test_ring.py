"""How rings count: slots, teams, and whose step a producer waits for."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import persistent, pipelined, split_k, tiles
from pallas_kernels.configs import PersistentConfig, PipelinedConfig, SplitKConfig
from pallas_kernels.problem import Problem
from pallas_kernels.ring import Ring

MOVES = {"copy_gmem_to_smem", "wgmma_ref"}


def make_ring(num_stages, *, teams=1, k_steps=1, num_producers=1) -> Ring:
  prepared = types.SimpleNamespace()  # Whatever is multiplied.
  return Ring(prepared, num_stages, 1, teams, k_steps, num_producers)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_places_go_round(count):
  found = [int(tiles.wrapped(jnp.int32(i), count)) for i in range(2 * count)]
  assert found == [i % count for i in range(2 * count)]


@pytest.mark.parametrize(("num_stages", "producers"), [(5, 1), (8, 1), (9, 3)])
def test_slots_follow_each_other(num_stages, producers):
  ring = make_ring(num_stages, num_producers=producers)
  for producer in range(producers):
    slot = ring.slot_of(jnp.int32(producer))
    for step in range(producer, 3 * num_stages, producers):
      assert int(slot) == step % num_stages
      assert int(ring.before(slot)) == (step - 1) % num_stages
      slot = ring.after(slot, producers)


@pytest.mark.parametrize("num_stages", [2, 4, 7])
@pytest.mark.parametrize("k_steps", [1, 2, 3, 5, 16])
def test_the_step_that_had_the_slot_before(num_stages, k_steps):
  """Of two teams that take tiles in turn, from the first step of any tile on."""
  ring = make_ring(num_stages, teams=2, k_steps=k_steps)
  for local in range(6):
    first = local * k_steps
    read = ring._read_before(jnp.int32(first))
    for step in range(first, first + k_steps):
      before = step - num_stages
      if before >= 0:  # Until then nobody waits.
        tile, k_step = divmod(before, k_steps)
        assert (int(read.k_step), int(read.team)) == (k_step, tile % 2)
      read = ring._read_after(read)
    assert int(ring.team(jnp.int32(first))) == local % 2


def test_one_team_is_not_looked_for():
  ring = make_ring(4, k_steps=3)
  assert ring.team(jnp.int32(7)) == 0
  assert ring._read_after(ring._read_before(jnp.int32(7))) is None


def inner_jaxprs(eqn):
  """The jaxprs of an equation."""
  for value in eqn.params.values():
    for each in value if isinstance(value, tuple | list) else [value]:
      each = getattr(each, "jaxpr", each)
      if hasattr(each, "eqns"):
        yield each


def loops(jaxpr, loop=None):
  """The names of what each loop does, loops within it apart."""
  names = set()
  for eqn in jaxpr.eqns:
    names.add(eqn.primitive.name)
    kind = eqn.primitive.name if eqn.primitive.name in ("scan", "while") else None
    for inner in inner_jaxprs(eqn):
      found = yield from loops(inner, kind)
      names |= set() if kind else found
  if loop:
    yield names
  return names


def loops_of(kernel, problem, config):
  """Of a kernel: those that load or multiply k tiles, and the others."""
  jaxpr = jax.make_jaxpr(
      lambda lhs, rhs: kernel.launch((lhs, rhs), problem, config, num_sms=132)
  )(
      jax.ShapeDtypeStruct(problem.lhs_shape, problem.dtype),
      jax.ShapeDtypeStruct(problem.rhs_shape, problem.dtype),
  )
  found = list(loops(jaxpr.jaxpr))
  over_k = [names for names in found if names & MOVES]
  return over_k, [names for names in found if not names & MOVES]


@pytest.mark.parametrize(
    ("kernel", "config", "num_loops"),
    [
        (persistent, PersistentConfig(128, 128, num_stages=5), 2),
        (persistent, PersistentConfig(128, 128, num_stages=6, wg_dim="tile"), 2),
        (persistent, PersistentConfig(64, 64, num_stages=9, consumers=1, promote=4), 2),
        (split_k, SplitKConfig(64, 64, num_stages=7, consumers=1, splits=4), 2),
        (pipelined, PipelinedConfig(64, 64, 64, 6), 2),  # Steady, and to the end.
    ],
    ids=lambda value: getattr(value, "NAME", None) and value.NAME,
)
def test_loops_over_k_divide_nothing(kernel, config, num_loops):
  """By numbers of slots that are no powers of two this took up to 27% longer."""
  over_k, _ = loops_of(kernel, Problem(512, 1024, 2048), config)
  assert len(over_k) == num_loops
  assert set().union(*over_k) >= MOVES
  for names in over_k:
    assert not names & {"rem", "div"}


def test_loops_over_k_of_parts_divide_nothing():
  """bf16_x3 took 2 to 3% longer."""
  for algorithm, promote in (("bf16_x3", 0), ("bf16_x6", 1), ("bf16_x9", 1)):
    problem = Problem(
        512, 1024, 2048, dtype="float32", out_dtype="float32", algorithm=algorithm
    )
    config = PersistentConfig(128, 128, 64, num_stages=2, promote=promote)
    over_k, _ = loops_of(persistent, problem, config)
    assert set().union(*over_k) >= MOVES
    for names in over_k:
      assert not names & {"rem", "div"}


def test_the_last_slot_of_a_tile_is_let_go_in_a_loop():
  """Or ptxas does what follows first (`ring_reads._let_go`)."""
  for wg_dim in ("m", "tile"):
    config = PersistentConfig(128, 128, num_stages=5, wg_dim=wg_dim)
    _, others = loops_of(persistent, Problem(512, 1024, 2048), config)
    arriving = [names for names in others if "barrier_arrive" in names]
    assert len(arriving) == 1
    assert not arriving[0] & {"barrier_wait", "wgmma_wait"}

"""Persistent kernels in rounds: which CTA does which tiles, and where it is asked for."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxgemm
from jaxgemm import launch, lowering, partitioning
from jaxgemm.device import known_device
from jaxgemm.plan import make_plan
from pallas_kernels import KERNELS
from pallas_kernels.cluster_grid import ClusterGrid
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem
from tests import kernel_cases
from tests.kernel_cases import make_problem, mostly_slow, small_config
from tests.product_cases import normal

H200 = known_device("NVIDIA H200")


def _walks(
    grid: ClusterGrid, cluster: dict[str, int]
) -> list[list[tuple[int, int, int]]]:
  """The tiles of each CTA, in its order."""

  def of_cta():
    places = jax.vmap(grid.locate)(jnp.arange(grid.share, dtype=jnp.int32))[:3]
    return grid.local_count(), jnp.stack(places, 1)

  of_grid = lambda _: of_cta()
  for axis in reversed(cluster):
    of_grid = jax.vmap(of_grid, axis_name=axis)
  of_grid = jax.vmap(of_grid, axis_name="cta")
  counts, places = jax.jit(of_grid)(
      jnp.zeros((grid.num_clusters, *cluster.values()))
  )
  return [
      [tuple(place) for place in each[:count].tolist()]
      for count, each in zip(counts.ravel(), places.reshape(-1, *places.shape[-2:]),
                             strict=True)
  ]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3, 100])
@pytest.mark.parametrize(
    ("num_sms", "fields"), [(1, {}), (5, {}), (8, dict(cluster_m=2)), (64, {}),
                          (9, dict(cluster_m=2, cluster_n=2))], ids=str
)
def test_every_tile_is_done_once_in_the_same_order(num_sms, fields, rounds):
  config = PersistentConfig(64, 64, consumers=1, **fields)
  problem = Problem(300, 500, 64, batch=2)
  make = functools.partial(ClusterGrid.of, problem, config, num_sms=num_sms)
  grid = make(rounds=rounds)
  walks = _walks(grid, config.cluster_axes)
  found = sorted(itertools.chain.from_iterable(walks))
  rows = 6 if config.cluster_m > 1 else 5
  assert found == sorted(itertools.product(
      range(2), range(0, 64 * rows, 64), range(0, 512, 64)
  ))
  assert all(walks) and max(map(len, walks)) == grid.share
  # The CTAs of a round in step, round after round, are those of one round in step.
  in_step = []
  for first in range(0, len(walks), grid.at_once * config.cluster):
    of_round = walks[first : first + grid.at_once * config.cluster]
    in_step += [t for step in itertools.zip_longest(*of_round) for t in step if t]
  alone = _walks(make(), config.cluster_axes)
  assert in_step == [t for step in itertools.zip_longest(*alone) for t in step if t]
  if rounds > 1:
    assert grid.share <= -(-grid.num_tiles // grid.at_once // rounds) + 1
  else:
    assert grid.num_clusters == grid.at_once


@pytest.mark.parametrize(
    "fields", mostly_slow([dict(wg_dim="tile"), dict(cluster_m=2)]), ids=str
)
def test_rounds_have_the_same_bits(fields):
  problem = make_problem(300, 260, 72, "NT", out_dtype="float32")
  operands = kernel_cases.random_operands(problem)
  config = small_config("persistent", tile_m=64 if fields.get("wg_dim") else 128,
                        tile_n=64, **fields)
  one, several = (
      kernel_cases.emulate(
          "persistent", problem, config, operands, num_sms=2, rounds=rounds
      )
      for rounds in (1, 3)
  )
  np.testing.assert_array_equal(np.asarray(one), np.asarray(several))
  assert np.isfinite(np.asarray(one)).all()


@pytest.mark.parametrize(
    ("size", "rounds"),
    [((512, 512, 512), 1), ((4096, 4096, 4096), 1), ((4096, 4096, 14336), 4),
     ((8192, 14336, 4096), 7)],
    ids=str,
)
def test_long_products_have_more_rounds(size, rounds):
  assert launch.num_rounds(Problem(*size), H200) == rounds


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kernel", ["persistent", "split_k"])
def test_only_persistent_runs_in_rounds(kernel, beside, monkeypatch):
  seen = []
  monkeypatch.setattr(
      KERNELS[kernel], "launch", lambda *_, **options: seen.append(options)
  )
  plan = make_plan(Problem(8192, 14336, 4096), H200, implementation=kernel)
  launch.run(plan, (), H200, beside_collectives=beside)
  assert seen[0].get("rounds", 1) == (7 if beside and kernel == "persistent" else 1)


def test_one_device_knows_no_collectives_and_shard_map_does(monkeypatch, rng):
  seen = []

  def run(plan, operands, device, beside_collectives):
    seen.append(beside_collectives)
    return jnp.zeros(plan.problem.out_shape, plan.problem.out_dtype)

  monkeypatch.setattr(lowering, "run", run)
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
  a = normal(rng, 256, 256).astype("bfloat16")
  each = jax.shard_map(
      lambda a, b: jaxgemm.matmul(a, b), mesh=mesh, in_specs=(P("x"), P()),
      out_specs=P("x"),
  )
  with jaxgemm.target("NVIDIA H200"):
    for f in (lambda a, b: jaxgemm.matmul(a, b), each):
      jax.jit(f).trace(a, a).lower(lowering_platforms=("cuda",))
  assert seen == [False, True]


def test_products_of_shards_know_of_collectives(monkeypatch, rng):
  seen = []

  def make(product, num_operands, bind):
    def told(*operands, product):
      seen.append(product.beside_collectives)
      return bind(*operands, product=product)

    return partitioning.partitioned_product(product, num_operands, told)

  monkeypatch.setattr("jaxgemm.primitive.partitioned_product", make)
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
  a = jax.device_put(normal(rng, 256, 256), NamedSharding(mesh, P("x")))
  with jaxgemm.emulate():
    jax.jit(lambda a: jaxgemm.matmul(a, a)).lower(a).compile()
  assert seen and all(seen)

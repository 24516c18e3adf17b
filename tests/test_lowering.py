"""Kernels lowered for CUDA on a machine without a GPU.

The lowering raises Mosaic's own errors of layout, tiling and alignment, which
interpret mode knows nothing of.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import jaxgemm
from jaxgemm import heuristics
from jaxgemm.device import known_device
from pallas_kernels import TILE_KERNELS as KERNELS
from pallas_kernels import direct, pads
from pallas_kernels.configs import DirectConfig, PersistentConfig
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem, mostly_slow, small_config

H200 = known_device("NVIDIA H200")
SIZES = [
    (1, 4096, 4096),
    (16, 6144, 512),
    (128, 4096, 14336),
    (512, 512, 512),
    (1024, 1024, 14336),
    (4096, 4096, 4096),
    (64, 64, 65536),
    (8192, 50257, 768),
    (1000, 1000, 1000),
    (1001, 1003, 517),
    (7, 9, 3),
    (2048, 2048, 24),
]


SHARES = 6  # Of candidates to lower: one in `make test`.


def own_candidates(problem) -> list[heuristics.Candidate]:
  return [c for c in heuristics.candidates(problem, H200) if c.kernel != "xla"]


@pytest.mark.slow
@pytest.mark.parametrize("share", kernel_cases.mostly_more(range(SHARES)))
@pytest.mark.parametrize(
    ("layouts", "dtype"),
    # Each operand in both of its layouts; float32 ones reach the kernels k-major.
    kernel_cases.mostly_more(
        [("TT", "bfloat16"), ("NN", "float32"), ("NN", "bfloat16")]
    ),
)
def test_every_candidate_lowers(layouts, dtype, share):
  """Each tile and each way to work on one that the heuristics weigh for any size."""
  seen, first = set(), []
  for size in SIZES:
    problem = make_problem(*size, layouts, dtype)
    for candidate in own_candidates(problem):
      # Splits and stages are numbers of loops, not another program, but for direct's.
      fields = {**vars(candidate.config), "num_stages": None}
      fields["splits"] = candidate.kernel == "direct" and fields["splits"] > 1
      names = ("tile_m", "tile_n", "consumers", "wg_dim", "swap")
      tile = tuple(fields.pop(name, None) for name in names)
      kinds = {(candidate.kernel, *tile), (candidate.kernel, *fields.items())}
      if kinds - seen:
        first.append((problem, candidate))
        seen |= kinds
  assert len(first) > 20
  for problem, candidate in first[share::SHARES]:
    text = lowered(candidate.kernel, problem, candidate.config)
    assert f"jaxgemm_{candidate.kernel}" in text


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_chosen_config_lowers(size, layouts):
  problem = make_problem(*size, layouts, "float16" if layouts == "TN" else "bfloat16")
  chosen = own_candidates(problem)[0]
  text = lowered(chosen.kernel, problem, chosen.config)
  assert f"jaxgemm_{chosen.kernel}" in text


@pytest.mark.parametrize("size", [(512, 512, 512), (4096, 4096, 4096), (7, 9, 3)])
def test_float32_results_lower(size):
  problem = make_problem(*size, out_dtype="float32")
  for candidate in own_candidates(problem):
    assert candidate.config.promote > 0
  chosen = own_candidates(problem)[0]
  assert f"jaxgemm_{chosen.kernel}" in lowered(chosen.kernel, problem, chosen.config)


@pytest.mark.parametrize("layouts", mostly_slow(LAYOUTS))
@pytest.mark.parametrize("kernel", KERNELS)
def test_batches_and_epilogues_lower(kernel, layouts):
  for n in (96, 101):  # Stored by TMA, and masked.
    for c_dtype in ("bfloat16", "float32"):
      problem = make_problem(
          130, n, 256, layouts, batch=2, rhs_batched=False,
          epilogue=Epilogue(0.5, 2.0, c_dtype),
      )
      assert f"jaxgemm_{kernel}" in lowered(kernel, problem, small_config(kernel))


@pytest.mark.parametrize("n", mostly_slow([201, 328, 320]))
@pytest.mark.parametrize("layouts", ["NN", "TN"])
@pytest.mark.parametrize("kernel, fields", kernel_cases.N_MAJOR_TILES, ids=str)
def test_columns_between_blocks_lower(kernel, fields, layouts, n):
  text = lowered(
      kernel, make_problem(200, n, 520, layouts), small_config(kernel, **fields)
  )
  assert f"jaxgemm_{kernel}" in text


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("cluster_k", mostly_slow([8, 2, 5]))
def test_sums_within_clusters_lower(cluster_k, layouts):
  for n, fields in [(96, dict(tile_n=64)), (101, {}), (256, dict(wg_dim="n"))]:
    config = small_config(
        "split_k", splits=cluster_k, cluster_k=cluster_k, num_stages=2, **fields
    )
    text = lowered("split_k", make_problem(130, n, 4096, layouts), config)
    assert "jaxgemm_split_k" in text and "reduce" not in text  # One kernel.
    config = small_config("direct", splits=cluster_k, tile_n=48)
    text = lowered("direct", make_problem(130, n, 4096, layouts), config)
    assert "jaxgemm_direct" in text and "reduce" not in text


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("k", [16, 41, 80])
def test_parts_of_a_k_tile_lower(k, layouts):
  for tile_m, tile_n in ((64, 48), (128, 64)):
    config = small_config("direct", tile_m=tile_m, tile_n=tile_n)
    text = lowered("direct", make_problem(200, 130, k, layouts), config)
    assert "jaxgemm_direct" in text


def test_no_operand_is_copied_where_tma_takes_it():
  """No transposed copy in any layout of bfloat16; a pad only for bad strides."""
  for layouts in LAYOUTS:
    text = lowered(
        "persistent", make_problem(1024, 1024, 1024, layouts), small_config("persistent")
    )
    assert "stablehlo.transpose" not in text and not _padded(text)
  text = lowered(
      "persistent", make_problem(1001, 1024, 1024), small_config("persistent")
  )
  assert not _padded(text)  # Any number of rows of a k-major operand.
  # The lhs has a bad stride; the rhs, of any number of rows, comes in chunks.
  text = lowered("persistent", make_problem(8192, 1024, 1001), small_config("persistent"))
  assert _padded(text) == ["1x8192x1024xbf16"]


def _padded(text: str) -> list[str]:
  """The types of what a lowered module pads, as they are then: by our kernel alone."""
  assert "stablehlo.pad" not in text
  found = []
  for line in text.splitlines():
    if "custom_call @mosaic_gpu" in line:
      location = re.search(r"loc\((#loc\d+)\)$", line)[1]
      origin = re.search(rf"^{location} = (.*)$", text, re.MULTILINE)[1]
      if f"jaxgemm_{pads.NAME}" in origin:
        found += re.findall(r"tensor<(\w+)>", line.rsplit("->", 1)[1])
  return found


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("kernel", ["persistent", "split_k"])
@pytest.mark.parametrize("tile", mostly_slow(kernel_cases.LOADING_TILES), ids=str)
def test_registers_load_what_would_be_padded(tile, kernel, layouts):
  fields = dict(tile_m=tile[0], tile_n=tile[1], consumers=1, num_stages=6)
  for batch, count in [(1, 2), (3, 2)]:
    problem = make_problem(1001, 515, 333, layouts, batch=batch)
    text = lowered(kernel, problem, small_config(kernel, misaligned="padded", **fields))
    assert len(_padded(text)) == count
    text = lowered(kernel, problem, small_config(kernel, misaligned="loads", **fields))
    assert not _padded(text)


@pytest.mark.parametrize("n", [1001, 50257])
def test_an_odd_result_is_not_padded(n):
  problem = make_problem(512, n, 512, "NT")
  text = lowered("persistent", problem, small_config("persistent"))
  assert "stablehlo.slice" not in text and not _padded(text)


def exported(function, *operands) -> str:
  with jaxgemm.target("NVIDIA H200"):
    run = jax.export.export(jax.jit(function), platforms=["cuda"])
    return run(*operands).mlir_module()


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 56, 4096), (2048, 49, 1024)])
def test_narrow_rhs_beside_lhs_that_is_split_in_registers(m, n, k):
  """Its blocks have 32 columns."""
  a, b = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((m, k), (k, n)))
  run = lambda a, b: jaxgemm.matmul(a, b, precision="highest")
  assert "jaxgemm_split_k" in exported(run, a, b)
  loss = lambda a, b: jnp.sum(run(a, b))
  assert "jaxgemm_" in exported(jax.grad(loss, (0, 1)), a, b)


@pytest.mark.parametrize(("m", "n", "k"), [(2544, 40, 28280), (1168, 40, 54984)])
def test_shared_memory_of_sums_that_a_cluster_exchanges(m, n, k):
  a, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((k, m), (n, k)))
  run = lambda a, b: jaxgemm.dot_general(
      a, b, (((0,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  assert "jaxgemm_split_k" in exported(run, a, b)


def test_pieces_of_a_result_have_rows_that_can_be_swizzled():
  """However little room the ring leaves."""
  rows, hidden, n = 4748, 144, 6416
  shapes = (rows, n), (n, hidden), (n, hidden), (hidden, n)
  operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
  run = lambda *x: jnp.sum(jaxgemm.gated_mlp(*x, activation="gelu").astype(jnp.float32))
  assert "jaxgemm_persistent" in exported(jax.grad(run, (0, 1, 2, 3)), *operands)


def test_direct_has_room_for_the_barriers_of_c():
  problem = make_problem(
      130, 96, 384, "NT",
      epilogue=Epilogue(c_dtype="bfloat16", activation="silu", slopes=2),
  )
  config = DirectConfig(256, 32, 64)  # Without barriers there were room for six.
  assert direct.num_slots(problem, config) == 5
  assert KERNELS["direct"].supports(problem, config) is None
  assert "jaxgemm_direct" in lowered("direct", problem, config)


def test_tiles_are_counted_in_32_bits():
  problem = make_problem(129, 17, 8, batch=2**30)
  for config in (DirectConfig(64, 64, 64), PersistentConfig()):
    name = "direct" if isinstance(config, DirectConfig) else "persistent"
    assert "tiles of" in KERNELS[name].supports(problem, config)

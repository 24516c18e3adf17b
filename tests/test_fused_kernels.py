"""Kernels that add a bias, apply an activation and add a residual before they store."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemm import reference
from pallas_kernels import KERNELS, TILE_KERNELS, activations, epilogue_choice
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem, small_config
from tests.product_cases import equations

FULL = Epilogue(alpha=0.5, beta=1.0, c_dtype="bfloat16", has_bias=True,
                activation="gelu", saves=True)
SAVED = Epilogue(alpha=0.5, has_bias=True, activation="gelu", saves=True)
SLOPES = Epilogue(alpha=0.5, c_dtype="bfloat16", activation="gelu", slopes=1)


def operands_of(problem):
  """lhs, rhs (of a gated product two), maybe c, and the biases, as kernels take them."""
  found = list(kernel_cases.random_operands(problem))
  if problem.epilogue.gated:
    _, other, *rest = kernel_cases.random_operands(problem, seed=1)
    found[1] = found[1], other
    if problem.epilogue.has_bias:
      found.append(rest[-1])
  if problem.epilogue.slopes == 2:
    found.append(kernel_cases.random_operands(problem, seed=1)[2])
  return tuple(found)


def truth(problem, operands):
  """(result, what enters the activation, and its other factor) in float64.

  Or the product times each slope.
  """
  epilogue = problem.epilogue
  plain = dataclasses.replace(problem, epilogue=Epilogue(epilogue.alpha))
  factors = operands[1] if epilogue.gated else operands[1:2]
  products = [kernel_cases.truth(plain, (operands[0], rhs)) for rhs in factors]
  if epilogue.has_bias:
    biases = operands[len(operands) - len(factors) :]
    products = [
        x + np.asarray(bias).astype(np.float64)
        for x, bias in zip(products, biases, strict=True)
    ]
  with jax.enable_x64(True):
    if epilogue.slopes:
      entering = [jnp.asarray(np.asarray(c).astype(np.float64)) for c in operands[2:]]
      slopes = activations.slopes(epilogue.activation, entering)
      return [products[0] * np.asarray(slope) for slope in slopes]
    out = np.asarray(activations.apply(epilogue.activation, jnp.asarray(products[0])))
  if epilogue.gated:
    out = out * products[1]
  if epilogue.has_c:
    out = out + epilogue.beta * np.asarray(operands[2]).astype(np.float64)
  return out, *products


def check(kernel, problem, config, *, bound=4e-3):
  operands = operands_of(problem)
  found = kernel_cases.emulate(kernel, problem, config, operands)
  wanted = truth(problem, operands)
  found = found if problem.epilogue.num_others else (found,)
  for ours, its in zip(found, wanted, strict=False):
    assert reference.relative_error(ours, its) < bound


@pytest.mark.parametrize("name", activations.NAMES)
def test_activations_are_those_of_jax(name):
  theirs = {
      "relu": jax.nn.relu, "squared_relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid,
      "silu": jax.nn.silu, "tanh": jnp.tanh, "gelu": jax.nn.gelu,
      "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
  }[name]
  if name == "squared_relu":
    theirs = lambda x: jax.nn.relu(x) ** 2
  x = jnp.asarray([-100.0, -4.0, -1.0, -0.0, 0.0, 1e-3, 0.5, 3.0, 50.0, jnp.inf])
  np.testing.assert_allclose(activations.apply(name, x), theirs(x), 1e-5, 1e-6)
  slopes = jax.vmap(jax.grad(theirs))(x[:-1])
  np.testing.assert_allclose(activations.slope(name, x[:-1]), slopes, 1e-5, 1e-6)
  assert np.isnan(activations.apply(name, jnp.float32(np.nan)))


@pytest.mark.slow
@pytest.mark.parametrize("name", activations.NAMES)
def test_activations_in_a_kernel(name):
  problem = make_problem(
      72, 136, 64, epilogue=Epilogue(activation=name), out_dtype="float32"
  )
  check("pipelined", problem, small_config("pipelined"), bound=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", TILE_KERNELS)
def test_kernels(kernel):
  problem = make_problem(130, 152, 136, "TN", batch=2, epilogue=FULL)
  check(kernel, problem, small_config(kernel))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more(
        [dict(splits=4, cluster_k=2), dict(splits=3), dict(splits=2, cluster_k=2)], 2
    ),
    ids=str,
)
def test_split_k(fields):
  problem = make_problem(130, 264, 512, "NT", epilogue=FULL)
  check("split_k", problem, small_config("split_k", **fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more([
        dict(wg_dim="tile", tile_n=64), dict(tile_n=384, num_stages=2),
        dict(wg_dim="n", tile_m=64, tile_n=256), dict(cluster_n=2), dict(consumers=1),
    ], 2),
    ids=str,
)
def test_configs(fields):
  problem = make_problem(200, 300, 128, epilogue=FULL)
  check("persistent", problem, small_config("persistent", **fields))


@pytest.mark.parametrize("n", kernel_cases.mostly_more([150, 400, 128, 176], 2))
def test_tiles_that_pieces_do_not_divide(n):
  """The bias of a piece whose columns end beyond those of the result."""
  problem = make_problem(130, n, 128, "NT", epilogue=FULL)
  check("persistent", problem, small_config("persistent", tile_n=176))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "slopes"),
    kernel_cases.mostly_more(
        [("persistent", 2), ("persistent", 1)]
        + [(kernel, 2) for kernel in TILE_KERNELS if kernel != "persistent"], 3
    ),
)
def test_slopes(kernel, slopes):
  """The cotangent of a layer's products, from that of the layer behind it."""
  epilogue = dataclasses.replace(SLOPES, slopes=slopes)
  problem = make_problem(130, 152, 136, "NT", epilogue=epilogue)
  check(kernel, problem, small_config(kernel))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "fields", "n"),
    kernel_cases.mostly_more([
        ("persistent", dict(wg_dim="tile", tile_n=64), 101),
        ("split_k", dict(splits=2, cluster_k=2, num_stages=2), 136),
        ("persistent", dict(swap=True, wg_dim="tile", tile_n=72), 152),
        ("persistent", dict(cluster_n=2), 264),
        ("persistent", dict(swap=True, tile_n=64), 152),
        ("persistent", dict(swap=True, wg_dim="tile", tile_n=104, cluster_m=2), 304),
    ], kept=3),
    ids=str,
)
def test_slopes_in_configs(kernel, fields, n):
  epilogue = dataclasses.replace(SLOPES, alpha=1.0, slopes=2, activation="silu")
  problem = make_problem(140, n, 256, epilogue=epilogue)
  check(kernel, problem, small_config(kernel, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["persistent", "split_k"])
def test_swapped_operands(kernel):
  epilogue = Epilogue(has_bias=True, activation="silu")
  problem = make_problem(9, 392, 256, epilogue=epilogue)
  config = small_config(kernel, swap=True, tile_n=16, tile_m=128, num_stages=4)
  check(kernel, problem, config)


@pytest.mark.slow
@pytest.mark.parametrize("fields", kernel_cases.mostly_more([
    dict(m=9, tile_n=16), dict(m=120, tile_n=72, wg_dim="tile", tile_m=64),
    dict(m=9, tile_n=16, splits=2, cluster_k=2), dict(m=70, tile_n=128),
    dict(m=3, tile_n=24, consumers=1, tile_m=64), dict(m=70, tile_n=64, splits=3),
], kept=3), ids=str)
def test_swapped_operands_with_c(fields):
  """Pieces of c come as rows of the result, and are read transposed."""
  m, *_ = sizes = fields["m"], 392, 256
  kernel = "split_k" if "splits" in fields else "persistent"
  config = dict(tile_m=128, num_stages=4, swap=True) | fields
  del config["m"]
  epilogue = Epilogue(beta=-0.5, c_dtype="float16")
  if m < 70:
    epilogue = dataclasses.replace(epilogue, has_bias=True, activation="silu")
  check(kernel, make_problem(*sizes, epilogue=epilogue), small_config(kernel, **config))


@pytest.mark.slow
@pytest.mark.parametrize("n", [101, 100, 7])
def test_results_of_odd_widths(n):
  problem = make_problem(70, n, 64, epilogue=dataclasses.replace(FULL, c_dtype="float32"))
  check("persistent", problem, small_config("persistent"))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["bf16_x6", "bf16_x3", "tf32_f32"])
def test_float32(algorithm):
  epilogue = dataclasses.replace(FULL, c_dtype=None, beta=0.0)
  problem = make_problem(
      130, 72, 136, "TN", "float32", algorithm=algorithm, epilogue=epilogue
  )
  fields = dict(tile_k=32) if algorithm == "tf32_f32" else dict(tile_n=64, promote=1)
  config = small_config("persistent", num_stages=2, **fields)
  check("persistent", problem, config, bound={"bf16_x6": 1e-6}.get(algorithm, 1e-3))


@pytest.mark.slow
def test_float16_parts_have_two_results():
  epilogue = Epilogue(has_bias=True, activation="relu", saves=True)
  problem = make_problem(
      130, 72, 136, "NN", "float32", algorithm="bf16_x6", epilogue=epilogue
  )
  config = small_config("persistent", num_stages=2, promote=1, float16_parts=True)
  check("persistent", problem, config, bound=1e-6)


@pytest.mark.slow
def test_a_callable_is_an_activation():
  def leaky(x):
    return jnp.where(x > 0, x, 0.1 * x)

  problem = make_problem(72, 136, 64, epilogue=Epilogue(activation=leaky))
  check("persistent", problem, small_config("persistent"))
  assert str(problem).endswith("+ leaky")


GATED = Epilogue(activation="silu", gated=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "epilogue"),
    [("NN", GATED), ("NT", dataclasses.replace(GATED, has_bias=True, saves=True)),
     ("TN", dataclasses.replace(FULL, gated=True))],
    ids=["alone", "saves", "all"],
)
@pytest.mark.parametrize("swap", [False, True])
def test_gated(layouts, epilogue, swap):
  problem = make_problem(130, 152, 136, layouts, batch=2, epilogue=epilogue)
  fields = dict(swap=True, wg_dim="tile", tile_n=64) if swap else dict(tile_n=128)
  check("persistent", problem, small_config("persistent", **fields), bound=8e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more([
        dict(wg_dim="tile", tile_m=64), dict(cluster_n=2), dict(tile_n=96),
        dict(swap=True, wg_dim="tile", tile_n=80, cluster_m=2), dict(cluster_m=2),
        dict(consumers=1, tile_m=64), dict(tile_n=256, num_stages=2),
        dict(swap=True, wg_dim="tile", cluster_n=2),
        dict(swap=True, tile_m=256, consumers=1),
    ], 4),
    ids=str,
)
def test_gated_configs(fields):
  n = 304 if "swap" in fields else 301  # TMA stores the swapped ones' rows.
  problem = make_problem(200, n, 128, "NT", "float16", epilogue=GATED)
  config = small_config("persistent", **(dict(tile_n=64) | fields))
  check("persistent", problem, config, bound=8e-3)


@pytest.mark.parametrize("kernel", TILE_KERNELS)
@pytest.mark.parametrize("n", [256, 257])
def test_lowers_for_cuda(kernel, n):
  problem = make_problem(256, n, 512, epilogue=FULL)
  assert f"jaxgemm_{kernel}" in lowered(kernel, problem, small_config(kernel))


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [*((kernel, {}) for kernel in TILE_KERNELS),
     ("split_k", dict(splits=4, cluster_k=4)), ("direct", dict(splits=4)),
     ("persistent", dict(swap=True, tile_n=64)),
     ("persistent", dict(tile_n=256))],
    ids=str,
)
@pytest.mark.parametrize(
    "epilogue",
    [Epilogue(beta=1.0, c_dtype="bfloat16"), Epilogue(has_bias=True)],
    ids=["c", "bias"],
)
def test_what_is_added_is_asked_for_before_a_tile_is_multiplied(
    kernel, fields, epilogue
):
  def asked(epilogue):
    problem = make_problem(256, 512, 512, epilogue=epilogue)
    types = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in kernel_cases.operand_types(problem)
    ]
    run = lambda *x: KERNELS[kernel].launch(
        x, problem, small_config(kernel, **fields), num_sms=132
    )
    names = [
        eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(*types).jaxpr)
    ]
    before = names[: names.index("wgmma_ref")]
    return sum(before.count(name) for name in ("copy_gmem_to_smem", "inline_mgpu_p"))

  if kernel == "split_k" and not fields:
    assert asked(epilogue) == asked(Epilogue())  # What adds up the sums adds it.
  else:
    assert asked(epilogue) > asked(Epilogue())


@pytest.mark.parametrize("kernel", TILE_KERNELS)
@pytest.mark.parametrize("n", [10, 1000, 1001])
def test_no_pass_pads_a_bias(kernel, n):
  problem = make_problem(64, n, 128, "NT", epilogue=Epilogue(has_bias=True))
  config = small_config(kernel, tile_n=64)
  assert "stablehlo.pad" not in lowered(kernel, problem, config)


@pytest.mark.parametrize("n", [256, 257])
def test_gated_lowers_for_cuda(n):
  problem = make_problem(256, n, 512, epilogue=dataclasses.replace(FULL, gated=True))
  assert "jaxgemm_persistent" in lowered(
      "persistent", problem, small_config("persistent", tile_n=256)
  )


@pytest.mark.parametrize(
    ("kernel", "fields", "problem_fields", "named"),
    [
        ("persistent", {}, dict(dtype="int8", out_dtype="int32"), "int8"),
        ("triton", {}, {}, "bias"),
        ("pipelined", {}, dict(epilogue=GATED), "only persistent"),
        ("split_k", {}, dict(epilogue=GATED), "only persistent"),
        ("persistent", dict(promote=1), dict(epilogue=GATED), "promote=1"),
        ("persistent", dict(swap=True, tile_n=64), dict(epilogue=GATED), "swap=True"),
        ("persistent", dict(swap=True, tile_m=64, tile_n=64, consumers=1),
         dict(epilogue=GATED), "multiple of 128"),
        ("persistent", dict(swap=True, tile_n=64),
         dict(epilogue=Epilogue(beta=1.0, c_dtype="float32")), "c of 16 bits"),
        ("persistent", {}, dict(epilogue=GATED, dtype="float32"), "16-bit"),
        ("persistent", dict(wg_dim="n", tile_n=256), dict(epilogue=GATED), "wg_dim='n'"),
        ("persistent", dict(tile_n=64), dict(epilogue=GATED), "multiple of 128"),
    ],
)
def test_supports_says_what_is_not_fused(kernel, fields, problem_fields, named):
  epilogue = Epilogue(has_bias=True, activation="relu", saves=True)
  problem = make_problem(256, 256, 256, **(dict(epilogue=epilogue) | problem_fields))
  config = small_config(kernel, problem.dtype, **fields)
  assert named in KERNELS[kernel].supports(problem, config)


# -- On a GPU ----------------------------------------------------------------------

# (kernel, fields, epilogue, columns: even ones, and what only masked stores can write)
GPU_CASES = [
    *((kernel, {}, FULL, (520, 517)) for kernel in TILE_KERNELS),
    ("persistent", dict(wg_dim="tile", tile_n=192), FULL, (520, 517)),
    ("persistent", dict(cluster_n=2, tile_n=256), FULL, (520, 517)),
    ("split_k", dict(splits=4, cluster_k=4), FULL, (520, 517)),
    ("persistent", dict(swap=True, tile_n=64),
     Epilogue(has_bias=True, activation="gelu"), (520,)),
    ("persistent", dict(swap=True, tile_n=16, consumers=1, tile_m=64, num_stages=8),
     Epilogue(beta=0.5, c_dtype="bfloat16"), (520,)),
    ("split_k", dict(swap=True, tile_n=72, splits=2, cluster_k=2),
     Epilogue(beta=0.5, c_dtype="bfloat16", has_bias=True), (520,)),
    ("persistent", dict(tile_n=128), dataclasses.replace(FULL, gated=True), (520, 517)),
    ("persistent", dict(wg_dim="tile", tile_m=64), GATED, (520, 517)),
    ("persistent", dict(tile_n=256, cluster_m=2), GATED, (520, 517)),
    ("persistent", dict(swap=True, wg_dim="tile", tile_n=192),
     dataclasses.replace(FULL, gated=True), (520,)),
    ("persistent", dict(swap=True, consumers=1, tile_n=64, cluster_m=2),
     dataclasses.replace(GATED, saves=True), (520,)),
    ("persistent", dict(swap=True, wg_dim="tile", tile_n=200, cluster_m=2),
     dataclasses.replace(GATED, saves=True), (520,)),
    ("persistent", dict(swap=True, tile_n=64), SAVED, (520,)),
    *((kernel, {}, SLOPES, (520, 517)) for kernel in TILE_KERNELS),
    ("persistent", dict(wg_dim="tile", tile_n=192, num_stages=3),
     dataclasses.replace(SLOPES, slopes=2), (520, 517)),
    ("persistent", dict(cluster_m=2, tile_n=256, num_stages=3),
     dataclasses.replace(SLOPES, slopes=2, activation="silu"), (520, 517)),
    ("persistent", dict(swap=True, wg_dim="tile", tile_n=104, cluster_m=2),
     dataclasses.replace(SLOPES, slopes=2, activation="silu"), (520,)),
    ("split_k", dict(splits=4, cluster_k=4), SLOPES, (520, 517)),
    *((kernel, {}, SAVED, (101, 7)) for kernel in ("persistent", "pipelined")),
]


def launch(kernel, problem, config, operands):
  run = lambda *x: KERNELS[kernel].launch(x, problem, config, num_sms=132)
  found = jax.jit(run)(*operands)
  return found if problem.epilogue.num_others else (found,)


def slots(room_beside=1 << 17, k=768, **fields):
  """Slots of a staging, of whose shared memory a room has so many bytes more."""
  problem = make_problem(512, 512, k, epilogue=Epilogue(activation="silu", **fields))
  found = epilogue_choice.make_epilogue(problem, 128, 2, emulated=False)
  room = found.smem_bytes + room_beside
  more = epilogue_choice.with_more_slots(found, room)
  assert more.smem_bytes <= max(room, found.smem_bytes)
  return more.out.num_slots


def test_what_is_stored_for_long_has_more_slots():
  """As far as there is room."""
  piece = 64 * 128 * 2  # Bytes of one piece of both warpgroups.
  room = [(-1, 2), (2 * piece - 1, 3), (2 * piece, 4), (1 << 17, 4)]
  assert [slots(more, saves=True) for more, _ in room] == [count for _, count in room]
  assert slots() == slots(k=1024, saves=True) == slots(saves=True, gated=True) == 2
  assert slots(k=256) == slots(k=512, saves=True, gated=True) == 4


@pytest.mark.parametrize("most", [2, 3, 4])
def test_slots_are_written_when_they_are_free(most, monkeypatch):
  """Whatever their number: of one result, of two, of three, and of two beside c."""
  monkeypatch.setattr(epilogue_choice, "_MOST_SLOTS", most)
  fields = dict(tile_m=128, tile_n=128, wg_dim="tile", num_stages=2)
  gated = Epilogue(activation="silu", gated=True, saves=True)
  slopes = Epilogue(activation="silu", c_dtype="bfloat16", slopes=2)
  for epilogue in (Epilogue(), SAVED, gated, slopes):
    problem = make_problem(256, 256, 64, epilogue=epilogue)
    check("persistent", problem, small_config("persistent", **fields))


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(("kernel", "fields", "epilogue", "widths"), GPU_CASES, ids=str)
def test_gpu(kernel, fields, epilogue, widths, layouts):
  for n in widths:
    problem = make_problem(333, n, 712, layouts, batch=2, epilogue=epilogue)
    operands = operands_of(problem)
    found = launch(kernel, problem, small_config(kernel, **fields), operands)
    for ours, its in zip(found, truth(problem, operands), strict=False):
      assert reference.relative_error(ours, its) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tile_n", [32, 256])
@pytest.mark.parametrize("n", [9, 24, 517, 520])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_biases_on_a_gpu(dtype, n, tile_n):
  """Of every dtype, in registers and not, of columns that pairs divide and do not."""
  problem = make_problem(
      70, n, 128, epilogue=Epilogue(has_bias=True), out_dtype="float32"
  )
  lhs, rhs, bias = operands_of(problem)
  operands, config = (lhs, rhs, bias.astype(dtype)), small_config("persistent")
  config = dataclasses.replace(config, tile_n=tile_n)
  found = launch("persistent", problem, config, operands)
  wanted, *_ = truth(problem, operands)
  assert np.abs(np.asarray(found[0]) - wanted).max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_gpu_of_lhs_that_comes_skewed(layouts):
  config = small_config("persistent", **kernel_cases.SKEWED_FIELDS)
  for n in (520, 517):
    problem = make_problem(333, n, 711, layouts, epilogue=SAVED)
    operands = operands_of(problem)
    found = launch("persistent", problem, config, operands)
    for ours, its in zip(found, truth(problem, operands), strict=False):
      assert reference.relative_error(ours, its) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("out_dtype", "bound"), [("float32", 1e-5), ("bfloat16", 3e-3)])
@pytest.mark.parametrize("name", activations.NAMES)
def test_activations_on_a_gpu(name, out_dtype, bound):
  problem = make_problem(
      512, 520, 64, epilogue=Epilogue(activation=name), out_dtype=out_dtype
  )
  operands = operands_of(problem)
  (found,) = launch("persistent", problem, small_config("persistent"), operands)
  assert reference.relative_error(found, truth(problem, operands)[0]) < bound

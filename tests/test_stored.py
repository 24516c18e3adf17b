"""Where operands come from: what the caller has transposed, or converted, just before."""

from __future__ import annotations

import contextlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import forms, reference, xla_times
from jaxgemm.device import known_device
from jaxgemm.recording import recording
from pallas_kernels import compat
from tests.kernel_cases import make_problem
from tests.product_cases import equations, normal

H200 = known_device("NVIDIA H200")
TRANSPOSITIONS = {
    "T": lambda x: x.T,
    "swapaxes": lambda x: jnp.swapaxes(x, 0, 1),
    "mT": lambda x: x.mT,
    "einsum": lambda x: jnp.einsum("ij->ji", x),
    "moveaxis, converted": lambda x: jnp.moveaxis(x, 0, 1).astype("bfloat16"),
    "converted before": lambda x: x.astype("bfloat16").T,
}


def layouts(function, *shapes, dtype="bfloat16"):
  """How the operands of each product lie that the function comes to."""
  operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
  return [
      plan.problem.lhs_layout[0] + plan.problem.rhs_layout[0] for plan in record.plans
  ]


@pytest.mark.parametrize("name", TRANSPOSITIONS)
def test_transposed_operands_are_read_where_they_lie(name):
  turn = TRANSPOSITIONS[name]
  dtype = "float32" if "converted" in name else "bfloat16"
  multiply = lambda x, w: jaxgemm.matmul(x.astype("bfloat16"), turn(w))
  assert layouts(multiply, (512, 256), (640, 256), dtype=dtype) == ["kk"]
  multiply = lambda x, w: jaxgemm.matmul(turn(x), w.astype("bfloat16"))
  assert layouts(multiply, (256, 512), (256, 640), dtype=dtype) == ["mn"]


WRAPPED = {
    "vmap": (jax.vmap, ((3, 512, 256), (3, 640, 256)), ["kk"]),
    "vmap of one": (
        lambda f: jax.vmap(f, (0, None)), ((3, 512, 256), (640, 256)), ["kk"]),
    "vmap along the second axes": (
        lambda f: jax.vmap(f, (1, 2)), ((512, 3, 256), (640, 256, 3)), ["kk"]),
    "checkpoint": (jax.checkpoint, ((512, 256), (640, 256)), ["kk"]),
    "jit": (jax.jit, ((512, 256), (640, 256)), ["kk"]),
    "scan": (
        lambda f: lambda x, w: lax.scan(lambda c, w: (c, f(c, w)), x, w)[1],
        ((512, 256), (3, 640, 256)), ["kk"]),
    # Of x and of w, as they are stored.
    "gradients": (
        lambda f: jax.grad(lambda *x: jnp.sum(f(*x).astype("float32")), (0, 1)),
        ((512, 256), (640, 256)), ["mn", "kn"]),
    "gradients of jit": (
        lambda f: jax.grad(lambda *x: jnp.sum(jax.jit(f)(*x).astype("float32")), (0, 1)),
        ((512, 256), (640, 256)), ["mn", "kn"]),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_within_what_jax_makes_of_it(name, rng):
  wrap, shapes, wanted = WRAPPED[name]
  multiply = lambda x, w: jaxgemm.matmul(x, w.T)
  assert layouts(wrap(multiply), *shapes) == wanted
  operands = [normal(rng, *shape) for shape in shapes]
  with jax.default_matmul_precision("highest"):
    found = jax.jit(wrap(multiply))(*operands)
    exact = wrap(lambda x, w: x @ w.T)(*operands)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
    assert reference.relative_error(a, np.asarray(b)) < 1e-5


@pytest.mark.parametrize("gradients", [False, True])
def test_xla_is_left_with_nothing_to_transpose(gradients):
  """What is bound is the transposition of one, of which nothing stays."""
  x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 256), (512, 256)))
  function = lambda x, w: jnp.sum(jaxgemm.matmul(x, w.T) ** 2)
  function = jax.grad(function, (0, 1)) if gradients else function
  with jax.default_matmul_precision("highest"):
    text = jax.jit(function).lower(x, w).compile().as_text()
  assert "dot" in text and " transpose(" not in text


def test_layers_and_losses(rng):
  """Each as with weights that lie the other way, from the arrays as they are."""
  x, up, down = (normal(rng, *s) for s in ((40, 64), (96, 64), (64, 96)))
  gate, labels = normal(rng, 96, 64), jnp.arange(40)
  calls = {
      "linear": lambda: jaxgemm.linear(x, up.T, up[:, 0], activation="silu"),
      "gated": lambda: jaxgemm.gated_linear(x, gate.T, up.T),
      "one of them": lambda: jaxgemm.gated_linear(x, gate.T, down),
      "mlp": lambda: jaxgemm.mlp(x, up.T, down.T),
      "gated_mlp": lambda: jaxgemm.gated_mlp(x, gate.T, up.T, down.T),
      "loss": lambda: jaxgemm.linear_cross_entropy(x, up.T, labels),
  }
  wanted = {
      "linear": lambda: jax.nn.silu(x @ up.T + up[:, 0]),
      "gated": lambda: jax.nn.silu(x @ gate.T) * (x @ up.T),
      "one of them": lambda: jax.nn.silu(x @ gate.T) * (x @ down),
      "mlp": lambda: jax.nn.gelu(x @ up.T) @ down.T,
      "gated_mlp": lambda: (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T,
      "loss": lambda: -jax.nn.log_softmax(x @ up.T)[labels, labels],
  }
  with jax.default_matmul_precision("highest"):
    for name, call in calls.items():
      exact = np.asarray(wanted[name](), np.float64)
      assert reference.relative_error(jax.jit(call)(), exact) < 1e-5, name


def test_the_permutation():
  seen = []

  def function(x):
    y = x.transpose(2, 0, 1).astype("float32").transpose(1, 0, 2)
    seen.extend(map(compat.transposition, (y, x, y.transpose(0, 2, 1), y + 1)))
    return y

  jax.make_jaxpr(function)(jnp.ones((2, 3, 4), "bfloat16"))
  assert seen == [(0, 2, 1), None, None, None]
  assert compat.transposition(np.ones((2, 3)).T) is None


def test_what_is_transposed_outside_of_a_loop_stays(rng):
  """Else each of its rounds would transpose it back."""
  x, w = (jax.ShapeDtypeStruct((256, 256), "bfloat16") for _ in range(2))

  def function(x, w):
    turned = w.T
    step = lambda c, _: (jaxgemm.matmul(c, turned), None)
    return lax.scan(step, x, None, length=3)[0]

  (loop,) = (
      equation for equation in jax.make_jaxpr(function)(x, w).eqns
      if equation.primitive.name == "scan"
  )
  within = [e.primitive.name for e in equations(loop.params["jaxpr"].jaxpr)]
  assert "jaxgemm" in within and "transpose" not in within
  plans = layouts(function, x.shape, w.shape)
  assert plans == ["kn"]


# -- Converted operands ------------------------------------------------------------

CONVERSIONS = {
    # What becomes of x and w, and what w was.
    "weights": (lambda x, w: (x, w.astype(x.dtype)), "int8"),
    "float8": (lambda x, w: (x, w.astype(x.dtype)), "float8_e4m3fn"),
    "scaled": (lambda x, w: (x, w.astype(x.dtype) * x[0, 0]), "int8"),
    "transposed back": (lambda x, w: (x, w.T.astype(x.dtype).T), "int8"),
    "float32": (lambda x, w: (x, w.astype(x.dtype)), "float32"),
}


def planned(make, rows, dtype, k=4096, n=14336):
  x = jax.ShapeDtypeStruct((rows, k), "bfloat16")
  w = jax.ShapeDtypeStruct((k, n), dtype)
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(lambda x, w: jaxgemm.matmul(*make(x, w))).trace(x, w).lower(
        lowering_platforms=("cuda",)
    )
  (plan,) = record.plans
  return plan


@pytest.mark.parametrize("name", CONVERSIONS)
def test_few_rows_of_converted_weights(name):
  """A kernel converts those of 8 bits, XLA's all else: see test_conversions, too."""
  make, dtype = CONVERSIONS[name]
  plan = planned(make, 16, dtype)
  if name in ("scaled", "float32"):
    assert plan.kernel == "xla" and "converts rhs" in plan.reason
  else:
    assert plan.problem.rhs_source == dtype
  assert planned(make, 4096, dtype).kernel == "persistent"
  assert planned(lambda x, w: (x, w), 16, "bfloat16").kernel == "persistent"


@pytest.mark.parametrize(
    "make",
    [
        lambda x, w: (x, (w + w).astype(x.dtype)),  # The sum's kernel converts.
        lambda x, w: (x.astype("float32").astype("bfloat16"), w.astype(x.dtype) + 0),
    ],
)
def test_what_is_computed_anyhow_is_no_conversion(make):
  assert planned(make, 16, "int8").kernel == "persistent"


def test_an_empty_product_of_converted_weights():
  plan = planned(CONVERSIONS["weights"][0], 0, "int8")
  assert plan.source == "fallback"


def test_few_weights_are_not_worth_it():
  plan = planned(CONVERSIONS["weights"][0], 64, "int8", 512, 512)
  assert "converts" not in plan.reason


def test_gradients_of_converted_weights_are_ours():
  x = jax.ShapeDtypeStruct((64, 4096), "bfloat16")
  w = jax.ShapeDtypeStruct((4096, 4096), "float32")
  loss = lambda x, w: jnp.sum(
      jaxgemm.matmul(x, w.astype("bfloat16")).astype("float32") ** 2
  )
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=("cuda",))
  assert [plan.kernel == "xla" for plan in record.plans].count(True) == 1


def test_what_is_transposed_of_them_is_ours():
  """Without forward mode before it, which makes a product of its own."""
  ct = jax.ShapeDtypeStruct((64, 4096), "bfloat16")
  w = jax.ShapeDtypeStruct((4096, 4096), "float32")

  def transposed(ct, w):
    multiply = lambda x: jaxgemm.matmul(x, w.astype("bfloat16"))
    return jax.linear_transpose(multiply, ct)(ct)

  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jax.jit(transposed).trace(ct, w).lower(lowering_platforms=("cuda",))
  assert record.plans and all(plan.kernel != "xla" for plan in record.plans)


@pytest.mark.parametrize(
    ("rows", "layouts", "measured"),
    [(8, "NT", 18.1), (16, "NN", 25.3), (64, "NN", 36.3), (512, "NN", 122.0)],
)
def test_the_estimate_of_xla_s_conversion(rows, layouts, measured):
  """Off by little where it was measured (H200, 2026-11-25)."""
  problem = make_problem(rows, 14336, 4096, layouts, rhs_source="int8")
  assert xla_times.converting(problem, H200) == pytest.approx(measured, rel=0.1)


# -- Products of one element -------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "emulated"),
    [(((4096,), (4096,)), False), (((4096,), (4096,)), True),
     (((3, 5, 512), (3, 512, 5)), False)],
)
def test_sums_of_products(shapes, emulated, rng):
  """XLA's, without its rounding of each product."""
  a, b = (normal(rng, *shape, dtype="bfloat16") for shape in shapes)
  function = jaxgemm.matmul
  if a.ndim > 1:  # Of rows and columns of a batch.
    function = jax.vmap(jax.vmap(jaxgemm.matmul), (0, 0))
    b = b.swapaxes(1, 2)
  with jaxgemm.emulate() if emulated else contextlib.nullcontext():
    found = jax.jit(function)(a, b)
  wide = [np.asarray(x, np.float64) for x in (a, b)]
  exact = np.sum(wide[0] * wide[1], -1)
  assert found.dtype == a.dtype and found.shape == exact.shape
  assert reference.relative_error(found, exact) < 3.4e-3


@pytest.mark.parametrize("k", [64, 4096, 1 << 22])
@pytest.mark.parametrize("batch", [1, 512])
def test_they_are_xla_s(k, batch):
  problem = make_problem(1, 1, k, batch=batch)
  assert forms.form(problem, H200) == problem.canonical
  a, b = (jax.ShapeDtypeStruct((batch, k), "bfloat16") for _ in range(2))
  with jaxgemm.target("NVIDIA H200"), recording() as record:
    jaxpr = jax.make_jaxpr(jax.vmap(jaxgemm.matmul))(a, b)
    lowered = jax.jit(jax.vmap(jaxgemm.matmul)).trace(a, b).lower(
        lowering_platforms=("cuda",)
    )
  assert any(eqn.primitive.name == "jaxgemm" for eqn in equations(jaxpr.jaxpr))
  (plan,) = record.plans
  assert k == 64 or plan.kernel == "xla"
  assert "stablehlo.dot_general" not in lowered.as_text()

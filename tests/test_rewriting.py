"""accelerate: the products of a function that exists, fused with what follows."""

from __future__ import annotations

import functools
import random

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from tests.product_cases import count_primitives, normal

X, W, V, BIAS = (4, 8, 16), (16, 24), (24, 16), (24,)


def mlp(x, w, v, bias):
  return x + jax.nn.gelu(x @ w + bias) @ v


# A function, the shapes of its operands; how many gemm_p and linear_p are left of it, and
# which operations beside them.
FUSED = {
    "product": (lambda x, w: x @ w, (X, W), (1, 0), ()),
    "factor": (lambda x, w: x @ w * 0.5, (X, W), (1, 0), ()),
    "quotient": (lambda x, w: x @ w / 3, (X, W), (1, 0), ()),
    "bias": (lambda x, w, b: x @ w + b, (X, W, BIAS), (0, 1), ()),
    "bias, in front": (lambda x, w, b: b + x @ w, (X, W, BIAS), (0, 1), ()),
    "bias of a row": (lambda x, w, b: x @ w + b[None], (X, W, BIAS), (0, 1), ()),
    "bias of two axes": (
        lambda x, w, b: jnp.einsum("btd,dhk->bthk", x, w) + b,
        (X, (16, 3, 8), (3, 8)), (0, 1), ()),
    "bias of two axes, stored otherwise": (
        lambda x, w, b: jnp.einsum("btd,dhk->bthk", x, w.transpose(0, 2, 1)) + b,
        ((2, 3, 16), (16, 8, 3), (3, 8)), (0, 1), ()),
    "relu": (lambda x, w, b: jax.nn.relu(x @ w + b), (X, W, BIAS), (0, 1), ()),
    "maximum": (  # Whose slope at 0 is 0.5, and not relu's.
        lambda x, w: jnp.maximum(x @ w, 0), (X, W), (1, 0), ("max",)),
    "widened in between": (
        lambda x, w, b: ((x @ w).astype("float32") + b).astype("float32"),
        (X, W, BIAS), (0, 1), ()),
    "sigmoid in front": (
        lambda x, w: (lambda z: jax.nn.sigmoid(z) * z)(x @ w), (X, W), (0, 1), ()),
    "squared relu": (
        lambda x, w: jnp.square(jax.nn.relu(x @ w)), (X, W), (0, 1), ()),
    "silu": (lambda x, w, b: jax.nn.silu(0.5 * (x @ w) + b), (X, W, BIAS), (0, 1), ()),
    "silu, written out": (
        lambda x, w: (lambda z: z * jax.nn.sigmoid(z))(x @ w), (X, W), (0, 1), ()),
    "gelu": (lambda x, w: jax.nn.gelu(x @ w), (X, W), (0, 1), ()),
    "exact gelu": (
        lambda x, w: jax.nn.gelu(x @ w, approximate=False), (X, W), (0, 1), ()),
    "sigmoid": (lambda x, w: jax.nn.sigmoid(x @ w), (X, W), (0, 1), ()),
    "tanh": (lambda x, w: jnp.tanh(x @ w), (X, W), (0, 1), ()),
    "gated": (
        lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (X, W, W), (0, 1), ()),
    "gated, the other first": (
        lambda x, w, v: (lambda up: up * jax.nn.gelu(x @ w))(x @ v), (X, W, W), (0, 1),
        ()),
    "gated, residual": (
        lambda x, w, v, y: jax.nn.silu(x @ w) * (x @ v) + y,
        (X, W, W, (4, 8, 24)), (0, 1), ()),
    "gated by another's": (
        lambda x, w, v: jax.nn.silu(x @ w) * (jnp.sin(x) @ v), (X, W, W), (1, 1),
        ("mul", "sin")),
    "residual": (lambda x, w, y: y + x @ w, (X, W, (4, 8, 24)), (1, 0), ()),
    "layer": (mlp, (X, W, V, BIAS), (1, 1), ()),
    "two products": (lambda x, w, v: x @ w + (x + 1) @ v, (X, W, W), (2, 0), ("add",)),
    "batch": (
        lambda q, k: 0.25 * jnp.einsum("bqd,bkd->bqk", q, k), (X, X), (1, 0), ()),
    "transposed": (lambda x, w: (x @ w).transpose(2, 0, 1), (X, W), (1, 0), ()),
    "transposed, bias": (
        lambda x, w, b: (x[0] @ w).T + b, (X, W, (8,)), (0, 1),
        ("slice", "squeeze")),
}


def drawn(shapes, rng, dtype="float32"):
  return [normal(rng, *shape, dtype=dtype) for shape in shapes]


def agree(found, wanted, bound=1e-5):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = np.asarray(a), np.asarray(b)
    assert np.linalg.norm((a - b).ravel()) <= bound * np.linalg.norm(b.ravel())


@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused(name, rng):
  function, shapes, (products, layers), left = FUSED[name]
  operands = drawn(shapes, rng)
  with jax.default_matmul_precision("highest"):
    found = jax.jit(jaxgemm.accelerate(function))(*operands)
    agree(found, jax.jit(function)(*operands))
  counts = count_primitives(jaxgemm.accelerate(function), *operands)
  assert counts.pop("jaxgemm", 0) == products
  assert counts.pop("jaxgemm_linear", 0) == layers
  # Constants of the functions aside, and how operands come to lie.
  assert set(counts) <= {*left, "reshape", "transpose", "broadcast_in_dim"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu", "gated", "bias of two axes", "layer"])
def test_kernels(name, rng):
  function, shapes, *_ = FUSED[name]
  operands = drawn(shapes, rng, "bfloat16")
  with jaxgemm.emulate():
    found = jax.jit(jaxgemm.accelerate(function))(*operands)
  with jax.default_matmul_precision("highest"):
    wanted = function(*(x.astype("float32") for x in operands))
  assert reference.relative_error(found, np.asarray(wanted, np.float64)) < 3.4e-3


@pytest.mark.parametrize("order", ["of gradients", "gradients of"])
def test_gradients(order, rng):
  operands = drawn((X, W, V, BIAS), rng)
  loss = lambda function: lambda *x: jnp.sum(jnp.sin(function(*x)))
  with jax.default_matmul_precision("highest"):
    wanted = jax.grad(loss(mlp), range(4))(*operands)
    if order == "of gradients":
      gradients = jaxgemm.accelerate(jax.grad(loss(mlp), range(4)))
    else:
      gradients = jax.grad(loss(jaxgemm.accelerate(mlp)), range(4))
    agree(jax.jit(gradients)(*operands), wanted)
  counts = count_primitives(gradients, *operands)
  assert not counts["dot_general"]
  # Nothing is transposed: gradients of weights lie as these do.
  if order == "of gradients":
    assert counts["jaxgemm"] + counts["jaxgemm_linear"] == 6


NESTED = {
    "jit": lambda x, w: jax.jit(lambda x: jnp.tanh(x @ w))(x),
    "scan": lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w[None]),
    "fori": lambda x, w: lax.fori_loop(0, 2, lambda _, c: c @ w, x),
    "while": lambda x, w: lax.while_loop(
        lambda c: jnp.sum(c * c) < 1e3, lambda c: c @ w + c, x),
    "cond": lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w + 1, lambda: x @ w),
    "checkpoint": jax.checkpoint(lambda x, w: jax.nn.relu(x @ w)),
    "gradient of checkpoint": jax.grad(
        lambda x, w: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(x))),
    "vmap": jax.vmap(lambda x, w: x @ w, (0, None)),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_is_within(name, rng):
  function, (x, w) = NESTED[name], drawn(((4, 16), (16, 16)), rng)
  with jax.default_matmul_precision("highest"):
    agree(jax.jit(jaxgemm.accelerate(function))(x, w), jax.jit(function)(x, w))
  counts = count_primitives(jaxgemm.accelerate(function), x, w)
  assert counts["jaxgemm"] + counts["jaxgemm_linear"] and not counts["dot_general"]


def test_an_inner_jit_is_one_function_still(rng):
  """Called twice, it is lowered once."""
  inner = jax.jit(lambda x, w: x @ w)
  x, w = drawn(((16, 16), (16, 16)), rng)
  jaxpr = jax.make_jaxpr(jaxgemm.accelerate(lambda x, w: inner(inner(x, w), w)))(x, w)
  first, second = (
      equation.params["jaxpr"] for equation in jaxpr.eqns
      if equation.primitive.name == "jit"
  )
  assert first is second


@jax.custom_vjp
def own_derivative(x, w):
  return x @ w


own_derivative.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, ct: (7 * saved[0], 5 * saved[1])
)
# What is left as it is: the function, its operands' shapes and dtype, what counts.
LEFT = {
    "used twice": (
        lambda x, w: (lambda z: (z, z + 1.5))(x @ w), ((8, 16), W), "float32",
        dict(jaxgemm=1, add=1)),
    "a result": (
        lambda x, w: (lambda z: (z, jax.nn.relu(z)))(x @ w), ((8, 16), W), "float32",
        dict(jaxgemm=1)),
    "rows' own": (
        lambda x, w: x @ w + x[:, :1], ((8, 16), W), "float32",
        dict(jaxgemm=1, add=1)),
    "squared": (
        lambda x, w: (lambda z: z * z)(x @ w), ((8, 16), W), "float32",
        dict(jaxgemm=1, mul=1)),
    "integers": (lambda x, w: x @ w + 1, ((8, 16), W), "int32", dict(dot_general=1)),
    "complex": (lambda x, w: x @ w, ((8, 16), W), "complex64", dict(dot_general=1)),
    "of its own derivative": (
        own_derivative, ((8, 16), W), "float32", dict(dot_general=1)),
    "no product": (lambda x, w: x.sum() + w.sum(), ((8, 16), W), "float32", dict(add=1)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name, rng):
  function, shapes, dtype, wanted = LEFT[name]
  operands = [(10 * x).astype(dtype) for x in drawn(shapes, rng)]
  with jax.default_matmul_precision("highest"):
    agree(jax.jit(jaxgemm.accelerate(function))(*operands), jax.jit(function)(*operands))
  counts = count_primitives(jaxgemm.accelerate(function), *operands)
  assert {key: counts[key] for key in wanted} == wanted


def test_a_derivative_of_its_own_stays(rng):
  x, w = drawn(((8, 16), W), rng)
  total = lambda x, w: jnp.sum(jaxgemm.accelerate(own_derivative)(x, w))
  agree(jax.grad(total, (0, 1))(x, w), (7 * x, 5 * w))


@jax.custom_jvp
@jax.jit
def relu(x):
  return jnp.maximum(x, 0)


relu.defjvp(lambda primals, tangents: (relu(primals[0]), 7 * tangents[0]))


def test_an_activation_that_looks_like_ours_keeps_its_derivative(rng):
  x, w = drawn(((8, 16), W), rng)
  total = lambda x, w: jnp.sum(relu(x @ w))
  with jax.default_matmul_precision("highest"):
    agree(jax.grad(jaxgemm.accelerate(total))(x, w), jax.grad(total)(x, w))


WIDENED = {
    # What follows a product; the dtype of the product, and how many conversions stay.
    "at last": (lambda z: z.astype("float32"), "bfloat16", 1),
    "and narrowed": (
        lambda z: (z.astype("float32") + 1.5).astype("bfloat16"), "bfloat16", 2),
    "with a term between": (
        lambda z: (z.astype("float32") + jnp.ones(24)).astype("bfloat16"), "bfloat16", 0),
    "rounded on the way": (
        lambda z: z.astype("bfloat16").astype("float32"), "float32", 1),
}


@pytest.mark.parametrize("name", WIDENED)
def test_conversions(name, rng):
  """What widens at last is left to whoever reads it; what rounds on the way rounds."""
  follows, dtype, left = WIDENED[name]
  x, w = drawn(((8, 16), W), rng, dtype)
  function = jaxgemm.accelerate(lambda x, w: follows(x @ w))
  assert count_primitives(function, x, w)["convert_element_type"] == left
  wanted = follows(x @ w)
  assert function(x, w).dtype == wanted.dtype
  if name == "rounded on the way":
    with jax.default_matmul_precision("highest"):
      assert (jax.jit(function)(x, w) == follows(x @ w)).all()


def test_names_and_metadata_stay(rng):
  x, w, bias = drawn(((8, 16), W, BIAS), rng)

  def function(x, w, bias):
    with jax.named_scope("attention"):
      return jax.nn.relu(x @ w + bias)

  text = jax.jit(jaxgemm.accelerate(function)).lower(x, w, bias).compile().as_text()
  assert "attention" in text


def test_what_has_another_context_is_not_fused(rng):
  x, w, bias = drawn(((8, 16), W, BIAS), rng)

  def function(x, w, bias):
    with set_xla_metadata(of="the product"):
      product = x @ w
    return product + bias

  assert count_primitives(jaxgemm.accelerate(function), x, w, bias)["add"] == 1
  text = jax.jit(jaxgemm.accelerate(function)).lower(x, w, bias).as_text()
  assert "the product" in text


@pytest.mark.parametrize("captured", ["in an inner jit", "in a scan"])
def test_captured_arrays(captured, rng):
  x, w = drawn(((16, 16), (16, 16)), rng)
  matrix = np.asarray(w)
  if captured == "in an inner jit":
    function = lambda x: jax.jit(lambda x: x @ matrix)(x)
  else:
    function = lambda x: lax.scan(lambda c, _: (c @ matrix, None), x, None, length=2)[0]
  with jax.default_matmul_precision("highest"):
    agree(jax.jit(jaxgemm.accelerate(function))(x), jax.jit(function)(x))
  assert not count_primitives(jaxgemm.accelerate(function), x)["dot_general"]


def test_memory_spaces_stay(rng):
  x, w = drawn(((16, 16), (16, 16)), rng)
  device, host = jax.memory.Space.Device, jax.memory.Space.Host

  def function(x, w):
    inner = jax.jit(lambda h: (jax.device_put(h, device) @ w, h))
    return inner(jax.device_put(x, host))

  wanted, found = (
      jax.make_jaxpr(f)(x, w).out_avals for f in (function, jaxgemm.accelerate(function))
  )
  assert [a.memory_space for a in found] == [a.memory_space for a in wanted]


def products_of(function, *operands) -> int:
  counts = count_primitives(function, *operands)
  return sum(counts[name] for name in ("dot_general", "jaxgemm", "jaxgemm_linear"))


@pytest.mark.parametrize(
    ("policy", "batch"),
    [("dots_saveable", False), ("dots_with_no_batch_dims_saveable", False),
     ("dots_with_no_batch_dims_saveable", True), ("nothing_saveable", False)],
)
def test_checkpoint_policies_know_ours(policy, batch, rng):
  shape = (3, 16, 16) if batch else (16, 16)
  x, w = drawn((shape, shape), rng)
  multiply = functools.partial(jnp.einsum, "bij,bjk->bik") if batch else jnp.matmul
  layer = jax.checkpoint(
      lambda c, w: jnp.sin(multiply(jnp.sin(multiply(c, w)), w)),
      policy=getattr(jax.checkpoint_policies, policy),
  )
  loss = lambda x, w: jnp.sum(layer(layer(x, w), w))
  wanted = products_of(jax.grad(loss), x, w)
  assert products_of(jax.grad(jaxgemm.accelerate(loss)), x, w) == wanted
  assert products_of(jaxgemm.accelerate(jax.grad(loss)), x, w) == wanted


def test_kernels_that_are_named_stay(rng):
  x, w = drawn(((8, 16), W), rng, "bfloat16")
  multiply = functools.partial(jaxgemm.matmul, implementation="xla")
  counts = count_primitives(jaxgemm.accelerate(lambda x, w: multiply(x, w)), x, w)
  assert counts["jaxgemm"] == 1  # XLA's dot, which a user names, is one like others.
  with jaxgemm.target("NVIDIA H200"):
    blocked = functools.partial(jaxgemm.matmul, implementation="blocked")
    counts = count_primitives(
        jaxgemm.accelerate(lambda x, w: jax.nn.relu(blocked(x, w))), x, w
    )
  assert counts["jaxgemm"] == 1 and counts["custom_jvp_call"] == 1


def test_overlapping_chains_computed_at_once(rng):
  """Without jit, arrays are let go once nothing needs them, and not before."""
  x, w, v, bias = drawn(((8, 16), W, W, BIAS), rng)

  def function(x, w, v, bias):
    up = jnp.sin(x) @ v
    one, other = x @ w, x @ v
    moved = up * 2 + jnp.cos(bias)
    gate = jax.nn.silu(one)
    last = jnp.tanh(x @ w.at[0].set(1.0) + jnp.broadcast_to(jnp.sin(bias), one.shape))
    return gate * other + moved, last

  with jax.default_matmul_precision("highest"):
    wanted = function(x, w, v, bias)
    for wrap in (jax.jit, lambda f: f):
      agree(wrap(jaxgemm.accelerate(function))(x, w, v, bias), wanted)


def test_trees_names_and_nothing(rng):
  x, w = drawn(((8, 16), W), rng)

  def function(tree, *, scale):
    """What it does."""
    return {"y": tree["x"] @ tree["w"] * 2.0, "none": None, "same": (scale,)}

  accelerated = jaxgemm.accelerate(function)
  assert (accelerated.__name__, accelerated.__doc__) == ("function", "What it does.")
  with jax.default_matmul_precision("highest"):
    wanted = function({"x": x, "w": w}, scale=x)
    agree(accelerated({"x": x, "w": w}, scale=x), wanted)


def test_more_exact_than_apart(rng):
  """What follows is float32, and rounded once."""
  x, w, bias = drawn(((64, 128), (128, 64), (64,)), rng, "bfloat16")
  layer = lambda x, w, bias: jax.nn.silu(x @ w * 0.3 + bias)
  with jax.default_matmul_precision("highest"):
    exact = layer(*(a.astype("float32") for a in (x, w, bias)))
  exact = np.asarray(exact, np.float64)
  with jaxgemm.emulate():
    found = jax.jit(jaxgemm.accelerate(layer))(x, w, bias)
  error = reference.relative_error(found, exact)
  assert error < reference.relative_error(jax.jit(layer)(x, w, bias), exact)


_STEPS = (
    lambda x, y, v: 0.5 * (x @ y), lambda x, y, v: x @ y, lambda x, y, v: x @ y.T,
    lambda x, y, v: x.T, lambda x, y, v: x + y, lambda x, y, v: y + x,
    lambda x, y, v: x + v, lambda x, y, v: x + v[:, None],
    lambda x, y, v: x + jnp.broadcast_to(v, x.shape), lambda x, y, v: -x,
    lambda x, y, v: x / 3, lambda x, y, v: x * y, lambda x, y, v: jax.nn.silu(x),
    lambda x, y, v: jax.nn.gelu(x), lambda x, y, v: jnp.tanh(x),
    lambda x, y, v: jax.nn.relu(x), lambda x, y, v: jnp.einsum("ij,kj->ki", x, y) + v,
)


def drawn_program(seed: int):
  """Of two matrices and a vector: some steps, each mostly of what the last one gave."""

  def function(a, b, v):
    draw, found = random.Random(seed), [a, b]
    for _ in range(draw.randrange(3, 14)):
      x = found[-1] if draw.random() < 0.75 else draw.choice(found)
      found.append(draw.choice(_STEPS)(x, draw.choice(found), v))
    return found[-1], draw.choice(found)

  return function


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_drawn_programs(first, size, rng):
  shapes = (size, size), (size, size), (size,)
  operands = [x / 2 for x in drawn(shapes, rng)]
  with jax.default_matmul_precision("highest"):
    for seed in range(first, first + 10):
      function = drawn_program(seed)
      wanted = function(*operands)
      for wrap in (jax.jit, lambda f: f):
        agree(wrap(jaxgemm.accelerate(function))(*operands), wanted, 2e-4)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_errors_are_the_function_s(wrap):
  with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
    wrap(jaxgemm.accelerate(jnp.matmul))(jnp.ones((3, 4)), jnp.ones((5, 6)))


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
def test_on_the_chip(gradients, rng):
  x, w, v, bias = drawn(((4, 256, 512), (512, 1024), (1024, 512), (1024,)), rng)
  operands = [a.astype("bfloat16") for a in (x, w / 20, v / 30, bias)]
  function = lambda *x: jnp.sum(jnp.sin(mlp(*x).astype("float32")))
  function = jax.grad(function, range(4)) if gradients else mlp
  step = jax.jit(jaxgemm.accelerate(function))
  with jax.default_matmul_precision("highest"):
    wanted = jax.jit(function)(*(a.astype("float32") for a in operands))
  results = (step(*operands), jax.jit(function)(*operands), wanted)
  for ours, theirs, exact in zip(*map(jax.tree.leaves, results), strict=True):
    exact = np.asarray(exact, np.float64)
    baseline = reference.relative_error(theirs, exact)
    assert reference.relative_error(ours, exact) <= 2 * baseline
  assert "mosaic_gpu" in step.lower(*operands).as_text()

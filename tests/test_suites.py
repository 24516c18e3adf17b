"""The suites: their problems, their names and their classes."""

from __future__ import annotations

import collections

from absl import app, flags
from absl.testing import flagsaver
import pytest

from experiments import cli, model_shapes, suites
from pallas_kernels.problem import ALGORITHM_OF_DTYPE, Problem

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


@pytest.mark.parametrize(
    "cases",
    [
        suites.demo_suite(True),
        suites.demo_suite(False),
        suites.issue2_suite(),
        suites.full_suite(),
        suites.random_suite(200, 1, 8192),
    ],
    ids=["demo on a GPU", "demo on a CPU", "issue2", "full", "random"],
)
def test_a_suite_names_each_problem_once(cases):
  names = [case.name for case in cases]
  assert len(set(names)) == len(names)
  assert len({case.problem for case in cases}) == len(cases)
  for case in cases:
    assert case.klass == suites.classify(case.problem)


def test_neighbours_of_odd_problems_are_aligned():
  odd, near = suites.neighbours_suite()[::2], suites.neighbours_suite()[1::2]
  assert len(odd) == len(near) == 17
  for one, other in zip(odd, near, strict=True):
    assert one.klass == "odd" != other.klass == suites.classify(other.problem)
    assert other.name == f"{one.name} aligned"
    assert other.problem.layouts == one.problem.layouts
    for name in ("m", "n", "k"):
      size, aligned = getattr(one.problem, name), getattr(other.problem, name)
      assert aligned % 64 == 0 and abs(size - aligned) <= 32 or aligned == size == 1


@pytest.mark.parametrize(
    "klass, sizes",
    [
        ("large", dict(m=4096, n=4096, k=4096)),
        ("large", dict(m=520, n=16384, k=1024)),
        ("large", dict(m=4096, n=4096, k=64)),  # Its result is.
        ("small", dict(m=1536, n=1536, k=1536)),
        ("medium", dict(m=512, n=16384, k=8192)),
        ("medium", dict(m=8192, n=128, k=1024)),
        ("skinny", dict(m=120, n=2048, k=2048)),
        ("skinny", dict(m=1, n=4096, k=4096)),
        ("skinny", dict(m=4, n=4096, k=4096)),
        ("deep", dict(m=512, n=256, k=5120)),
        ("medium", dict(m=512, n=256, k=5112)),
        ("large", dict(m=2048, n=1032, k=32768)),
        ("small", dict(m=1000, n=1000, k=1000)),
        ("small", dict(m=1, n=128, k=128)),
        ("skinny", dict(m=1, n=1032, k=128)),
        ("odd", dict(m=4096, n=4096, k=4097)),
        ("odd", dict(m=9, n=4096, k=4096)),
        ("odd", dict(m=1, n=1, k=128)),
        ("odd", dict(m=4, n=4096, k=4096, layouts="TN")),
        ("batched", dict(m=33, n=33, k=33, batch=2)),
    ],
)
def test_classes(klass, sizes):
  assert suites.make_case(**sizes).klass == klass


def test_the_full_suite_is_large_and_varied():
  cases = suites.full_suite()
  assert 140 <= len(cases) <= 200
  count = collections.Counter(case.klass for case in cases)
  assert set(count) == set(suites.CLASSES) and min(count.values()) >= 10
  assert {case.problem.layouts for case in cases} == set(suites.LAYOUTS)
  dtypes = collections.Counter(case.problem.dtype for case in cases)
  assert set(dtypes) == {"bfloat16", "float16"} and dtypes["float16"] >= 10
  assert max(case.problem.flops for case in cases) < 10e12
  # No problem needs memory in which its inputs could not rotate.
  assert max(case.problem.num_bytes for case in cases) < 4 << 30
  parts = {tuple(case.name.split(".")[::3]) for case in cases if "." in case.name}
  models = {"llama3-8b", "llama3-70b", "mixtral", "deepseek-v3", "gemma-7b", "gpt2"}
  assert parts >= {(model, "fwd") for model in {*models, "vit-l"}}
  assert {direction for _, direction in parts} >= {"fwd", "dx", "dw"}
  tokens = {case.name.split(".")[2] for case in cases if "." in case.name}
  assert tokens >= {f"t{2**i}" for i in range(14)}


def _shape(name) -> tuple:
  (found,) = [shape for shape in model_shapes.shapes() if shape.name == name]
  return found.m, found.n, found.k, found.layouts, found.batch


def test_the_products_of_a_model():
  assert _shape("llama3-8b.qkv.t16.fwd") == (16, 6144, 4096, "NN", 1)
  assert _shape("llama3-8b.qkv.t512.dx") == (512, 4096, 6144, "NT", 1)
  assert _shape("llama3-8b.qkv.t8192.dw") == (4096, 6144, 8192, "TN", 1)
  # GPT-2's output layer is its embedding, stored [vocabulary, width].
  assert _shape("gpt2.head.t8192.fwd") == (8192, 50257, 768, "NT", 1)
  assert _shape("gpt2.head.t8192.dx") == (8192, 768, 50257, "NN", 1)
  assert _shape("gpt2.head.t8192.dw") == (50257, 768, 8192, "TN", 1)
  assert _shape("mixtral.experts_up.t64.fwd") == (64, 14336, 4096, "NN", 8)
  assert _shape("gpt2.scores.t1024.fwd") == (1024, 1024, 64, "NT", 96)
  assert _shape("gpt2.values.t1024.fwd") == (1024, 64, 1024, "NN", 96)
  assert _shape("gpt2.values.t1024.dv") == (1024, 64, 1024, "TN", 96)


def test_random_suite_draws_from_what_it_is_given():
  cases = suites.random_suite(80, 1, 8192, dtypes=["bfloat16", "float16"])
  assert len(cases) == 80
  assert {case.problem.dtype for case in cases} == {"bfloat16", "float16"}
  assert {case.problem.layouts for case in cases} == set(suites.LAYOUTS)
  (layouts,) = {c.problem.layouts for c in suites.random_suite(20, 1, 512, ["NT"])}
  assert layouts == "NT"


def test_random_suite():
  cases = suites.random_suite(120, 3, 1024)
  assert cases == suites.random_suite(120, 3, 1024)
  assert cases != suites.random_suite(120, 4, 1024)
  assert cases[:50] == suites.random_suite(50, 3, 1024)
  sizes = [(case.problem.m, case.problem.n, case.problem.k) for case in cases]
  odd = [any(size % 2 for size in three) for three in sizes]
  assert odd == [i % 3 == 0 for i in range(120)]
  assert all(size % 2 or size % 8 == 0 for three in sizes for size in three)
  assert 1 <= min(map(min, sizes)) and max(map(max, sizes)) <= 1024
  for values, seen in (
      (suites.LAYOUTS, {case.problem.layouts for case in cases}),
      (ALGORITHM_OF_DTYPE, {case.problem.dtype for case in cases}),
  ):
    assert seen == set(values)
  assert 0 < sum(case.klass == "batched" for case in cases) < 40


def test_parse_shape():
  cases = suites.parse_shape("3,64,128,32:NT+TN", ["NN"], ["float16", "float32"])
  assert [case.name for case in cases] == [
      "3x64x128x32 NT float16", "3x64x128x32 NT float32",
      "3x64x128x32 TN float16", "3x64x128x32 TN float32",
  ]
  assert cases[0].problem == Problem(
      64, 128, 32, batch=3, rhs_layout="k-major", dtype="float16",
      out_dtype="float16", algorithm="f16_f32",
  )
  assert [case.name for case in suites.parse_shape("8,16,24", ["TT"])] == [
      "8x16x24 TT bfloat16"
  ]


@pytest.mark.parametrize(
    "text", ["", "1,2", "1,2,3,4,5", "8,8,0", "8,8,x", "8,8,8:", "8,8,8:NX"]
)
def test_parse_shape_says_what_is_wrong(text):
  with pytest.raises(ValueError, match="of the form"):
    suites.parse_shape(text)


def test_select():
  cases = suites.demo_suite(False)
  assert suites.select(cases, None, None) == cases
  kept = suites.select(cases, ["NT"], ["float32"])
  assert [case.name for case in kept] == ["8x128x192 NT float32"]
  kept = suites.select(cases, classes=["batched", "odd"])
  assert [case.klass for case in kept] == ["odd", "batched"]


def _cases(*arguments) -> list[str]:
  with flagsaver.flagsaver():
    flags.FLAGS(["program", *arguments])
    platform = cli.Platform(True, None, "a GPU")
    return [case.name for case in cli.cases(platform)[1]]


def test_flags_choose_cases():
  whole = [case.name for case in suites.full_suite()]
  assert _cases("--suite=full") == whole
  parts = [_cases("--suite=full", f"--part={i}/3") for i in (1, 2, 3)]
  assert sorted(sum(parts, [])) == sorted(whole)
  assert max(map(len, parts)) - min(map(len, parts)) <= 1
  deep = suites.select(suites.full_suite(), classes=["deep"])
  assert _cases("--suite=full", "--classes=deep") == [case.name for case in deep]
  drawn = _cases("--suite=random", "--draw=9", "--dtypes=float16", "--layouts=NT,TN")
  assert len(drawn) == 9 and all(name.endswith(" float16") for name in drawn)


@pytest.mark.parametrize(
    "argument", ["--part=0/3", "--part=4/3", "--part=1", "--part=-1/3", "--part=9/9"]
)
def test_flags_that_choose_nothing(argument):
  with pytest.raises(app.UsageError, match="part|no problem"):
    _cases("--suite=full", "--classes=deep", "--layouts=TT,NT", argument)


@pytest.mark.parametrize(
    "precision, algorithm",
    [("default", "tf32_f32"), ("high", "bf16_x3"), ("highest", "bf16_x6")],
)
def test_precision_of_float32_cases(precision, algorithm):
  single, half = (suites.make_case(64, 64, 64, dtype=d) for d in ("float32", "float16"))
  found = suites.at_precision(single, precision)
  assert found.problem.algorithm == algorithm
  assert (found.name == single.name) == (precision == "default")
  assert suites.at_precision(half, precision) == half

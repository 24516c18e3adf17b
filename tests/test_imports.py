"""Who imports whom, that importing is cheap, and that cited paths exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "jaxgemm", "experiments", "tests")

# Of jaxgemm's own modules, each may import only those before it.
LAYERS = (
    ("device", "arguments", "operand_passes", "cost_constants", "equations", "exactness"),
    ("work", "rms_norm"),
    ("traffic",),
    ("cost_model", "tile_shapes", "ring_slots", "tile_orders", "multicasts"),
    ("xla_times", "kernel_configs"),
    ("contexts", "table", "heuristics", "dims", "precision", "reference", "quantisation"),
    (
        "triton_heuristics", "grouped_heuristics", "user_table", "invariance",
        "recording", "stored",
    ),
    ("plan", "product", "checkpoint_policies", "forms"),
    ("launch", "explaining"),
    ("lowering",),
    ("layouts",),
    ("partitioning", "converted", "lowering_rules"),
    ("passes", "planned"),
    ("primitive", "cotangents"),
    ("summed", "passed_by"),
    ("gradients", "scaled_product"),
    ("ragged_product",),
    ("fused",),
    ("contraction", "normed"),
    ("api", "autotune", "ragged"),
    ("scaled", "layers", "einsums", "ragged_chains"),
    ("scaled_ragged", "losses", "mlp", "chains"),
    ("rewriting",),
    ("__init__",),
)
KERNEL_IMPORTERS = {
    "cost_model", "cotangents", "exactness", "grouped_heuristics", "heuristics",
    "invariance", "kernel_configs", "launch", "losses", "multicasts", "operand_passes",
    "passed_by", "plan", "ring_slots", "table", "tile_orders", "tile_shapes", "traffic",
    "triton_heuristics", "user_table", "work", "xla_times",
}
# A checkout has suites to tune for; a wheel has none, and must not miss them.
SUITES_IMPORTER = ROOT / "jaxgemm" / "autotune" / "problems.py"


def _imports(path: Path, *, at_import: bool = False) -> set[str]:
  """Dotted names of all that a file imports, `from a import b` as a.b.

  With `at_import` only what it imports at the outermost level.
  """
  names = set()
  tree = ast.parse(path.read_text(encoding="utf-8"))
  for node in tree.body if at_import else ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path} has a relative import"
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def _modules(package: str) -> dict[str, set[str]]:
  """What each module imports; a package within the package counts as one module."""
  modules: dict[str, set[str]] = {}
  for path in (ROOT / package).rglob("*.py"):
    first = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
    modules.setdefault(first, set()).update(_imports(path))
  return modules


def test_kernels_import_nothing_of_the_library():
  for module, names in _modules("pallas_kernels").items():
    for name in names:
      assert not name.startswith(("jaxgemm", "experiments", "tests")), (module, name)


@pytest.mark.parametrize("module", ["problem", "configs"])
def test_problem_and_configs_are_leaves(module):
  names = _modules("pallas_kernels")[module]
  assert not any(name.startswith("pallas_kernels") for name in names)


def test_library_imports_neither_experiments_nor_tests():
  for path in (ROOT / "jaxgemm").rglob("*.py"):
    names = _imports(path, at_import=path == SUITES_IMPORTER)
    for name in names:
      assert not name.startswith(("experiments", "tests")), (path, name)
  late = _imports(SUITES_IMPORTER) - _imports(SUITES_IMPORTER, at_import=True)
  assert late == {"experiments.suites"}


@pytest.mark.parametrize("name", ["filelock", "platformdirs", "tqdm"])
def test_what_only_the_tuner_needs_is_imported_late(name):
  for path in (ROOT / "jaxgemm").rglob("*.py"):
    for imported in _imports(path, at_import=True):
      assert imported.split(".")[0] != name, path


def test_imports_within_the_library_go_one_way():
  modules = _modules("jaxgemm")
  level = {module: i for i, layer in enumerate(LAYERS) for module in layer}
  assert set(modules) == set(level), "give every module of jaxgemm its layer here"
  for module, names in modules.items():
    for name in names:
      if name.startswith("jaxgemm."):
        imported = name.split(".")[1]
        if imported not in level:  # `from jaxgemm import x` names a module.
          raise AssertionError(f"jaxgemm/{module}.py imports {name}")
        if imported == module:  # Files of one package.
          continue
        assert level[imported] < level[module], (module, name)


def test_only_heuristics_plan_and_table_import_kernels():
  for module, names in _modules("jaxgemm").items():
    used = {n.split(".")[1] for n in names if n.startswith("pallas_kernels.")}
    if module not in KERNEL_IMPORTERS:
      assert not used - {"problem", "configs", "compat", "activations"}, (
          module, used
      )


def test_private_jax_is_imported_by_compat_alone():
  for package in ("pallas_kernels", "jaxgemm"):
    for module, names in _modules(package).items():
      private = {n for n in names if n.startswith("jax._src")}
      assert not private or module == "compat", (package, module, private)


def test_programs_are_imported_together():
  """Each flag is of one program: absl would refuse the second."""
  for module in (*_modules("experiments"), "lab.__main__"):
    if not module.startswith("adoption") and module != "transformer_nnx":
      importlib.import_module(f"experiments.{module}")


def test_init_only_exports():
  tree = ast.parse((ROOT / "jaxgemm" / "__init__.py").read_text(encoding="utf-8"))
  for node in tree.body:
    if isinstance(node, ast.ImportFrom):
      assert all(alias.asname == alias.name for alias in node.names)
    else:
      assert isinstance(node, ast.Expr | ast.Assign), ast.dump(node)


def test_importing_starts_no_backend():
  code = (
      "import jaxgemm, pallas_kernels\n"
      "from jax._src import xla_bridge\n"
      "assert not xla_bridge.backends_are_initialized()\n"
  )
  subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


def _documents() -> list[Path]:
  paths = [path for path in ROOT.glob("*.md")]
  for package in PACKAGES:
    paths += (ROOT / package).rglob("*.py")
  return sorted(paths)


@pytest.mark.parametrize(
    "path", _documents(), ids=lambda path: str(path.relative_to(ROOT))
)
def test_cited_paths_exist(path):
  """Every file that a document or a docstring names lies where it says."""
  text = path.read_text(encoding="utf-8")
  cited = re.findall(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})/[\w./-]*\w", text)
  for name in cited:
    if not re.search(r"[A-Z]{3}", Path(name).name):  # As in NAME.jsonl.
      assert (ROOT / name).exists(), f"{path.name} cites {name}"


@pytest.mark.parametrize("package", ["pallas_kernels", "jaxgemm"])
def test_packages_are_typed(package):
  assert (ROOT / package / "py.typed").exists()

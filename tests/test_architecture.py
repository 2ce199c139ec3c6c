"""The architecture as a test: which file may import which, who may touch Transformers' private parts, how long files are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "hf_specdec"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lower layers may not import higher ones. A module belongs to the longest name here that it starts with.
LAYERS = {
    "hf_specdec.config": 0,
    "hf_specdec.errors": 0,
    "hf_specdec.stats": 0,
    "hf_specdec.outputs": 0,
    "hf_specdec.tools.gain": 0,  # formulas, which the selection uses too
    "hf_specdec.engine": 1,
    "hf_specdec.drafters": 2,
    "hf_specdec.proposing": 3,
    "hf_specdec.decoding": 4,
    "hf_specdec.selection": 5,
    "hf_specdec.request": 5,
    "hf_specdec.support": 5,
    "hf_specdec.routing": 5,
    "hf_specdec.hook": 5,
    "hf_specdec": 6,  # __init__.py, the list of public names
    "hf_specdec.auto": 7,
    "hf_specdec.training": 7,
    "hf_specdec.tools": 7,
    "hf_specdec.check": 7,
    "hf_specdec.web": 8,
    "hf_specdec.cli": 9,
    "hf_specdec.__main__": 10,
}
MAY_TOUCH_PRIVATE_PARTS = {"engine/compat.py", "engine/cache.py", "hook.py", "outputs.py"}
INTERNAL_MODULES = ("transformers.cache_utils", "transformers.generation.utils")
MAX_LINES = 400


def module_name(file: Path) -> str:
    parts = ("hf_specdec", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    """The layer of one of our modules."""
    while module not in LAYERS:
        module = module.rpartition(".")[0]
        assert module != "hf_specdec", f"a new top-level module: give it a place in {__name__}.LAYERS"
    return LAYERS[module]


def typing_only(tree: ast.Module) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING:`; it isn't imported at run time."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found.update(child for statement in node.body for child in ast.walk(statement))
    return found


def imports(file: Path) -> Iterator[tuple[str, str | None, int]]:
    """Yield (module, imported name or `None`, line) of every run-time import, those inside functions included."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped = typing_only(tree)
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield module, alias.name, node.lineno


def resolve(module: str, name: str | None) -> str:
    """`from .engine import compat` imports the module hf_specdec.engine.compat; `from .errors import X` hf_specdec.errors."""
    if name is not None:
        path = PACKAGE.parent.joinpath(*module.split("."), name)
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return f"{module}.{name}"
    return module


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file: Path) -> None:
    own = module_name(file)
    for module, name, line in imports(file):
        target = resolve(module, name)
        if target == "hf_specdec" or target.startswith("hf_specdec."):
            assert layer(target) <= layer(own), f"{file}:{line}: {own} may not import {target}"


def test_no_import_cycles() -> None:
    graph = {
        module_name(file): {
            target for module, name, _ in imports(file) if (target := resolve(module, name)) != "hf_specdec"
        }
        for file in FILES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join([*path, module])}"
        if module not in done:
            for target in graph.get(module, ()):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_parts_of_transformers(file: Path) -> None:
    if file.relative_to(PACKAGE).as_posix() in MAY_TOUCH_PRIVATE_PARTS:
        return
    for module, name, line in imports(file):
        if module != "transformers" and not module.startswith("transformers."):
            continue
        full = f"{module}.{name or ''}"
        private = any(part.startswith("_") for part in full.split("."))
        internal = any(f"{full}.".startswith(f"{bad}.") for bad in INTERNAL_MODULES)
        allowed = not private and not internal
        assert allowed, f"{file}:{line}: import {full} in engine/compat.py instead"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_are_short(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{file} has {lines} lines"


def imported_by(statement: str) -> set[str]:
    """Names of the top-level modules in memory after a statement in a new process."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_command_line_starts_without_torch() -> None:
    assert not imported_by("import hf_specdec.cli") & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_the_page_needs_its_extra(file: Path) -> None:
    """What it shows and records is tested, and used, without Gradio."""
    if file.relative_to(PACKAGE).as_posix() not in (
        "web/app.py",
        "web/controls.py",
        "web/theme.py",
        "web/zerogpu.py",
        "cli/demo.py",
    ):
        assert not {module.partition(".")[0] for module, _, _ in imports(file)} & {"gradio", "pandas"}


def test_import_patches_nothing() -> None:
    code = (
        "from transformers.generation import utils\n"
        "from transformers import GenerationConfig\n"
        "before = dict(utils.GENERATION_MODES_MAPPING), set(vars(GenerationConfig)), utils.GenerationMixin.generate\n"
        "import hf_specdec\n"
        "hf_specdec.enable, hf_specdec.SpecConfig\n"
        "after = dict(utils.GENERATION_MODES_MAPPING), set(vars(GenerationConfig)), utils.GenerationMixin.generate\n"
        "assert before == after"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Tests that keep the house: layout, words, sizes, links, documentation of flags, import contracts."""

from __future__ import annotations

import ast
import operator
import re
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from kvtier_operator import errors as operator_errors
from kvtier_worker import errors
from kvtier_worker.contract import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "worker" / "src", ROOT / "operator" / "src")
TEXT_SUFFIXES = {".py", ".md", ".sh", ".toml", ".yaml", ".yml", ".cfg", ".ini", ".txt", ".json", ""}

# In pieces, so that this file does not hold them.
FORBIDDEN = (
    "/wo" + "rk/",
    "py" + "pi.org",
    "pythonhos" + "ted",
    "registry.np" + "mjs",
    "crates" + ".io",
    "Cla" + "ude",
    "Anthro" + "pic",
    "shared/" + "spec",
    "shared/" + "anchors",
)
ISSUE_REFERENCE = re.compile(r"\b(?:issue|" + r"ticket) #?\d+", re.IGNORECASE)
UNFINISHED = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|X" + "XX|HA" + r"CK)\b")
SHAPELESS_NAMES = {"utils", "util", "helpers", "common", "misc", "base"}
MAX_LINES_WITHOUT_REASON = 500
REASON_FOR_LENGTH = "Long because"
"""A module docstring that holds this gives the reason why the file is longer."""
MAX_FUNCTION_LINES = 80


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(path for name in sorted(set(listed)) if (path := ROOT / name).is_file())


def text_files() -> Iterator[tuple[str, str]]:
    """Relative name and content of every text file."""
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def source_files() -> list[Path]:
    """Every Python file of the two packages."""
    return [path for folder in SOURCES for path in sorted(folder.rglob("*.py"))]


def documents() -> list[Path]:
    """Every Markdown file."""
    return [path for path in tracked_files() if path.suffix == ".md"]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines, docstring not counted, of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


def test_the_standard_library_keeps_its_operator_module() -> None:
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    assert operator.__file__ is not None
    assert Path(operator.__file__).is_relative_to(standard_library)


def test_python_under_operator_lives_in_its_src_only() -> None:
    """An ``operator/__init__.py`` or ``operator/conftest.py`` would replace the standard library's module."""
    strays = [path for path in (ROOT / "operator").rglob("*.py") if "src" not in path.relative_to(ROOT).parts]
    assert strays == []


def test_mirror_folders_of_tests_carry_package_names() -> None:
    assert not (ROOT / "tests" / "operator").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_file_names_private_paths_or_registries() -> None:
    found = [(name, word) for name, text in text_files() for word in FORBIDDEN if word in text]
    assert found == []


def test_no_file_refers_to_issue_numbers() -> None:
    found = [(name, match.group()) for name, text in text_files() for match in ISSUE_REFERENCE.finditer(text)]
    assert found == []


def test_nothing_is_left_unfinished_in_words() -> None:
    found = [(name, match.group()) for name, text in text_files() for match in UNFINISHED.finditer(text)]
    assert found == []


def test_modules_are_named_after_what_they_hold() -> None:
    assert [str(path) for path in source_files() if path.stem in SHAPELESS_NAMES] == []


def test_files_are_short_or_say_why_not() -> None:
    long_ones = []
    for path in [path for path in tracked_files() if path.suffix == ".py"]:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MAX_LINES_WITHOUT_REASON and REASON_FOR_LENGTH not in (
            ast.get_docstring(ast.parse(text)) or ""
        ):
            long_ones.append((str(path.relative_to(ROOT)), text.count("\n")))
    assert long_ones == []


def test_the_median_file_fits_two_screens() -> None:
    lengths = [count for path in source_files() if (count := path.read_text(encoding="utf-8").count("\n")) > 1]
    assert statistics.median(lengths) <= 150


def test_functions_are_short() -> None:
    lengths = [(length, name, path.name) for path in source_files() for name, length in functions(path)]
    assert [item for item in lengths if item[0] > MAX_FUNCTION_LINES] == []
    short = sum(length <= 30 for length, _, _ in lengths)
    assert short >= 0.9 * len(lengths)


def test_both_packages_are_typed() -> None:
    for package in ("worker/src/kvtier_worker", "operator/src/kvtier_operator"):
        assert (ROOT / package / "py.typed").exists()


def test_every_module_says_what_it_is_for() -> None:
    undocumented = [str(path) for path in source_files() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert undocumented == []


def test_every_flag_is_documented_with_a_sentence() -> None:
    short = [item.name for item in fields(WorkerSettings) if len(item.metadata["help"].split()) < 3]
    assert short == []


@pytest.mark.parametrize("page", ["crd", "flags", "metrics"])
def test_rendered_pages_are_current(page: str) -> None:
    command = [sys.executable, f"scripts/render_{page}.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", [errors, operator_errors], ids=lambda module: module.__name__)
def test_the_error_tree_names_every_error(module: ModuleType) -> None:
    defined = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__
    }
    assert defined
    assert module.__doc__ is not None
    assert {name for name in defined if not re.search(rf"\b{name}\b", module.__doc__)} == set()


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_documents_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


PATH_IN_TEXT = re.compile(
    r"`((?:worker|operator|tests|bench|docs|scripts|examples|crds|kvtier_worker|kvtier_operator)/[\w./-]+)`"
)


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_named_in_documents_exist(document: Path) -> None:
    """Also `kvtier_worker/…`, which lies below `worker/src`."""
    roots = (ROOT, *SOURCES)
    named = set(PATH_IN_TEXT.findall(document.read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not any((root / path).exists() for root in roots)] == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_named_in_documents_exist(document: Path) -> None:
    """Documents prove their claims with tests: `path/to/test_file.py::test_name`, or the name alone."""
    named = set(re.findall(r"\b(test_\w+)\b(?!\.py)", document.read_text(encoding="utf-8")))
    stems = {path.stem for path in tracked_files()}
    assert sorted(named - names_of_tests() - stems) == []


@cache
def names_of_tests() -> frozenset[str]:
    """Names of all test functions."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names |= {name for name, _ in functions(path) if name.startswith("test_")}
    return frozenset(names)


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_changelog_starts_with_the_version_being_built() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(newer != older for newer, older in pairwise(headings))

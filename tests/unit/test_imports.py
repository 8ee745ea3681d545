"""Imports point one way, and torch is where the device is.

    protocol, config <- scheduler, pipeline, pages, prefix cache, grammar <- model, kernels
                     <- streams, slots, sampler, runner <- engine <- server

A stub of Triton that loaded torch would take seconds and gigabytes more, each; a pure module that did could no longer
be tested in milliseconds; and a client that needed the back end could not be installed without it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import photon_client
import pytest

import photon_backend

ROOT = Path(photon_backend.__file__).parent
CLIENT = Path(photon_client.__file__).parent

PURE = [
    "protocol",
    "config",
    "engine.scheduler",
    "engine.pipeline",
    "engine.pages",
    "engine.prefix_cache",
    "engine.sequence",
    "engine.book",
    "engine.intake",
    "engine.constraints",
    "grammar.spatial",
    "grammar.constraint",
    "grammar.compiler",
    "grammar.matcher",
    "grammar.check",
    "grammar.automaton",
    "grammar.regular",
    "grammar.json_text",
    "grammar.dfa",
    "grammar.spelling",
    "model.config",
    "model.crops",
    "model.tokenizer",
]
STUBS = [
    "frontend.handler",
    "frontend.link",
    "frontend.tensors",
    "frontend.session",
    "frontend.options",
    "frontend.prompts",
    "frontend.images",
    "frontend.detokenizer",
    "supervisor",
    "metrics",
    "numbers",
    "draining",
]
LAUNCHER = ["serve", "layout", "alive", "processes"]

# What a package may import beside itself, and why where the line above does not say it.
MAY_IMPORT = {
    "grammar": {
        "protocol": "",
        "model.config": "sizes and special ids, which are plain numbers",
    },
    "model": {"protocol": "", "config": "", "grammar": ""},
    "kernels": {"grammar.spatial": "numbers of the states"},
    "engine": {
        **dict.fromkeys(("protocol", "config", "grammar", "model", "kernels"), ""),
        "log": "the process's log lines",
        "processes": "the process ends with its parent",
    },
    "frontend": {
        **dict.fromkeys(("protocol", "config"), ""),
        "model.config": "sizes and special ids, which are plain numbers",
        "model.crops": "pictures are cut where it costs the engine nothing; numpy",
        "model.tokenizer": "so are texts turned into ids and back",
        "grammar.matcher": "a grammar that does not compile is refused before it reaches the engine",
        **dict.fromkeys(("log", "alive", "draining", "numbers", "processes"), "what every stub of Triton does"),
    },
}
# Shared by the supervisor, a stub, with the engine that it starts: numbers and names only.
OF_ENGINE_FOR_STUBS = {"exit_codes", "trace"}
# These know rows, pages and slots, nothing of requests; the stepper is where the two meet.
DEVICE = ["streams", "slots", "sampler", "runner", "rows", "kv_cache", "tables"]
DEVICE += ["capture", "fused", "fused_region", "fused_vision", "graphs", "prefill_graphs", "vision_graphs"]
OF_REQUESTS = {
    f"engine.{name}"
    for name in ["scheduler", "pipeline", "sequence", "book", "intake", "constraints", "engine", "stepper"]
}


def imported(path: Path) -> set[str]:
    """Modules of the back end that a file imports when it runs, without `photon_backend.`; not those for types only."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in for_types]
    return {name.removeprefix("photon_backend.") for node in nodes for name in _names(node) if _is_ours(name)}


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            module = ROOT.parent / node.module.replace(".", "/") / f"{alias.name}.py"
            yield f"{node.module}.{alias.name}" if module.exists() else node.module


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "photon_backend"


def loaded(modules: list[str], prefix: str = "photon_backend.") -> dict[str, set[str]]:
    """By module, what it brought into an interpreter that had imported those before it; Triton's module is empty."""
    code = f"""
import importlib, sys
from unittest.mock import MagicMock
sys.modules["triton_python_backend_utils"] = MagicMock()
before = set(sys.modules)
for name in {modules}:
    importlib.import_module("{prefix}" + name)
    print(name, *(set(sys.modules) - before))
    before = set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {words[0]: set(words[1:]) for words in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize("modules", [PURE, STUBS, LAUNCHER], ids=["pure", "stubs", "launcher"])
def test_no_torch(modules: list[str]) -> None:
    found = loaded(modules)
    assert list(found) == modules
    assert [name for name, brought in found.items() if "torch" in brought] == []


def test_stubs_load_nothing_of_the_engine_but_names() -> None:
    brought = set.union(*loaded(STUBS).values())
    modules = {
        name.removeprefix("photon_backend.engine.") for name in brought if name.startswith("photon_backend.engine.")
    }
    assert modules <= OF_ENGINE_FOR_STUBS


def test_the_client_loads_nothing_of_the_back_end() -> None:
    modules = [path.stem for path in sorted(CLIENT.glob("*.py")) if path.stem != "__init__"]
    brought = set.union(*loaded(modules, "photon_client.").values())
    assert {name.split(".")[0] for name in brought} & {"torch", "photon_backend"} == set()
    assert "photon_client.aio" in brought


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_directions(package: str) -> None:
    allowed = {package, *MAY_IMPORT[package]}
    wrong = [
        f"{path.stem} -> {name}"
        for path in sorted((ROOT / package).glob("*.py"))
        for name in sorted(imported(path))
        if not any(name == other or name.startswith(f"{other}.") for other in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", DEVICE)
def test_what_runs_on_the_device_knows_no_requests(name: str) -> None:
    path = ROOT / "engine" / f"{name}.py"
    assert not path.exists() or imported(path) & OF_REQUESTS == set()


def test_the_tests_see_imports_at_all() -> None:
    assert imported(ROOT / "engine" / "stepper.py") >= {"config", "engine.scheduler", "engine.streams"}
    assert "engine.tables" not in imported(ROOT / "engine" / "sequence.py"), "for types only"

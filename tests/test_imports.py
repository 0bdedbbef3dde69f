"""Which module may import which: the order of the rooms as one list, proven on the syntax tree and in processes.

The syntax tree shows every import, those inside functions and those for type checkers included; a fresh process shows
what importing a package loads, and so what it costs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import looped_lm

ROOT = Path(looped_lm.__file__).parent.parent
SIBLINGS = {"looped_lm", "callbacks", "datamodules", "configs", "fitting"}
#: Rooms from the lowest to the highest. A room imports itself and those below it; those in one tuple are strangers.
ORDER: dict[str, list[tuple[str, ...]]] = {
    "looped_lm": [
        ("common",), ("loop",), ("seams",), ("model",), ("runs",), ("training",), ("sharing",), ("generation",),
        ("evaluation", "conformance"), ("configuration",), ("sweeps",), ("commands",), ("cli",), ("__main__",),
    ],
    "fitting": [
        ("records", "errors"), ("data",), ("published",), ("laws",), ("estimation",), ("studies",), ("report",),
        ("commands",), ("__main__",),
    ],
}  # fmt: skip
#: `LoopedTransformer.from_pretrained` calls what reads exported folders, which builds a LoopedTransformer.
UPWARD = {("looped_lm.model.transformer", "looped_lm.sharing.load")}
#: What a package may import of its siblings. The schema of run records is common ground.
COMMON_GROUND = "fitting.records"
ALLOWED = {"looped_lm": set(), "datamodules": set(), "fitting": set(), "callbacks": {"looped_lm"}}
#: Modules that import a package of an extra, which need not be installed.
EXTRAS = {"datamodules.tokenizer_files", "looped_lm.evaluation.harness"}


# ---- Reading imports ------------------------------------------------------------------------------------------------


def modules_of(root: Path, package: str) -> dict[str, Path]:
    """Every module of a package with its file."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        found[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def public_names(package: str) -> dict[str, str]:
    """Public names of a package that load on first use, with the module that each comes from."""
    module = import_module(package)
    table = getattr(module, "_EXPORTS", None) or getattr(module, "_PUBLIC", None) or {}
    return {name: f"{package}.{home}" for name, home in table.items()}


def imported(path: Path, known: dict[str, Path], public: Callable[[str], dict[str, str]]) -> Iterator[str]:
    """Modules of ours that a file imports, wherever in it, also by `import_module` with a text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: a relative import"
            homes = public(node.module) if node.module in SIBLINGS else {}
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if alias.name != "__version__":
                    yield homes.get(alias.name, inner if inner in known else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            text = node.args[0]
            if isinstance(text, ast.JoinedStr) and isinstance(text.values[0], ast.Constant):
                text = text.values[0]
            if isinstance(text, ast.Constant):
                yield str(text.value).rstrip(".")


def graph(
    root: Path, packages: list[str], public: Callable[[str], dict[str, str]] = public_names
) -> dict[str, set[str]]:
    """What each module of the packages imports of ours."""
    known = {name: path for package in sorted(SIBLINGS) for name, path in modules_of(root, package).items()}
    edges = {}
    for name, path in known.items():
        if name.split(".")[0] in packages:
            found = {m for m in imported(path, known, public) if m.split(".")[0] in SIBLINGS}
            edges[name] = found - {name}
    return edges


def room(module: str) -> str | None:
    """The room of a module; None for a package itself."""
    return module.split(".")[1] if "." in module else None


def against_the_order(edges: dict[str, set[str]], order: dict[str, list[tuple[str, ...]]]) -> list[str]:
    """Imports of a higher room, of a neighbour in one tuple, or of a package's own surface from inside it."""
    wrong = []
    for name, found in sorted(edges.items()):
        package = name.split(".")[0]
        if package not in order or room(name) is None:
            continue
        rank = {r: i for i, rooms in enumerate(order[package]) for r in rooms}
        own = room(name)
        assert own in rank, f"{name} is in no room of {list(rank)}"
        for other in sorted(found):
            if other.split(".")[0] != package or (name, other) in UPWARD:
                continue
            theirs = room(other)
            if theirs is None:
                wrong.append(f"{name} imports all of {other}")
            elif theirs != own and rank[theirs] >= rank[own]:
                wrong.append(f"{name} imports {other}")
    return wrong


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}

    def reachable(start: str) -> set[str]:
        if start not in reach:
            seen, left = set(), [start]
            while left:
                for other in edges.get(left.pop(), ()):
                    if other in edges and other not in seen:
                        seen.add(other)
                        left.append(other)
            reach[start] = seen
        return reach[start]

    groups = {tuple(sorted(m for m in reachable(n) if n in reachable(m))) for n in edges if n in reachable(n)}
    return [list(group) for group in sorted(groups)]


def siblings(edges: dict[str, set[str]]) -> list[str]:
    """Imports of a sibling package that the rules do not allow."""
    wrong = []
    for name, found in sorted(edges.items()):
        package = name.split(".")[0]
        for other in sorted(found):
            theirs = other.split(".")[0]
            if theirs != package and theirs not in ALLOWED[package] and other != COMMON_GROUND:
                wrong.append(f"{name} imports {other}")
    return wrong


# ---- The rules ------------------------------------------------------------------------------------------------------


def test_a_room_imports_only_rooms_below_it() -> None:
    assert against_the_order(graph(ROOT, ["looped_lm", "fitting"]), ORDER) == []


def test_every_room_exists() -> None:
    for package, order in ORDER.items():
        for name in (name for rooms in order for name in rooms):
            assert (ROOT / package / name).is_dir() or (ROOT / package / f"{name}.py").is_file(), name


def test_nothing_imports_in_a_circle() -> None:
    edges = graph(ROOT, sorted(ALLOWED))
    for name, other in UPWARD:
        edges[name].discard(other)
    assert circles(edges) == []


def test_a_package_imports_only_the_siblings_it_may() -> None:
    assert siblings(graph(ROOT, sorted(ALLOWED))) == []


def test_common_ground_needs_the_standard_library_alone() -> None:
    loaded = loaded_after("import fitting.records")
    assert not {"numpy", "scipy", "torch", "lightning", "yaml"} & loaded
    assert {m for m in loaded if m.startswith("fitting")} <= {"fitting", "fitting.records"}


def test_the_schema_is_all_that_others_load_of_fitting() -> None:
    names = [m for p in ("looped_lm", "callbacks", "datamodules") for m in modules_of(ROOT, p)]
    names = [m for m in names if m not in EXTRAS and not m.endswith("__main__")]
    loaded = loaded_after("".join(f"import {name}\n" for name in names))
    assert {m for m in loaded if m.startswith("fitting")} <= {"fitting", "fitting.records"}


def fake(root: Path, files: dict[str, str]) -> dict[str, set[str]]:
    """The graph of a tree that holds just these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return graph(root, sorted(ALLOWED), public=lambda package: {})


@pytest.mark.parametrize(
    "line",
    [
        "from looped_lm.training.optim import MuonH",
        "import looped_lm.training.optim",
        "def f():\n    from looped_lm.training import optim",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from looped_lm.training.optim import MuonH",
        "import importlib\ndef f():\n    importlib.import_module('looped_lm.training.optim')",
        "import importlib\ndef f(x):\n    importlib.import_module(f'looped_lm.training.{x}')",
        "import looped_lm",
    ],
)
def test_an_import_upward_is_found(tmp_path: Path, line: str) -> None:
    edges = fake(tmp_path, {"looped_lm/model/loss.py": line, "looped_lm/training/optim.py": ""})
    (found,) = against_the_order(edges, ORDER)
    assert found.startswith("looped_lm.model.loss imports")


def test_an_import_downward_is_none_of_them(tmp_path: Path) -> None:
    line = "from looped_lm.model.loss import chunk"
    edges = fake(tmp_path, {"looped_lm/training/optim.py": line, "looped_lm/model/loss.py": ""})
    assert edges["looped_lm.training.optim"] == {"looped_lm.model.loss"}
    assert against_the_order(edges, ORDER) == []


def test_neighbours_are_found(tmp_path: Path) -> None:
    line = "from looped_lm.conformance import checks"
    edges = fake(tmp_path, {"looped_lm/evaluation/axes.py": line, "looped_lm/conformance/checks.py": ""})
    assert against_the_order(edges, ORDER) == [
        "looped_lm.evaluation.axes imports looped_lm.conformance.checks"
    ]


def test_a_module_without_a_room_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="looped_lm.utils is in no room"):
        against_the_order(fake(tmp_path, {"looped_lm/utils.py": ""}), ORDER)


def test_a_circle_is_found(tmp_path: Path) -> None:
    edges = fake(
        tmp_path,
        {
            "datamodules/a.py": "from datamodules.b import x",
            "datamodules/b.py": "def f():\n    from datamodules import c",
            "datamodules/c.py": "import datamodules.a",
            "datamodules/d.py": "import datamodules.a",
        },
    )
    assert circles(edges) == [["datamodules.a", "datamodules.b", "datamodules.c"]]


def test_a_forbidden_sibling_is_found(tmp_path: Path) -> None:
    edges = fake(
        tmp_path,
        {
            "looped_lm/cli.py": "def f():\n    import datamodules.tokens",
            "callbacks/flops.py": "import fitting.records\nfrom fitting.laws import Law\nimport looped_lm.cli",
            "datamodules/tokens.py": "",
            "fitting/records.py": "",
            "fitting/laws/__init__.py": "",
        },
    )
    assert siblings(edges) == [
        "callbacks.flops imports fitting.laws",
        "looped_lm.cli imports datamodules.tokens",
    ]


# ---- What importing costs -------------------------------------------------------------------------------------------


def modules(package: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__main__.py"
    ]


def loaded_after(code: str) -> set[str]:
    """Top-level modules that are loaded after running `code` in a fresh process."""
    script = f"import sys\n{code}\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_names_no_callback_or_data_module() -> None:
    source = (ROOT / "looped_lm" / "configuration" / "parser.py").read_text()
    assert "import callbacks" not in source and "from callbacks" not in source and "datamodules" not in source


@pytest.mark.parametrize("package", sorted(SIBLINGS))
def test_importing_a_package_is_cheap(package: str) -> None:
    loaded = loaded_after(f"import {package}")
    assert not {"torch", "lightning", "litdata", "scipy", "matplotlib"} & loaded


def test_fitting_never_loads_torch_or_lightning() -> None:
    code = (
        "".join(f"import {name}\n" for name in modules("fitting"))
        + "import fitting\nfitting.fit, fitting.load_runs\n"
    )
    loaded = loaded_after(code)
    assert not {"torch", "lightning"} & loaded and "scipy" in loaded


def test_every_public_name_resolves() -> None:
    code = "\n".join(
        f"import {p}\n[getattr({p}, n) for n in {p}.__all__]"
        for p in ("looped_lm", "callbacks", "fitting", "datamodules")
    )
    loaded_after(code)


@pytest.mark.parametrize("package", ["looped_lm", "callbacks", "fitting", "datamodules"])
def test_a_wrong_name_lists_the_right_ones(package: str) -> None:
    done = loaded_after(
        f"import {package}\ntry:\n    {package}.Nope\n"
        f"except AttributeError as e:\n    assert {package}.__all__[-1] in str(e), e\n"
        "else:\n    raise SystemExit(1)"
    )
    assert package in done

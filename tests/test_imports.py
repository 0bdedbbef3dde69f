"""The dependency rule, proven in processes of their own, and what importing a package costs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import looped_lm

ROOT = Path(looped_lm.__file__).parent.parent
SIBLINGS = {"looped_lm", "callbacks", "datamodules", "configs", "fitting"}
#: Modules that import a package of an extra, which need not be installed.
EXTRAS = {"datamodules.tokenizer_files", "looped_lm.evaluation.harness"}
#: What each package may import of ours, beside itself. `looped_lm.commands` may import `fitting.records`, too.
ALLOWED = {
    "looped_lm": set(),
    "datamodules": {"fitting"},
    "fitting": set(),
    "callbacks": {"looped_lm", "fitting"},
}


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


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_the_siblings_it_may(package: str) -> None:
    # Commands may import the schema, which the test below this sees to.
    names = [m for m in modules(package) if m not in EXTRAS and ".commands." not in m]
    loaded = loaded_after("".join(f"import {name}\n" for name in names))
    found = {name.split(".")[0] for name in loaded} & SIBLINGS
    assert found - {package} <= ALLOWED[package]


def test_no_import_inside_a_function_breaks_the_rule() -> None:
    for package, allowed in ALLOWED.items():
        for path in sorted((ROOT / package).rglob("*.py")):
            may = allowed | {package} | ({"fitting"} if path.parent.name == "commands" else set())
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                found = {name.split(".")[0] for name in names} & SIBLINGS
                assert found <= may, f"{path.name} imports {found - may}"


def test_the_schema_is_all_that_others_take_from_fitting() -> None:
    commands = [name for name in modules("looped_lm") if ".commands." in name]
    names = [*modules("callbacks"), *modules("datamodules"), *commands]
    loaded = loaded_after("".join(f"import {name}\n" for name in names if name not in EXTRAS))
    assert {m for m in loaded if m.startswith("fitting")} <= {"fitting", "fitting.records"}


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

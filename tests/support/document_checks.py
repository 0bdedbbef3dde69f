"""Which of the claims of a Markdown page are wrong: its links, paths, commands, names and samples."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from looped_lm.cli import LIGHTNING, OWN_OPTIONS
from looped_lm.common.errors import UserError
from looped_lm.configuration.config_files import SHIPPED, resolve_arguments
from tests.support.documents import ROOT, Page, code_blocks

PACKAGES = ("looped_lm", "callbacks", "datamodules", "fitting")
FOLDERS = (*PACKAGES, "configs", "docs", "examples", "results", "tests")
#: A config file that a run writes.
NOT_SHIPPED = {"config.yaml"}


# ---- Parsers --------------------------------------------------------------------------------------------------------


def parse_run(command: str, words: list[str]) -> Any:
    """The parsed command line of fit, validate, test, predict or plan; nothing is built. `plan` has the keys of fit."""
    from looped_lm.configuration.parser import LoopedCLI

    class Parsed(LoopedCLI):
        def _set_seed(self) -> None: ...

        def before_instantiate_classes(self) -> None: ...

        def instantiate_classes(self) -> None: ...

        def after_instantiate_classes(self) -> None: ...

        def _run_subcommand(self, subcommand: str) -> None: ...

    command = "fit" if command == "plan" else command
    given, sys.argv = sys.argv, ["looped_lm", command, *resolve_arguments(words)]
    try:
        return Parsed()
    finally:
        sys.argv = given


@cache
def run_keys() -> frozenset[str]:
    """Every key of a run's configuration, as the command line writes it."""
    given = parse_run("fit", ["--config", "r4.yaml"]).config.fit
    leaves = [key.replace(".init_args", "").split(".") for key in given.keys()]  # noqa: SIM118
    return frozenset(".".join(key[:n]) for key in leaves for n in range(1, len(key) + 1))


def other_parsers() -> dict[str, Any]:
    """Parsers with options of their own, by the words before these."""
    import datamodules.__main__
    import fitting.__main__

    own = {f"looped_lm {n}": importlib.import_module(f"looped_lm.commands.{n}").parser() for n in OWN_OPTIONS}
    return own | {"fitting": fitting.__main__.build_parser(), "datamodules": datamodules.__main__.parser()}


@cache
def option_names() -> frozenset[str]:
    """Every option of any command."""

    def options(parser: Any) -> Iterator[str]:
        for action in parser._actions:
            yield from action.option_strings
            if isinstance(action.choices, dict):
                for inner in action.choices.values():
                    yield from options(inner)

    parsers = [*other_parsers().values(), parse_run("fit", ["--config", "r4.yaml"]).parser]
    return frozenset(name for parser in parsers for name in options(parser))


def parse(words: list[str]) -> str | None:
    """What is wrong with the command `python -m WORDS`, if anything."""
    module, *rest = words
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if module == "looped_lm" and rest and rest[0] in (*LIGHTNING, "plan"):
                parse_run(rest[0], rest[1:])
            elif module == "looped_lm" and rest and rest[0] in OWN_OPTIONS:
                other_parsers()[f"looped_lm {rest[0]}"].parse_args(rest[1:])
            elif module in ("fitting", "datamodules"):
                other_parsers()[module].parse_args(rest)
            elif module == "pytest":
                missing = [word for word in rest if word.endswith(".py") and not Path(word).exists()]
                return f"no file {missing[0]}" if missing else None
            elif module != "venv":
                return "no such command"
    except SystemExit as stop:
        return printed.getvalue().strip() if stop.code else None
    except UserError as error:
        return str(error)
    return None


# ---- What can be wrong ----------------------------------------------------------------------------------------------
# Each check returns what is wrong with a page. It runs in a folder that holds the page's samples and, for a story of
# `examples/`, the files beside it.


def wrong_links(page: Page) -> list[str]:
    """Links and pictures without a file."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.text)
    return [link for link in links if not link.startswith("http") and not (page.path.parent / link).exists()]


def wrong_paths(page: Page) -> list[str]:
    """Paths in inline code, commands and bash blocks that begin with a folder of the project, and are not there."""
    words = page.code() + [word for command in page.commands() for word in command]
    paths = [
        word.rstrip("/")
        for word in words
        if word.split("/")[0] in FOLDERS and "/" in word and " " not in word
    ]
    return [path for path in paths if not (ROOT / path).exists()]


def wrong_commands(page: Page) -> list[str]:
    """Commands of ours that do not parse, with all their options."""
    found = []
    for words in page.commands():
        if "-m" in words and words[0] in ("python", "python3", "torchrun"):
            message = _parsed(page.path, tuple(words[words.index("-m") + 1 :]))
            if message:
                found.append(f"{shlex.join(words)}: {message}")
    return found


@cache
def _parsed(path: Path, words: tuple[str, ...]) -> str | None:
    """The answer of `parse`: once for all versions of a page, which is wherever the same files are saved."""
    return parse(list(words))


def wrong_options(page: Page) -> list[str]:
    """Options in inline code that no command has, and those of a run with a value that it does not take."""
    found = []
    for words in [shlex.split(code) for code in page.code() if code.startswith("--")]:
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        of_a_run = any("." in name for name in names)
        if of_a_run and names != words:
            message = parse(["looped_lm", "fit", "--config", "r4.yaml", *words])
        else:
            known = option_names() | {f"--{key}" for key in run_keys()}
            message = ", ".join(sorted(set(names) - known))
        if message:
            found.append(f"{shlex.join(words)}: {message}")
    return found


def wrong_keys(page: Page) -> list[str]:
    """Keys of a configuration in inline code that do not exist."""
    keys = [
        code.rstrip("+") for code in page.code() if re.fullmatch(r"(model|data|trainer)\.[\w.]+\+?", code)
    ]
    return [key for key in keys if key not in run_keys()]


def wrong_configs(page: Page) -> list[str]:
    """Names of YAML files that are neither shipped nor in the folder of the page, and that it does not say to save."""
    here = [SHIPPED, SHIPPED / "sweeps", page.path.parent, Path()]
    # Not those with a folder before them, which are paths.
    names = set(re.findall(r"(?<![\w./])([\w-]+\.yaml)\b", page.text)) - NOT_SHIPPED
    return [name for name in sorted(names) if not any((folder / name).is_file() for folder in here)]


def wrong_yaml(page: Page) -> list[str]:
    """YAML blocks that the parser of sweeps, or that of runs, refuses."""
    from looped_lm.sweeps.expansion import expand
    from looped_lm.sweeps.files import load

    found = []
    for i, block in enumerate(code_blocks(page.text, "yaml")):
        file = Path(f"block_{i}.yaml")
        file.write_text(block, encoding="utf-8")
        message = None
        try:
            if "grid" in yaml.safe_load(block):
                expand(load(file))
            else:
                message = parse(["looped_lm", "fit", "--config", "r4.yaml", "--config", str(file)])
        except (UserError, yaml.YAMLError) as error:
            message = str(error)
        if message:
            found.append(f"{block}: {message}")
    return found


def wrong_python(page: Page) -> list[str]:
    """Python blocks that do not compile, or import what is not there."""
    found = []
    for block in code_blocks(page.text, "python"):
        try:
            compile(block, page.path.name, "exec")
            exec("\n".join(re.findall(r"(?m)^(?:from|import) .*$", block)), {})
        except (SyntaxError, ImportError, AttributeError) as error:
            found.append(f"{block}: {error}")
    return found


def wrong_class_paths(page: Page) -> list[str]:
    """Dotted names of the packages, of Lightning and of torch that do not import."""
    pattern = rf"(?<![\w./-])((?:{'|'.join(PACKAGES)}|lightning|torch)(?:\.[A-Za-z_]\w*)+)(?![\w/])"
    names = [
        n
        for n in re.findall(pattern, page.text)
        if n.rpartition(".")[2] not in ("py", "md", "yaml", "csv", "org")
    ]
    return [name for name in names if not _imports(name)]


def _imports(name: str) -> bool:
    module, *rest = name.split(".")
    found = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(module)
            except ImportError:
                return False
    return True


def wrong_classes(page: Page) -> list[str]:
    """Names of classes, and of their attributes, in inline code that nobody defines."""
    modules = [
        *PACKAGES,
        *(f"{package}.errors" for package in ("looped_lm.common", "datamodules", "fitting")),
    ]
    modules += ["lightning", "lightning.pytorch.loggers", "torch.optim"]
    places: list[Any] = [builtins, *map(importlib.import_module, modules)]
    own = "\n".join(code_blocks(page.text, "python") + [p.read_text() for p in page.path.parent.glob("*.py")])
    found = []
    for name in [code for code in page.code() if re.fullmatch(r"[A-Z][a-z]+[A-Z]\w*(\.\w+)*", code)]:
        first, *rest = name.split(".")
        values = [getattr(place, first) for place in places if hasattr(place, first)]
        for part in rest:
            values = [getattr(value, part) for value in values if hasattr(value, part)]
        if not values and f"class {first}" not in own:
            found.append(name)
    return found


CHECKS: dict[str, Callable[[Page], list[str]]] = {
    check.__name__: check
    for check in (
        wrong_links, wrong_paths, wrong_commands, wrong_options, wrong_keys, wrong_configs, wrong_yaml, wrong_python,
        wrong_class_paths, wrong_classes,
    )
}  # fmt: skip

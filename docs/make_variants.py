"""Writes the table of shipped variants in extending.md, from the classes, their configs and the nano runs in results.

With --check nothing is written, and the exit status is 1 if the page says otherwise.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import looped_lm
from looped_lm import LoopedTransformer
from looped_lm.configuration.config_files import SHIPPED
from looped_lm.generation import CachedDecoder, UncachedDecoder
from looped_lm.loop.component import Component, as_factory, as_instance
from looped_lm.model.accounting import count_parameters, flops_per_token
from looped_lm.seams import LATER, SEAMS

HERE = Path(__file__).parent
PAGE, RUNS = HERE / "extending.md", HERE.parent / "results" / "nano_variants"
#: Of the models in the table: those of nano.yaml, with the layouts of the configs.
SIZES = {"vocab_size": 1024, "seq_len": 128, "size": 1, "head_dim": 16}
REFERENCE = "r4.yaml"


def architecture(config: str) -> dict[str, Any]:
    """Arguments of the model that a shipped config describes."""
    base, own = (yaml.safe_load((SHIPPED / name).read_text())["model"] for name in ("base.yaml", config))
    layout = ("prelude_layers", "recurrent_layers", "coda_layers", "num_recurrences", *LATER)
    arguments = {**{key: base[key] for key in (*layout, *SEAMS)}, **own}
    for key, seam in SEAMS.items():
        spec = arguments[key] if isinstance(arguments[key], Mapping) else {"class_path": arguments[key]}
        arguments[key] = as_factory(spec) if seam.sizes else as_instance(spec)
    return {key: value for key, value in arguments.items() if not (key in SEAMS and SEAMS[key].of_training)}


def variants() -> dict[str, type[Component]]:
    """Shipped config -> the class of `looped_lm.loop.variants` that it names."""
    found = {}
    for path in sorted(SHIPPED.glob("r4_*.yaml")):
        for value in yaml.safe_load(path.read_text())["model"].values():
            name = value["class_path"] if isinstance(value, Mapping) else str(value)
            own = (
                getattr(looped_lm, name.removeprefix("looped_lm."), None)
                if name.startswith("looped_lm.")
                else None
            )
            if own is not None and ".variants." in own.__module__:
                found[path.name] = own
    return found


def code_lines(variant: type[Component]) -> int:
    """Lines of its file that hold code: no docstrings, comments or blank lines."""
    source = Path(inspect.getfile(variant)).read_text(encoding="utf-8")
    lines = source.splitlines()
    code = {n for n, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            assert body is not None
            code -= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    return len(code)


def decodes(model: LoopedTransformer) -> bool:
    """Whether eight tokens decoded with the cache have the logits of whole passes, within 1e-8 in float64."""
    prompts = [[1, 2, 3, 4], [5, 6]]
    cached, plain = CachedDecoder(model, prompts, 8), UncachedDecoder(model, prompts, 8)
    off = 0.0
    with torch.inference_mode():
        for token in range(8):
            off = max(off, float((cached.logits() - plain.logits()).abs().max()))
            for decoder in (cached, plain):
                decoder.append(torch.tensor([token, token + 7]))
    return off < 1e-8


def cell(losses: list[float]) -> str:
    """Mean and range of the seeds' losses."""
    return f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})" if losses else "-"


def trained() -> dict[str, tuple[str, str]]:
    """Config -> losses and tokens of its runs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RUNS.glob("*.run.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(f"{record['run_name'].partition('-')[0]}.yaml", []).append(record)
    return {
        config: (cell([r["val_loss"] for r in records]), f"{records[0]['tokens']:,}")
        for config, records in found.items()
    }


def table() -> str:
    """The table, one row for each variant."""
    runs, lines = trained(), []
    with torch.device("meta"):
        reference = flops_per_token(LoopedTransformer(**SIZES, **architecture(REFERENCE)), SIZES["seq_len"])
    for config, variant in {REFERENCE: None, **variants()}.items():
        torch.manual_seed(0)
        model = LoopedTransformer(**SIZES, **architecture(config)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p) / math.sqrt(p.shape[-1] if p.dim() else 1))
        cost = flops_per_token(model, SIZES["seq_len"]) / reference
        loss, tokens = runs.get(config, ("-", "-"))
        head = (
            ("linear injection", "-")
            if variant is None
            else (f"`{variant.__name__}`", str(code_lines(variant)))
        )
        same = "equal" if decodes(model) else "**differs**"
        cells = [f"`{config}`", *head, f"{count_parameters(model).n:,}", f"{cost:.3f}", same, loss, tokens]
        lines.append(f"| {' | '.join(cells)} |")
    title = "| config | class | lines | N | FLOPs/token | cached decoding | loss, three seeds | tokens |"
    return "\n".join([title, "|---|---|---|---|---|---|---|---|", *lines])


def page(text: str) -> str:
    """The page's text with the table of today."""
    return re.sub(
        r"(<!-- variants -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{table()}\n{m[2]}", text, flags=re.S
    )


def main(arguments: list[str]) -> int:
    """Write the page, or check it; the exit status."""
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if "--check" in arguments:
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

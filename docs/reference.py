"""The pages of the site that the code writes: flags, registries, what excludes what, the Python API.

mkdocs runs `on_files` (`hooks` of mkdocs.yml): the pages exist in the site alone, so they are never behind the code.
`on_post_page` keeps the site from asking another host for anything.
"""

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qtrain.core.checks import type_name
from qtrain.core.flags import flag_groups
from qtrain.core.registry import Registry, field_docs

COMMANDS = {
    "llm_pretrain.py": ("llm_pretrain", "PretrainSettings"),
    "llm_finetune.py": ("llm_finetune", "FinetuneSettings"),
    "timm_finetune.py": ("qtrain.train.settings.settings", "VisionSettings"),
    "tokenize_data.py": ("tokenize_data", "TokenizeSettings"),
    "benchmark_mm.py": ("qtrain.bench.arguments", "BenchmarkSettings"),
    "python -m qtrain evaluate": ("qtrain.commands.evaluate", "EvaluateSettings"),
    "python -m qtrain export": ("qtrain.commands.export", "ExportSettings"),
    "python -m qtrain generate": ("qtrain.commands.generate", "GenerateSettings"),
    "python -m qtrain report": ("qtrain.commands.report", "ReportSettings"),
}
"""Command -> module and class of its settings."""

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the plugin `offline` has pages load, for a search in files that no server sends; docs/assets has a copy."""
LOCAL_SHIM = "assets/iframe-worker.js"


REQUESTS = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="?(?:https?:)?//[^>]*>|url\(["']?https?:[^)]*"""
)
"""What a browser fetches by itself from another host."""


def cell(text: str) -> str:
    """Text in a table of Markdown: code stays code, nothing else is markup."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[") for part in parts[::2]]
    return "`".join(parts)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def exclusions_table() -> str:
    """Options, what they do not go with, and why."""
    from qtrain.train.settings.exclusions import EXCLUSIONS

    rows = []
    for row in EXCLUSIONS:
        why = re.sub(r"^'?\{[\w.]+\}'?(, but)? ", "", row.why)  # the value that the message begins with
        why = re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), why)
        rows.append([f"`{row.option}`", row.other, why, "refused" if row.refused else "a note in the plan"])
    return table(("option", "does not go with", "because", "then"), rows)


def flags_of(cls: type) -> str:
    """The flags of a settings dataclass as tables, in the groups of `--help`."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    parts = []
    for title, names in flag_groups(cls).items():
        rows = []
        for name in names:
            default = defaults[name]
            shown = "" if default is dataclasses.MISSING or default in (None, ()) else f"`{default}`"
            rows.append([f"`--{name}`", cell(type_name(hints[name])), shown, cell(docs.get(name, ""))])
        parts.append((f"### {title.capitalize()}\n\n" if title else "") + table(("flag", "value", "default", ""), rows))
    return "\n".join(parts)


def flags_page(command: str) -> str:
    """A command with its flags."""
    module, name = COMMANDS[command]
    cls = getattr(importlib.import_module(module), name)
    return f"# {command}\n\n{(cls.__doc__ or '').strip()}\n\n{flags_of(cls)}"


def entries(names: Iterable[tuple[str, str]], registry: Registry | None = None) -> str:
    """Entries of a registry, each with the keys of its options."""
    parts = []
    for name, line in names:
        options = registry.options(name) if registry else []
        parts.append(f"### `{name}`\n\n{cell(line)}\n")
        if options:
            parts.append(table(("option", ""), ([f"`{key}`", cell(what)] for key, what in options)))
    return "\n".join(parts)


def lines(names: Iterable[tuple[str, str]]) -> str:
    """Entries without options."""
    return table(("name", ""), ([f"`{name}`", cell(line)] for name, line in names))


def exports_table() -> str:
    """Scheme x export format; schemes with their default options."""
    from qtrain.models import EXPORT_FORMATS
    from qtrain.models.hf.formats.table import kept
    from qtrain.quant import SCHEMES

    formats = {name: EXPORT_FORMATS.make(name, {}, "--export_format") for name in EXPORT_FORMATS.names()}
    formats = {name: fmt for name, fmt in formats.items() if fmt.weight is not None}
    rows = []
    for scheme_name in SCHEMES.names():
        if scheme_name in ("auto", "bf16"):  # a scheme for each linear, and none
            continue
        scheme = SCHEMES.make(scheme_name, {}, "--quantize")
        held = {name: kept(scheme, fmt) for name, fmt in formats.items()}
        equal = [f"`{name}`{k.text.removeprefix('equal')}" for name, k in held.items() if k.equal]
        new: dict[str, list[str]] = {}
        for name, k in held.items():
            if not k.equal:
                new.setdefault(k.text, []).append(f"`{name}`")
        reasons = "; ".join(f"{why}: {', '.join(names)}" for why, names in new.items())
        rows.append([f"`{scheme_name}`", ", ".join(equal), reasons])
    return table(("scheme", "equal codes", "new codes"), rows)


def registries() -> dict[str, str]:
    """Every registry, as `--list` has them."""
    from qtrain.data.images.images import IMAGE_SETS
    from qtrain.data.stream import DATASETS
    from qtrain.data.tokenizers.tokenizer import TOKENIZERS
    from qtrain.models import EXPORT_FORMATS, list_models
    from qtrain.optim import OPTIMIZERS
    from qtrain.quant import SCHEMES

    tokenizers = lines(sorted(TOKENIZERS.items()))
    data = (
        f"# Types of data\n\nKeys of `--train_ds` and `--eval_ds`.\n\n{entries(DATASETS.describe(), DATASETS)}\n"
        f"## Images\n\n{entries(IMAGE_SETS.describe(), IMAGE_SETS)}\n## Tokenizers\n\n{tokenizers}"
    )
    optimizers = (
        f"# Options of optimizers\n\n`--optim NAME --optim_kwargs '{{...}}'`.\n\n"
        f"{entries(OPTIMIZERS.describe(), OPTIMIZERS)}\n## Other libraries\n\n{lines(OPTIMIZERS.describe_libraries())}"
    )
    return {
        "schemes": "# Options of schemes\n\n`--quantize NAME --quantize_kwargs '{...}'`.\n\n"
        + entries(SCHEMES.describe(), SCHEMES),
        "optimizers": optimizers,
        "data": data,
        "models": f"# Models with a shape here\n\n`--model NAME`; any hub id or folder too.\n\n{lines(list_models())}",
        "exports": "# Which export keeps the codes of which scheme\n\nOf schemes with their default options. "
        "Scales repeated: a scale of training covers several groups of the format. Refused: ternary formats hold no "
        "other weights.\n\n"
        f"{exports_table()}\n## Formats\n\n{lines(EXPORT_FORMATS.describe())}",
        "exclusions": "# Options that exclude each other\n\nThe run is refused with one line that names option, "
        f"reason and fix, or the plan has a note about an option without an effect.\n\n{exclusions_table()}",
    }


def python_api() -> str:
    """Signatures and docstrings of the library."""
    import qtrain
    from qtrain import optim

    made = [name for name in optim.__all__ if inspect.isfunction(getattr(optim, name)) and name[0].isupper()]
    named: dict[str, Any] = {f"qtrain.{name}": getattr(qtrain, name) for name in ("quantize", "save_quantized")}
    named |= {f"qtrain.optim.{name}": getattr(optim, name) for name in sorted(made)}
    parts = ["# Python API\n\nHow to use it is in [From Python](../python.md).\n"]
    for name, function in named.items():
        signature = inspect.signature(function)
        arguments = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        parts.append(f"## `{name}`\n\n```python\n{name}({arguments})\n```\n\n{inspect.getdoc(function)}\n")
    return "\n".join(parts)


def pages() -> Mapping[str, str]:
    """Path below docs/ -> the text of each page that the code writes."""
    scripts = {f"reference/{command.split()[-1].removesuffix('.py')}.md": flags_page(command) for command in COMMANDS}
    listed = {f"reference/options_{name}.md": text for name, text in registries().items()}
    return {**scripts, **listed, "reference/python_api.md": python_api()}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """mkdocs: what the plugin `offline` loads from another host comes from the site."""
    return output.replace(SHIM, "../" * page.file.dest_uri.count("/") + LOCAL_SHIM)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """mkdocs: the same of 404.html."""
    return output.replace(SHIM, LOCAL_SHIM)


def requests_elsewhere(text: str) -> list[str]:
    """What in a page or a style sheet a browser would fetch from another host."""
    return REQUESTS.findall(text)


def on_post_build(config: Any) -> None:
    """mkdocs: no page asks another host for anything."""
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css") and (found := requests_elsewhere(path.read_text())):
            raise PluginError(f"{path}: requests of other hosts: {', '.join(found)}")

"""Generate the tables of the documentation from the code.

Run as `python -m docs.generate`. A page marks the place of a generated part with
`<!-- generated: NAME -->` and `<!-- end of generated -->`. A test compares the committed files with
the output of this script.
"""

import contextlib
import inspect
import io
import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from pydantic import BaseModel

from docs.comparisons import activation_rows, generation_rows, model_rows, names_of, option_rows
from docs.limits import LIMITS
from sightline.__main__ import COMMANDS
from sightline.__main__ import main as sightline
from sightline.base import bundle
from sightline.base.bundle import Manifest
from sightline.base.errors import EXIT_STATUSES
from sightline.base.options import allowed, describe, flag_name, key_of
from sightline.base.text.jinja import ChatTemplateError
from sightline.export.configurations import check_configuration
from sightline.export.families.table import FAMILIES_BY_KIND
from sightline.export.sources.chat_parts import convert
from sightline.model.data import pretrained
from sightline.model.training.options import OPTIONS
from sightline.service.api_errors import ERRORS
from sightline.service.app import create_app
from sightline.service.http.docs import type_of
from sightline.service.metrics import Metrics
from sightline.service.settings import SETTINGS, Settings, env_name
from tests.export.chat_templates import CHAT_MODELS, SPECIAL
from tests.zoo.published import PACKAGES

WIDTH = 100
CONFIGURATIONS = Path("tests/data/configs")  # a config.json for each repository
PAGES = sorted(Path("docs").rglob("*.md"))
PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
FIELD_COMMENT = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


def make_parts() -> dict[str, str]:
    """Return the Markdown of every part by its name."""
    schemas = api_schemas()
    return {
        "settings": settings_table(),
        "limits": limits_table(),
        "errors": errors_table(),
        "metrics": metrics_table(),
        "manifest": manifest_tables(),
        "results": result_tables(schemas),
        "commands": command_sections(),
        "training": training_table(),
        "exit-statuses": table(("status", "meaning"), ((str(code), text) for code, text in EXIT_STATUSES.items())),
        "families": families_table(),
        "repositories": repositories_table(),
        "compared-models": table(("family", "models", "with other options"), model_rows()),
        "compared-options": table(("key of `config.json`", "compared values", "families"), option_rows()),
        "activations": table(("function", "names"), activation_rows()),
        "compared-generation": table(("key of `generation_config.json`", "compared values", "with"), generation_rows()),
        "training-families": training_families_table(),
        **{name: schema_table(schema) for name, schema in schemas.items() if is_request(name)},
    }


def api_schemas() -> dict[str, Any]:
    """Return the OpenAPI schemas of the native endpoints by name."""
    app = create_app(Settings(compatible_apis=""), mock.Mock())  # the app does not start, and so loads nothing
    schemas: dict[str, Any] = app.openapi()["components"]["schemas"]
    return schemas


def is_request(name: str) -> bool:
    """Return True for objects that a client sends."""
    return name.endswith("Body") or name in ("GenerateParameters", "AttentionSelection")


def result_tables(schemas: Mapping[str, Any]) -> str:
    """Return one section for each object that the service sends."""
    sections = []
    for name, schema in schemas.items():
        if not is_request(name):
            description = f"{wrap(schema['description'])}\n\n" if "description" in schema else ""
            sections.append(f"### {name}\n\n{description}{schema_table(schema)}")
    return "\n\n".join(sections)


def command_sections() -> str:
    """Return the help of `sightline` and of each of its commands."""
    sections = []
    inner = ("train translation", "train sample", "models get", "models check", "load compare")
    for command in ("", *COMMANDS, *inner):
        words, printed = command.split(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)}),
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            sightline([*words, "--help"])
        sections.append(f"## `{' '.join(['sightline', *words])}`\n\n```text\n{printed.getvalue().strip()}\n```")
    return "\n\n".join(sections)


def training_table() -> str:
    """Return the options of `sightline train TASK`."""
    rows: dict[tuple[str, ...], list[str]] = {}  # the tasks of each row
    for task, kind in OPTIONS.items():
        for name, field in kind.model_fields.items():
            text, default = describe(field)
            row = (f"`{key_of(name)}`<br>`{flag_name(name)}`", allowed(field), default, text)
            rows.setdefault(row, []).append(task)
    return table(
        ("key and flag", "tasks", "values", "default", "description"),
        ((row[0], "all" if len(tasks) == len(OPTIONS) else ", ".join(tasks), *row[1:]) for row, tasks in rows.items()),
    )


def training_families_table() -> str:
    """Return the families of checkpoints that can be trained."""
    rows = []
    for kind, tasks, rope_types in (
        ("encoder", "classification, encoder", ()),
        ("decoder", "language-model", pretrained.ROPE_TYPES),
    ):
        families = (name for name, family in pretrained.FAMILIES.items() if family.kind == kind)
        rows.append((kind, tasks, *map(names_of, (families, pretrained.ACTIVATIONS, rope_types))))
    return table(("kind", "tasks", "families", "activations", "rope types"), rows)


def families_table() -> str:
    """Return the families that can be imported, their evidence and their classes."""
    rows = []
    for kind, families in FAMILIES_BY_KIND.items():
        for family in families:
            models = dict.fromkeys(model.model for model in PACKAGES if model.family == family.name)
            other = "an implementation from its paper" if family.name == "jina_bert" else "Transformers"
            text = f"real weights: {', '.join(models)}" if models else f"{other} with random weights"
            rows.append((kind, f"`{family.name}`", text, names_of(family.architectures)))
    return table(("kind", "family", "compared with", "classes"), rows)


def repositories_table() -> str:
    """Return which well-known repositories can be imported, by their configurations."""
    rows = []
    for path in sorted(CONFIGURATIONS.iterdir(), key=lambda path: path.name.lower()):
        support, repository = check_configuration(path), path.stem.replace("--", "/")
        # The rest of a reason lists the supported values.
        kind = support.kind or f"no: {support.reason.partition(';')[0]}"
        chat = _chat_of(repository, is_imported=bool(support.kind))
        rows.append((f"`{repository}`", f"`{support.architecture or support.model_type}`", kind, chat))
    return table(("repository", "class", "imported as", "chat"), rows)


def _chat_of(repository: str, *, is_imported: bool) -> str:
    """Return "yes" if a repository is imported with its chat template, otherwise the reason."""
    if repository not in CHAT_MODELS:
        return "not a chat model"
    if not is_imported:
        return "no: the model is not imported"
    try:
        convert(CHAT_MODELS[repository], SPECIAL)
    except ChatTemplateError as error:
        return f"no: {error}"
    return "yes"


def settings_table() -> str:
    rows = (
        (f"`{env_name(name)}`<br>`{flag_name(name)}`", allowed(field), code_of(field.default), field.description or "")
        for name, field in SETTINGS.items()
    )
    return table(("variable and flag", "values", "default", "description"), rows)


def limits_table() -> str:
    rows = []
    for limit in LIMITS:
        field = SETTINGS.get(limit.source)
        source = limit.source if field is None else f"`{env_name(limit.source)}`"
        value = limit.value if field is None else limit.value or code_of(field.default)
        error = "" if limit.code is None else f"{ERRORS[limit.code].status} `{limit.code}`"
        rows.append((limit.text, source, value, error, f"`{limit.label}`" if limit.label else ""))
    return table(("limit", "setting", "default", "error", "label"), rows)


def errors_table() -> str:
    rows = (
        (str(kind.status), f"`{code}`", f"`{kind.type}`", str(kind.retry_after_s or ""), kind.message)
        for code, kind in sorted(ERRORS.items(), key=lambda item: item[1].status)
    )
    return table(("status", "code", "type", "`Retry-After`", "default message"), rows)


def metrics_table() -> str:
    rows = []
    for metric in Metrics("0").registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        rows.append((f"`{name}`", metric.type, metric.documentation))
    return table(("metric", "type", "description"), rows)


def manifest_tables() -> str:
    """Return one section for each object of the manifest, the manifest itself first."""
    sections = []
    models: list[type[BaseModel]] = [Manifest, *_parts_of_manifest()]
    for model in models:
        title = "`manifest.json`" if model is Manifest else f"`{model.__name__}`"
        text = "" if model is Manifest else f"{wrap(inspect.cleandoc(model.__doc__ or ''))}\n\n"
        comments = dict(FIELD_COMMENT.findall(inspect.getsource(model)))
        properties = model.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
        rows = [
            (f"`{name}`", linked_type(schema), default_of(schema), schema.get("description") or comments.get(name, ""))
            for name, schema in properties.items()
        ]
        sections.append(f"### {title}\n\n{text}{table(('field', 'type', 'default', 'description'), rows)}")
    return "\n\n".join(sections)


def _parts_of_manifest() -> list[type[BaseModel]]:
    return [
        value
        for name, value in vars(bundle).items()
        if isinstance(value, type)
        and issubclass(value, BaseModel)
        and value not in (BaseModel, Manifest)
        and not name.startswith("_")
    ]


def schema_table(schema: Mapping[str, Any]) -> str:
    """Return the table of an object's fields, with their defaults if any field is optional."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    has_defaults = len(required) < len(properties)
    rows = []
    for name, field in properties.items():
        default = ["required" if name in required else default_of(field)] if has_defaults else []
        rows.append((f"`{name}`", linked_type(field), *default, field.get("description", "")))
    head = ("field", "type", "default", "description") if has_defaults else ("field", "type", "description")
    return table(head, rows)


def linked_type(schema: Mapping[str, Any]) -> str:
    """Return the type of a field with links to the objects of the page; null is left out."""
    return type_of(schema, lambda name: f"[{name}](#{name.lower()})", hidden=("null",))


def default_of(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None or isinstance(default, dict) else code_of(default)


def code_of(value: Any) -> str:
    if value in (None, ""):
        return ""
    return f"`{json.dumps(value) if isinstance(value, bool | int | float | list) else value}`"


def wrap(text: str) -> str:
    """Wrap the paragraphs of a docstring for a page."""
    return "\n\n".join(textwrap.fill(paragraph, WIDTH) for paragraph in text.split("\n\n"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    escaped = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines)  # a row is one line
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Return the text of a page with its generated parts replaced.

    Raises:
        KeyError: a part of the page does not exist.
    """
    return PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n\n{match[3]}", text)


def main() -> None:
    transformers.logging.set_verbosity_error()  # of configurations with values for tests
    parts = make_parts()
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()

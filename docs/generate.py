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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from pydantic import BaseModel

from docs.comparisons import activation_rows, generation_settings, names_of, option_rows
from docs.json_types import type_of
from docs.limits import LIMITS
from lab.bench.report import wrap_prose
from sightline.__main__ import COMMANDS
from sightline.__main__ import main as sightline
from sightline.base import bundle
from sightline.base.bundle import ChatTemplate, Manifest
from sightline.base.options import allowed, describe, flag_name, key_of
from sightline.base.text.prompt import ChatTemplateError
from sightline.export.configurations import check_configuration
from sightline.export.families.table import FAMILIES_BY_KIND
from sightline.export.sources.chat_template import checked
from sightline.model.training.options import OPTIONS
from sightline.service.api_errors import ERRORS
from sightline.service.app import create_app
from sightline.service.metrics import Metrics
from sightline.service.settings import SETTINGS, Settings, env_name
from tests.export.chat_templates import CHAT_MODELS, SPECIAL
from tests.zoo.published import PACKAGES

WIDTH = 100
CONFIGURATIONS = Path("tests/data/configs")  # a config.json for each repository
PAGES = sorted(Path("docs").rglob("*.md"))
PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
OPTION = re.compile(r"^  (-.+)\n(?:   .+\n)*", re.MULTILINE)  # of a help, with its description
FIELD_COMMENT = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


def make_parts() -> dict[str, str]:
    """Return the Markdown of every part by its name."""
    schemas = api_schemas()
    return {
        "settings": settings_table(),
        "limits": limits_table(),
        "errors": errors_table(),
        "metrics": metrics_table(),
        "manifest": manifest_fields(),
        **object_sections(schemas),
        "commands": command_sections(),
        "training": training_table(),
        "families": families_table(),
        "repositories": repositories_list(),
        "compared-options": "\n".join(wrap_prose(f"- {names}: {keys}") for names, keys in option_rows()),
        "activations": table(("function", "names"), activation_rows()),
        "compared-generation": wrap_prose(names_of(sorted(generation_settings()))),
    }


def api_schemas() -> dict[str, Any]:
    """Return the OpenAPI schemas of the native endpoints by name."""
    app = create_app(Settings(compatible_apis=""), mock.Mock())  # the app does not start, and so loads nothing
    schemas: dict[str, Any] = app.openapi()["components"]["schemas"]
    return schemas


def is_request(name: str) -> bool:
    """Return True for objects that a client sends."""
    return name.endswith("Body") or name in ("GenerateParameters", "Constraint", "AttentionSelection")


def object_sections(schemas: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of each object of requests, and those of all objects of responses.

    A field that several objects share is described in the first of them.
    """
    page = Path("docs/reference/api.md").read_text(encoding="utf-8")
    requests = sorted(filter(is_request, schemas), key=lambda name: page.find(f"<!-- generated: {name} -->"))
    parameters, first = schemas["GenerateParameters"]["properties"], dict[tuple[str, ...], str]()
    parts = {name: field_list(name, schemas[name], first) for name in requests}
    sections = []
    for name, schema in schemas.items():
        if not is_request(name) and schema["properties"].keys() - {"model", "outputs", "usage", "timings_ms"}:
            text = f"{wrap_prose(schema['description'])}\n\n" if "description" in schema else ""
            is_known = schema["properties"].keys() <= parameters.keys()
            fields = wrap_prose(f"- {names_of(schema['properties'])}") if is_known else field_list(name, schema, first)
            sections.append(f"### {name}\n\n{text}{fields}")
    return {**parts, "results": "\n\n".join(sections)}


def field_list(name: str, schema: Mapping[str, Any], first: dict[tuple[str, ...], str]) -> str:
    """Return the fields of an object as a list; those of an earlier object link to it."""
    path = re.sub(r"(?<!^)(?=[A-Z])", "-", name.removesuffix("Body")).lower()
    place = f"[`POST /v1/{path}`](#post-v1{path})" if name.endswith("Body") else f"[{name}](#{name.lower()})"
    items, shared, required = [], dict[str, list[str]](), schema.get("required", ())
    for field, value in schema.get("properties", {}).items():
        default = f"default {default_of(value)}" if default_of(value) else "required" * (field in required)
        kind = ", ".join(filter(None, (linked_type(value), default if is_request(name) else "")))
        described_at = first.setdefault((field, kind, value.get("description", "")), place)
        if described_at == place:
            items.append(f"- `{field}` ({kind}): {value.get('description', '')}")
        else:
            shared.setdefault(described_at, []).append(field)
    items += (f"- {names_of(fields)}: as in {described_at}." for described_at, fields in shared.items())
    return "\n".join(map(wrap_prose, items))


def command_sections() -> str:
    """Return the help of `sightline` and of each of its commands."""
    sections, first = [], {flag_name(name): "[Settings](settings.md)" for name in SETTINGS}
    inner = ("train sample", "models get", "models list", "models default", "models check", "load compare")
    for command in ("", *COMMANDS, *inner):
        words, printed = command.split(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)}),
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            sightline([*words, "--help"])
        sections.append(f"## `{' '.join(['sightline', *words])}`\n\n{short_help(command, printed.getvalue(), first)}")
    return "\n\n".join(sections)


def short_help(command: str, text: str, first: dict[str, str]) -> str:
    """Return the help of a command; options of an earlier command link to it."""
    place, shared = f"[`sightline {command}`](#sightline-{command.replace(' ', '-')})", dict[str, list[str]]()

    def kept(match: re.Match[str]) -> str:
        flag = match[1].split()[0].strip(",")
        described_at = first.get(flag) or first.setdefault(" ".join(match[0].split()), place)
        if described_at == place:
            return match[0]
        shared.setdefault(described_at, []).append(flag)
        return ""

    text = OPTION.sub(kept, text)
    text = re.sub(r"^[a-z ]+:\n(?=\n|\Z)\n?", "", text, flags=re.MULTILINE).strip()
    others = (f"{names_of(flags)}: see {described_at}." for described_at, flags in shared.items() if flags != ["-h"])
    return "\n\n".join((f"```text\n{text}\n```", *map(wrap_prose, others)))


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


def repositories_list() -> str:
    """Return which well-known repositories can be imported, by their configurations."""
    groups = dict[str, list[str]]()
    for path in CONFIGURATIONS.iterdir():
        support, repository = check_configuration(path), path.stem.replace("--", "/")
        # The rest of a reason lists the supported values.
        reason = support.reason.removeprefix("config.json: ").partition(";")[0]
        group = f"{support.kind}{_chat_of(repository)}" if support.kind else f"not imported ({reason})"
        groups.setdefault(group, []).append(repository)
    return "\n".join(
        wrap_prose(f"- {group}: {names_of(sorted(names, key=str.lower))}") for group, names in sorted(groups.items())
    )


def _chat_of(repository: str) -> str:
    """Return words about the chat template of a repository; "" if it has none."""
    if repository not in CHAT_MODELS:
        return ""
    try:
        checked(ChatTemplate(program=CHAT_MODELS[repository], tokens=SPECIAL))
    except ChatTemplateError as error:
        return f", not for chat ({error})"
    return " for chat"


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


def manifest_fields() -> str:
    """Return one section for each object of the manifest, the manifest itself first."""
    sections = []
    models: list[type[BaseModel]] = [Manifest, *_parts_of_manifest()]
    for model in models:
        title = "`manifest.json`" if model is Manifest else f"`{model.__name__}`"
        text = "" if model is Manifest else f"{inspect.cleandoc(model.__doc__ or '')}\n\n"
        comments = dict(FIELD_COMMENT.findall(inspect.getsource(model)))
        properties = model.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
        fields = []
        for name, schema in properties.items():
            default = default_of(schema) and f", default {default_of(schema)}"
            description = schema.get("description") or comments.get(name)
            fields.append(f"- `{name}` ({linked_type(schema)}{default}){f': {description}' if description else ''}")
        sections.append(wrap_prose(f"### {title}\n\n{text}" + "\n".join(fields)))
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

"""Model card of the bundle of a training run: Markdown with the front matter of Hugging Face."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_manifest
from sightline.export.sources.run_folder import TASKS, Metric, RunRecord

CARD = "MODEL_CARD.md"
# The last line of a card that this module wrote. A card without it belongs to the user.
MARK = "<!-- Written by `sightline export`, which replaces this file; remove this line to keep changes. -->"
MAX_LABELS = 20  # of a confusion matrix


def write_card(bundle: Path, record: RunRecord) -> bool:
    """Write the model card of a bundle and return True, unless the user wrote or changed it."""
    path = bundle / CARD
    if path.exists() and MARK not in path.read_text(encoding="utf-8"):
        return False
    path.write_text(model_card(read_manifest(bundle), record), encoding="utf-8")
    return True


def model_card(manifest: Manifest, record: RunRecord) -> str:
    """Return the card of a model."""
    parts = [
        _front_matter(manifest, record),
        f"# {manifest.name}",
        manifest.description,
        _table(("", ""), _facts(manifest, record)),
        *_metrics(record),
        *_errors(record),
        *_training(record),
        MARK,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(manifest: Manifest, record: RunRecord) -> str:
    """Return the metadata in YAML. Strings are quoted as in JSON, which YAML reads as well."""
    fields: dict[str, Any] = {}
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", manifest.license):
        fields["license"] = manifest.license.lower()  # the identifiers of Hugging Face are lower case
    elif manifest.license:
        fields |= {"license": "other", "license_name": manifest.license}
    if manifest.languages is not None:
        fields["language"] = list(dict.fromkeys((*manifest.languages.sources, *manifest.languages.targets)))
    if record.task in TASKS:
        fields["pipeline_tag"] = TASKS[record.task].tag
    fields["tags"] = ["sightline", "onnx"]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _facts(manifest: Manifest, record: RunRecord) -> list[tuple[str, str]]:
    limits, languages = manifest.limits, manifest.languages
    kind = {"independent": "any number for a text", "tokens": "one for a token"}.get(
        manifest.label_kind, "one for a text"
    )
    sizes = f"{limits.max_source_tokens:,} tokens of input"
    if manifest.is_decoder_only:
        sizes = f"{limits.max_target_tokens:,} tokens, prompt and generated tokens together"
    elif limits.max_target_tokens:
        sizes += f", {limits.max_target_tokens:,} of output"
    facts = {
        "task": record.task,
        "architecture": f"{manifest.architecture}; {manifest.parameters:,} parameters",
        "vocabulary": f"{limits.vocabulary:,} tokens",
        "limits": sizes,
        "languages": None if languages is None else f"{languages.source} to {languages.target}",
        "labels": f"{', '.join(manifest.labels)} ({kind})" if manifest.labels else None,
        "chat": "has a chat template" if manifest.chat is not None else None,
        "examples": ", ".join(f"{split} {number:,}" for split, number in record.examples.items() if number is not None),
        "ignored keys": ", ".join(manifest.origin.ignored_keys) if manifest.origin is not None else None,
        "license": manifest.license or "not stated",
    }
    return [(name, value) for name, value in facts.items() if value]


def _metrics(record: RunRecord) -> list[str]:
    """Return the section with the metrics and how they were computed."""
    rows, signatures = list[tuple[str, ...]](), list[str]()
    for split, metrics in record.metrics.items():
        for name, recorded in (metrics or {}).items():
            if recorded is None:
                continue
            metric = Metric(value=recorded) if isinstance(recorded, float) else recorded
            number = _examples(metric, split, record)
            interval = "{:.4g} to {:.4g}".format(*metric.interval) if metric.interval else ""
            value, search, weights = _shown(metric.value), metric.search or "", metric.weights or ""
            rows.append((name, value, interval, split, number, search, weights))
            if metric.signature:
                signatures.append(f"Signature of {name} on {split}: `{metric.signature}`")
    if not rows:
        return []
    header = ("metric", "value", "95 % interval", "split", "examples", "search", "weights")
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    table = _table([header[column] for column in used], [[row[column] for column in used] for row in rows])
    return ["## Metrics", table, *signatures]


def _errors(record: RunRecord) -> list[str]:
    """Return the section with the confusion matrix and the worst examples of each split."""
    parts = list[str]()
    for split, errors in record.errors.items():
        if 0 < len(errors.confusion) <= MAX_LABELS:
            rows = [(true, *map(str, found.values())) for true, found in errors.confusion.items()]
            header = (f"{split}: label, prediction", *errors.confusion)
            parts.append(_table(header, rows))
        if errors.worst:
            names = list(dict.fromkeys(name for row in errors.worst for name in row))
            shown = [[_shown(row.get(name, "")) for name in names] for row in errors.worst]
            parts += [f"Worst outputs of {split}:", _table(names, shown)]
    return ["## Errors", *parts] if parts else []


def _examples(metric: Metric, split: str, record: RunRecord) -> str:
    """Return the number of examples of a metric, and that of the split if it is larger."""
    if metric.examples is None:
        return ""
    # A long text or dialogue of a language model is several examples.
    total = None if record.task == "language-model" else record.examples.get(split)
    return f"{metric.examples:,}" + (f" of {total:,}" if total and total > metric.examples else "")


def _training(record: RunRecord) -> list[str]:
    parts = [_fence("sh", record.command) if record.command else ""]
    versions = record.starts[-1].get("versions") if record.starts else None
    if isinstance(versions, dict) and versions:
        parts.append("Versions: " + ", ".join(f"{name} {_shown(version)}" for name, version in versions.items()))
    if record.data:
        parts.append(_table(("file", "SHA-256"), [(file, f"`{digest}`") for file, digest in record.data.items()]))
    if record.config:
        parts += ["Configuration:", _fence("json", json.dumps(record.config, indent=2, ensure_ascii=False))]
    return ["## Training", *parts] if any(parts) else []


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fence(language: str, text: str) -> str:
    """Return a block of code; its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(text) for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

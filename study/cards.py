"""Model cards of the zoo's bundles, from manifests and results alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import Recorded
from bench.report import table
from model.evaluation.bleu import TEST_SPLIT
from model.systems import MULTI30K, SMALLTALK, SST2, SYSTEMS, Corpus, bundle_name
from service.bundle import MANIFEST, Manifest, read_manifest
from study import collect, quality, recall

CARD = "MODEL_CARD.md"


@dataclass(frozen=True)
class Prose:
    """What a card says of all that has learnt from one corpus."""

    data: str
    good_for: str
    not_good_for: str
    licence: str


PROSE: Mapping[Corpus, Prose] = {
    MULTI30K: Prose(
        "Multi30k, `data/task1/raw`: 29,000 training pairs of image captions, English and German",
        "Seeing {this} with short descriptions of everyday scenes, beside the others of the zoo.",
        "Everything else. It has read 29,000 captions and nothing more. On other text it writes fluent German that has "
        "little to do with the source, and it inherits the captions' habits of describing people by looks, gender and "
        "origin. Do not use it where a translation matters.",
        '**For non-commercial research and education only.** Multi30k derives from Flickr30K, whose images come "for '
        'non-commercial research and/or educational purposes"; the text carries no licence of its own. The Apache '
        "License 2.0 of this repository covers the code, not these weights.",
    ),
    SST2: Prose(
        "the Stanford Sentiment Treebank's binary sentences: 6,920 of film reviews to train on",
        "Trying `/v1/classify`, and looking at the attention behind a label.",
        "Anything that matters to somebody. One sentence in five gets the wrong label, and it has read film reviews "
        "alone.",
        "**For research only.** The sentences come from film reviews and carry no licence of their own. The Apache "
        "License 2.0 of this repository covers the code, not these weights.",
    ),
    SMALLTALK: Prose(
        "40,000 dialogues that `model/data/dialogues.py` generates: small talk with one instruction at its start",
        "Trying a causal model, and seeing how long an instruction is kept.",
        "Conversation. It knows a few hundred phrases and four kinds of instructions, and no facts.",
        "Apache License 2.0, as the code that generated all that it has read.",
    ),
}

Results = Mapping[str, Recorded]


def write_cards(results: Results, bundles: Path) -> None:
    """Write the card of every bundle in a folder that is a system of the zoo."""
    for name in SYSTEMS:
        folder = bundles / bundle_name(name)
        if (folder / MANIFEST).is_file():
            (folder / CARD).write_text(card(name, read_manifest(folder), results), encoding="utf-8")


def card(name: str, manifest: Manifest, results: Results) -> str:
    prose = PROSE[SYSTEMS[name].corpus]
    facts = [
        ["architecture", f"{manifest.description}; {manifest.parameters:,} parameters"],
        ["tokens", f"byte-level BPE of {manifest.limits.vocabulary:,}, cased"],
        ["data", prose.data],
        ["training", f"`{_command(name, results)}` ([docs/training.md](../../docs/training.md))"],
        ["weights", "float16, computed in float32" if manifest.half_weights else manifest.dtype],
        ["tasks", ", ".join(manifest.tasks)],
        ["limits", _limits(manifest)],
    ]
    parts = [
        f"# {manifest.name}",
        "A demonstration for Sightline, trained from scratch and compared in [attention.md](../../docs/attention.md).",
        table(["", ""], facts),
        *_section("Figures", _figures(name, manifest.name, results)),
        *_section("What it is good for", prose.good_for.format(this=_what_is_seen(manifest))),
        *_section("What it is not good for", prose.not_good_for),
        *_section("Licence", prose.licence),
    ]
    return "\n\n".join(parts) + "\n"


def _command(name: str, results: Results) -> str:
    """What trains the same again."""
    (precision,) = {row["precision"] for row in _first_runs(name, results)} or {"float32"}
    option = "" if precision == "float32" else f" --precision {precision}"
    return f"python -m model zoo DATA --systems {name}{option}"


def _limits(manifest: Manifest) -> str:
    read = f"{manifest.limits.max_source_tokens} tokens of source"
    if manifest.step is None:
        return read
    if manifest.goes_on:
        return f"{manifest.limits.max_target_tokens} tokens, read and written together"
    return f"{read}, {manifest.limits.max_target_tokens} of target"


def _what_is_seen(manifest: Manifest) -> str:
    return "what this attention does" if manifest.attention else "what a model without attention does"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _figures(name: str, model: str, results: Results) -> str:
    """What was measured of it; "" where nothing was."""
    lines = [
        *(_trained(row) for row in _first_runs(name, results)),
        *(_served(row) for row in _rows(results, quality.NAME) if row["model"] == model),
        *(_kept(row) for row in _rows(results, recall.NAME) if row["model"] == name and row["instruction"] == "all"),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _first_runs(name: str, results: Results) -> list[Mapping[str, Any]]:
    """Of a system that translates, its run of seed 1."""
    return [row for row in _rows(results, collect.NAME) if row.get("system") == name and row["seed"] == 1]


def _rows(results: Results, step: str) -> list[Mapping[str, Any]]:
    return list(results[step].result.rows) if step in results else []


def _trained(row: Mapping[str, Any]) -> str:
    return (
        f"PyTorch, float32, {TEST_SPLIT}, beam {row['num_beams']}: {row['tokenised_bleu']['value']:.2f} BLEU "
        f"(lowercased, normalised, Moses-tokenised), {row['bleu']['value']:.2f} (13a, cased), chrF "
        f"{row['chrf']['value']:.2f}; {row['epochs']} epochs, {row['updates']:,} updates, seed {row['seed']}"
    )


def _served(row: Mapping[str, Any]) -> str:
    if "accuracy" in row:
        low, high = row["interval_95"]
        return (
            f"As served: {row['correct']} of {row['sentences']} right on {row['split']}, {row['accuracy']:.2f} % "
            f"(95 %: {low:.1f} to {high:.1f})"
        )
    return (
        f"As served, {row['split']}, beam {row['num_beams']}: {row['tok_lc']:.2f} BLEU (lowercased, normalised, "
        f"Moses-tokenised), {row['bleu']:.2f} (13a, cased), chrF {row['chrf']:.2f}"
    )


def _kept(row: Mapping[str, Any]) -> str:
    earlier = row["earlier_answers"]
    return f"Instruction kept at turn {row['turn']}, {earlier} earlier answers: {row['kept']} of {row['total']}"

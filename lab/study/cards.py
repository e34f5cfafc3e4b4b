"""Model cards of the bundles of the zoo, generated from manifests and results."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.record import Recorded
from lab.bench.report import table, wrap_prose
from lab.study import collect, quality, recall
from lab.zoo.systems import JOINED, MULTI30K, SMALL, SMALLTALK, SST2, SYSTEMS, Corpus, bundle_name
from sightline.base.bundle import MANIFEST, Manifest
from sightline.base.bundle_files import read_manifest
from sightline.model.evaluation.defaults import TEST_SPLIT

CARD = "MODEL_CARD.md"

# No system of the zoo is trained to embed sentences, so each card states what `/v1/encode` returns.
NOT_SIMILARITY = (
    "The encoder was not trained for sentence similarity. `/v1/encode` returns its hidden states; their cosines do not "
    "measure how similar two sentences are in meaning."
)


@dataclass(frozen=True)
class Prose:
    """Sections of a card that depend only on the training corpus."""

    data: str
    good_for: str
    not_good_for: str
    licence: str


PROSE: dict[Corpus, Prose] = {
    MULTI30K: Prose(
        "Multi30k, `data/task1/raw`: 29,000 training pairs of image captions, English and German",
        "Demonstrating {this} on short descriptions of everyday scenes, and comparing it with the other "
        "models of the zoo.",
        "All other uses. The training data are image captions. For other text, the model generates fluent "
        "German that has little to do with the source. Like the captions, it describes people by looks, gender and "
        "origin. Do not use it if the quality of a translation matters.",
        '**For non-commercial research and education only.** Multi30k derives from Flickr30K, whose images come "for '
        'non-commercial research and/or educational purposes"; the text carries no licence of its own. The Apache '
        "License 2.0 of this repository covers the code, not these weights.",
    ),
    SST2: Prose(
        "Stanford Sentiment Treebank, binary: 6,920 training sentences of film reviews",
        "Trying `/v1/classify` and looking at the attention weights for a label.",
        "Decisions of any consequence. One sentence in five gets the wrong label, and the training data are only film "
        "reviews.",
        "**For research only.** The sentences come from film reviews and carry no licence of their own. The Apache "
        "License 2.0 of this repository covers the code, not these weights.",
    ),
    SMALLTALK: Prose(
        "40,000 dialogues that `lab/zoo/dialogues.py` generates: small talk with one instruction at its start",
        "Trying a causal model, and measuring for how many turns it follows an instruction.",
        "Real conversation. The model knows a few hundred phrases, five kinds of instructions and no facts. It answers "
        "messages of its data, such as “How are you?” or “Tell me a joke.”, also after “Always finish with sunshine.”; "
        "to others, such as “Hi”, it replies with nonsense.",
        "Apache License 2.0, like the code that generated the training data.",
    ),
}

for _corpus, _data in (
    (SMALL, "Multi30k, `data/task1/raw`: 10,000 random training pairs of image captions, English and German"),
    (JOINED, "Multi30k, `data/task1/raw`: 5,000 joined captions of 20 to 60 words, English and German"),
):
    PROSE[_corpus] = replace(PROSE[MULTI30K], data=_data)

Results = Mapping[str, Recorded]


def write_cards(results: Results, bundles: Path) -> None:
    """Write the card of every bundle in a folder that is a system of the zoo."""
    for name in SYSTEMS:
        folder = bundles / bundle_name(name)
        if (folder / MANIFEST).is_file():
            text, docs = card(name, read_manifest(folder), results), os.path.relpath("docs", folder)
            (folder / CARD).write_text(text.replace("](../../docs/", f"]({docs}/"), encoding="utf-8")


def card(name: str, manifest: Manifest, results: Results) -> str:
    prose = PROSE[SYSTEMS[name].corpus]
    architecture = (manifest.description or "").partition(". Trained")[0]
    facts = [
        ["architecture", f"{architecture}; {manifest.parameters:,} parameters"],
        ["tokens", f"byte-level BPE of {manifest.limits.vocabulary:,}, cased"],
        ["data", prose.data],
        ["training", f"`{_command(name, results)}` ([docs/research/training.md](../../docs/research/training.md))"],
        ["weights", quality.describe_weights(manifest.stored_dtype, manifest.dtype)],
        ["tasks", ", ".join(manifest.tasks)],
        ["limits", _limits(manifest)],
        ["trained on", "single sentences" if manifest.training_unit == "sentence" else "texts"],
    ]
    parts = [
        f"# {manifest.name}",
        "A demonstration model of Sightline, trained from scratch. "
        "[attention.md](../../docs/research/attention.md) compares it with other models.",
        table(["", ""], facts),
        *_section("Figures", _figures(name, manifest.name, results)),
        *_section("What it is good for", prose.good_for.format(this=_what_is_seen(manifest))),
        *_section("What it is not good for", f"{prose.not_good_for}\n\n{NOT_SIMILARITY}"),
        *_section("Licence", prose.licence),
    ]
    return wrap_prose("\n\n".join(parts)) + "\n"


def _command(name: str, results: Results) -> str:
    """Return the command that trains the model again."""
    (precision,) = {row["precision"] for row in _first_runs(name, results)} or {"float32"}
    option = "" if precision == "float32" else f" --precision {precision}"
    return f"python -m lab.zoo train DATA --systems {name}{option}"


def _limits(manifest: Manifest) -> str:
    read = f"{manifest.limits.max_source_tokens} tokens of source"
    if manifest.decoder is None:
        return read
    if manifest.is_decoder_only:
        return f"{manifest.limits.max_target_tokens} tokens, prompt and generated tokens together"
    return f"{read}, {manifest.limits.max_target_tokens} of target"


def _what_is_seen(manifest: Manifest) -> str:
    return "this kind of attention" if manifest.attention else "a model without attention"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _figures(name: str, model: str, results: Results) -> str:
    """Return the measured results as a list; "" without results."""
    lines = [
        *(_trained(row) for row in _first_runs(name, results)),
        *(_served(row, name) for row in _rows(results, quality.NAME) if row["model"] == model),
        *(
            f"Instruction with an unseen value kept at turn {row['turn']}: {row['kept']} of {row['total']}"
            for row in _rows(results, recall.NAME)
            if (row["system"], row.get("condition")) == (name, recall.UNSEEN)
        ),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _first_runs(name: str, results: Results) -> list[Mapping[str, Any]]:
    """Return the run of seed 1 of a translation system."""
    return [row for row in _rows(results, collect.NAME) if row.get("system") == name and row["seed"] == 1]


def _rows(results: Results, step: str) -> list[Mapping[str, Any]]:
    return list(results[step].result.rows) if step in results else []


def _trained(row: Mapping[str, Any]) -> str:
    return (
        f"PyTorch, float32, {TEST_SPLIT}, beam {row['num_beams']}: {row['tokenised_bleu']['value']:.2f} BLEU "
        f"(lowercased, normalised, Moses-tokenised), {row['bleu']['value']:.2f} (13a, cased), chrF "
        f"{row['chrf']['value']:.2f}; {row['epochs']} epochs, {row['updates']:,} updates, seed {row['seed']}"
    )


def _served(row: Mapping[str, Any], system: str) -> str:
    if "accuracy" in row:
        low, high = row["interval_95"]
        return (
            f"As served: {row['correct']} of {row['sentences']} correct on {row['split']}, {row['accuracy']:.2f} % "
            f"(95 %: {low:.1f} to {high:.1f})"
        )
    joined = " joined to texts of 20 to 60 words" if SYSTEMS[system].corpus == JOINED else ""
    return (
        f"As served, {row['split']}{joined}, beam {row['num_beams']}: "
        f"{row['tok_lc']:.2f} BLEU (lowercased, normalised, Moses-tokenised), {row['bleu']:.2f} (13a, cased), "
        f"chrF {row['chrf']:.2f}"
    )

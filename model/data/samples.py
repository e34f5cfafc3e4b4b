"""Sample data for each task, made by rules from a seed. Nothing is taken from third-party texts.

- translation: English sentences about trips and their German translations, in which verbs,
  articles and adjectives agree. Sentences of test combine adjectives and places that never occur
  together in train and dev.
- classification: messages to a shop with five labels (`sightline.model.data.customer_messages`).
- language-model: dialogues of small talk. The last messages of test are never last in train.
- encoder: the English sentences of the translations, each with one that has synonyms for some of
  its words.
- tagging: sentences with names of persons, places and organisations. Those of test have names that
  train and dev do not have.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from sightline.base.errors import UsageError
from sightline.model.data.customer_messages import LABELS, draw_messages
from sightline.model.data.records import TaskName
from sightline.model.data.sample_phrases import read_phrases
from sightline.model.data.smalltalk import draw_exchange

DEFAULT_EXAMPLES: Mapping[TaskName, int] = {
    "translation": 5_000,
    "classification": 1_000,
    "language-model": 4_000,
    "encoder": 1_000,
    "reranking": 500,
    "tagging": 1_000,
}
HELD_OUT_SHARE, HELD_OUT = 0.2, (20, 200)  # of the number of examples in train; records of dev and of test
MAX_EXAMPLES = 50_000
_TRIES = 20  # draws for each record, after which a sample is too large

# Persons have the person and number of their verb, places their gender, and verbs their forms by
# person and number. Each is in English and German.
_TRIPS = read_phrases("trips")
TO = {"m": "zum", "f": "zur", "n": "zum"}  # with the dative
ACCUSATIVE = {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")}  # article, ending of an adjective


@dataclass(frozen=True)
class _Trip:
    """A sentence in both languages; its combination is held out for test or not."""

    source: str
    target: str
    is_held_out: bool


def _draw_trip(draw: Random) -> _Trip:
    places, adjectives = _TRIPS["places"], _TRIPS["adjectives"]
    person, time, reason = draw.choice(_TRIPS["persons"]), draw.choice(_TRIPS["times"]), draw.choice(_TRIPS["reasons"])
    place_index, adjective_index = draw.randrange(len(places)), draw.randrange(len(adjectives))
    place, adjective = places[place_index], adjectives[adjective_index]
    verb = draw.choice(("go", "go", "visit", "see"))
    means = draw.choice(_TRIPS["means"]) if verb == "go" else ("", "")
    english_verb, german_verb = _TRIPS["verbs"][verb][person[2]]
    gender = place[2]
    if verb == "go":
        english_object = f"to the {adjective[0]} {place[0]}"
        german_object = f"{TO[gender]} {adjective[1]}en {place[1]}"
    else:
        article, ending = ACCUSATIVE[gender]
        english_object, german_object = f"the {adjective[0]} {place[0]}", f"{article} {adjective[1]}{ending} {place[1]}"
    english = [person[0], english_verb, english_object, means[0]]
    # The German verb is always in the second place, so that the subject follows it after a time.
    if draw.random() < 0.5:
        english, german = [f"{time[0]},", *english], [time[1], german_verb, person[1], means[1], german_object]
    else:
        english, german = [*english, time[0]], [person[1], german_verb, time[1], means[1], german_object]
    is_held_out = (place_index + 2 * adjective_index) % 8 == 0
    source, target = _sentence(english, reason[0], ""), _sentence(german, reason[1], ",")
    return _Trip(source, target, is_held_out)


def _sentence(parts: Sequence[str], clause: str, separator: str) -> str:
    text = " ".join(filter(None, parts)) + (f"{separator} {clause}" if clause else "") + "."
    return text[0].upper() + text[1:]


_Drawn: TypeAlias = tuple[bool, dict[str, Any]]  # whether a record is held out for test, and its fields


def _translation(draw: Random) -> _Drawn:
    trip = _draw_trip(draw)
    return trip.is_held_out, {"source": trip.source, "target": trip.target}


def _paraphrase(draw: Random) -> _Drawn:
    trip = _draw_trip(draw)
    other = " ".join(_TRIPS["synonyms"].get(word, word) for word in trip.source.removesuffix(".").split())
    return trip.is_held_out, {"source": trip.source, "target": f"{other}."}


def _query(draw: Random) -> _Drawn:
    is_held_out, pair = _paraphrase(draw)
    other = _paraphrase(draw)[1]["target"]
    return is_held_out, {"query": pair["source"], "positive": pair["target"], "negative": other}


def _dialogue(draw: Random) -> _Drawn:
    said = [draw_exchange(draw) for _ in range(draw.choice((1, 1, 2, 3)))]
    messages = [
        {"role": role, "content": text}
        for exchange in said
        for role, text in (("user", exchange.message), ("assistant", exchange.answer))
    ]
    # A checksum is the same in each process, unlike `hash`.
    return zlib.crc32(said[-1].message.encode()) % 8 == 0, {"messages": messages}


_NAMES = read_phrases("names")
# Words of which a name consists, by its label.
_NAME_WORDS = {"PER": ("first", "last"), "LOC": ("place",), "ORG": ("company", "kind")}


def _tagged(draw: Random) -> _Drawn:
    text, entities, is_held_out = "", list[tuple[int, int, str]](), False
    for before, part in re.findall(r"([^{]*)(?:\{(\w+)\})?", draw.choice(_NAMES["sentences"])):
        text += before
        start = len(text)
        for kind in _NAME_WORDS.get(part, (part,) if part else ()):
            words = _NAMES[kind]
            word = draw.choice(words)
            if isinstance(words[0], list):  # beginnings and ends of names
                first, second = (draw.randrange(len(half)) for half in words)
                word = words[0][first] + words[1][second]
                is_held_out |= (first + 2 * second) % 8 == 0
            text += f"{' ' if len(text) > start else ''}{word}"
        label = "PER" if part == "last" else part
        if label in _NAME_WORDS:
            entities.append((start, len(text), label))
    return is_held_out, {"text": text, "entities": entities}


_DRAW: Mapping[str, Callable[[Random], _Drawn]] = {
    "translation": _translation,
    "language-model": _dialogue,
    "encoder": _paraphrase,
    "reranking": _query,
    "tagging": _tagged,
}


def draw_sample(task: TaskName, num_examples: int, seed: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Return the records of train, dev and test as fields of JSONL, without duplicates. Raises
    `UsageError` if the number of examples of train is too small or too large.
    """
    if not 10 <= num_examples <= MAX_EXAMPLES:
        raise UsageError(f"the number of examples must be between 10 and {MAX_EXAMPLES:,}, got {num_examples}")
    num_held_out = min(max(round(HELD_OUT_SHARE * num_examples), HELD_OUT[0]), HELD_OUT[1])
    numbers = {"train": num_examples, "dev": num_held_out, "test": num_held_out}
    if task == "classification":
        drawn = draw_messages(seed, {name: -(-number // len(LABELS)) for name, number in numbers.items()})
        return {name: [{"text": text, "label": label} for text, label in rows] for name, rows in drawn.items()}
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in numbers}
    seen, draw = set[str](), Random(seed)  # noqa: S311 - sentences, not secrets
    for _ in range(_TRIES * num_examples):
        is_held_out, record = _DRAW[task](draw)
        text = json.dumps(record, ensure_ascii=False)
        name = "test" if is_held_out else "dev" if len(parts["dev"]) < numbers["dev"] else "train"
        if text not in seen and len(parts[name]) < numbers[name]:
            seen.add(text)
            parts[name].append(record)
    short = [name for name, rows in parts.items() if len(rows) < numbers[name]]
    if short:
        raise UsageError(f"there are only {len(parts['train']):,} different examples; ask for fewer than that")
    return parts


def write_sample(task: TaskName, folder: Path, num_examples: int | None = None, seed: int = 1) -> dict[str, int]:
    """Write the records of a task to a folder as `train.jsonl`, `dev.jsonl` and `test.jsonl`, and
    return their numbers. Raises `UsageError` if the folder has files, or as `draw_sample` does.
    """
    parts = draw_sample(task, DEFAULT_EXAMPLES[task] if num_examples is None else num_examples, seed)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} has files, which could be yours; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in parts.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: len(records) for name, records in parts.items()}

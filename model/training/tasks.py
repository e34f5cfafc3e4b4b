"""Tasks of the systems by name, and their data."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sightline.model.config import ClassifierConfig, ModelConfig
from sightline.model.data.dialogues import draw_dialogues
from sightline.model.data.examples import Example, MemoryExamples, TrainingData
from sightline.model.data.text import read_labelled, read_parallel
from sightline.model.data.tokenizer import encode_lines, read_tokenizer, train_tokenizer
from sightline.model.training.classification import CLASSIFICATION
from sightline.model.training.config import SystemConfig
from sightline.model.training.folder import RunFolder
from sightline.model.training.language_model import LANGUAGE_MODEL
from sightline.model.training.task import Task
from sightline.model.training.translation import TRANSLATION

TASKS: Mapping[str, Task[Any, Any]] = {
    "translation": TRANSLATION,
    "classification": CLASSIFICATION,
    "chat": LANGUAGE_MODEL,
    "ghost-attention": LANGUAGE_MODEL,
    "ghost-attention-all-answers": LANGUAGE_MODEL,
}
# Names of the files for validation.
VALIDATION_SPLITS: Mapping[str, str] = {"translation": "val", "classification": "dev"}
# Number of dialogues of a split, and the offset that is added to the seed of the run to generate
# them.
DIALOGUES = {"train": (40_000, 0), "dev": (1_000, 500_000)}
TOKENIZER_DIALOGUES = 5_000


@dataclass(frozen=True)
class _Source:
    """Functions that read the data of a system.

    `texts` returns the texts for training the tokenizer. `examples` encodes a split: "train" or
    "dev".
    """

    texts: Callable[[Path, SystemConfig], list[str]]
    examples: Callable[[Path, str, Tokenizer, SystemConfig, ModelConfig], list[Example]]


def read_system_data(
    task: str, data: Path, run: Path, config: SystemConfig, make_model: Callable[[int], ModelConfig]
) -> tuple[TrainingData, ModelConfig]:
    """Read the data of a system.

    Args:
        task: name of the task in `TASKS`.
        data: folder of the data; chat systems ignore it, because the seed determines the dialogues.
        run: folder of the run, whose tokenizer is used if the run exists.
        config: settings of the training.
        make_model: maps the vocabulary size to a model configuration.

    Raises:
        FileNotFoundError: a data file is missing.
        ValueError: the data, or the tokenizer of the run, is not valid.
    """
    source, folder = _SOURCES[task], RunFolder(run)
    if folder.state.exists():
        tokenizer = read_tokenizer(folder.tokenizer)
    else:
        tokenizer = train_tokenizer(source.texts(data, config), config.vocab_size)
    model_config = make_model(tokenizer.get_vocab_size())
    splits = []
    for split in ("train", "dev"):
        examples = source.examples(data, split, tokenizer, config, model_config)
        sizes = TASKS[task].sizes(MemoryExamples(examples).lengths).max(axis=1)
        kept = [one for one, size in zip(examples, sizes, strict=True) if size <= config.max_length_tokens]
        if not kept:
            raise ValueError(
                f"no example of {split} has at most max_length_tokens ({config.max_length_tokens}); increase it"
            )
        splits.append(kept)
    digest = hashlib.sha256(repr(tuple(splits)).encode()).hexdigest()
    train, dev = map(MemoryExamples, splits)
    return TrainingData(tokenizer, train, dev, digest), model_config


def _read_sides(folder: Path, split: str, config: SystemConfig) -> tuple[list[str], list[str]]:
    """Read both sides of parallel text.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a line is blank, or see `read_parallel`.
    """
    sides = read_parallel(folder, split, config.source, config.target)
    for language, lines in zip((config.source, config.target), sides, strict=True):
        blank = [number for number, line in enumerate(lines, start=1) if not line.strip()]
        if blank:
            raise ValueError(
                f"{folder / split}.{language}, line {blank[0]} is blank ({len(blank)} blank lines in total); remove "
                f"these lines from both {split}.{config.source} and {split}.{config.target}"
            )
    return sides


def _parallel_texts(folder: Path, config: SystemConfig) -> list[str]:
    source, target = _read_sides(folder, "train", config)
    return source + target


def _pairs(
    folder: Path, split: str, tokenizer: Tokenizer, config: SystemConfig, model_config: ModelConfig
) -> list[Example]:
    name = "train" if split == "train" else VALIDATION_SPLITS["translation"]
    source, target = _read_sides(folder, name, config)
    return list(zip(encode_lines(tokenizer, source), encode_lines(tokenizer, target), strict=True))


def _labelled_texts(folder: Path, config: SystemConfig) -> list[str]:
    return read_labelled(folder, "train")[0]


def _labelled(
    folder: Path, split: str, tokenizer: Tokenizer, config: SystemConfig, model_config: ModelConfig
) -> list[Example]:
    assert isinstance(model_config, ClassifierConfig)
    texts, labels = read_labelled(folder, split, len(model_config.labels))
    return [(ids, [label]) for ids, label in zip(encode_lines(tokenizer, texts), labels, strict=True)]


def _dialogue_texts(folder: Path, config: SystemConfig, *, has_ghost_attention: bool) -> list[str]:
    drawn = draw_dialogues(config.seed, TOKENIZER_DIALOGUES, has_ghost_attention)
    return [one.text_and_answers()[0] for one in drawn]


def _dialogues(
    folder: Path,
    split: str,
    tokenizer: Tokenizer,
    config: SystemConfig,
    model_config: ModelConfig,
    *,
    has_ghost_attention: bool,
    all_answers: bool,
) -> list[Example]:
    """Encode dialogues, whose loss includes the last answer or all answers."""
    count, offset = DIALOGUES[split]
    drawn = draw_dialogues(config.seed + offset, count, has_ghost_attention)
    texts, answers = zip(*(one.text_and_answers() for one in drawn), strict=True)
    return [
        (
            [model_config.bos_id, *encoding.ids],
            [0, *counted_tokens(encoding.offsets, spans if all_answers else spans[-1:])],
        )
        for encoding, spans in zip(tokenizer.encode_batch(list(texts)), answers, strict=True)
    ]


def counted_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return 1 for each token that ends in a span of characters, and for the end token, else 0."""
    counted = [int(any(first < end <= last for first, last in spans)) for _, end in offsets]
    return [*counted[:-1], 1]


def _chat(*, has_ghost_attention: bool, all_answers: bool = False) -> _Source:
    return _Source(
        partial(_dialogue_texts, has_ghost_attention=has_ghost_attention),
        partial(_dialogues, has_ghost_attention=has_ghost_attention, all_answers=all_answers),
    )


_SOURCES: Mapping[str, _Source] = {
    "translation": _Source(_parallel_texts, _pairs),
    "classification": _Source(_labelled_texts, _labelled),
    "chat": _chat(has_ghost_attention=False),
    "ghost-attention": _chat(has_ghost_attention=True),
    "ghost-attention-all-answers": _chat(has_ghost_attention=True, all_answers=True),
}

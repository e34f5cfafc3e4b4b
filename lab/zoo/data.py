"""Data of the systems: corpora as `sightline train` reads them, and dialogues made by rules.

The dialogues have a reader of their own, because the chat format of `sightline train` has other
tokens than their plain text (`lab.zoo.dialogues`), and counts the tokens of all answers.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from lab.zoo.derived import derive
from lab.zoo.dialogues import Dialogue, draw_dialogues
from lab.zoo.systems import Corpus, System
from sightline.model.data.corpus import open_corpus
from sightline.model.data.encoding import encode
from sightline.model.data.examples import Example, MemoryExamples, TrainingData
from sightline.model.data.facts import check_corpus
from sightline.model.data.formats import Reading
from sightline.model.data.learnt_texts import read_texts
from sightline.model.data.preparation import prepare
from sightline.model.data.tokenizer_training import BOS, special_id, train_tokenizer
from sightline.model.training.options import TrainConfig

# Number of dialogues of a split, and the offset that is added to the seed of the run to generate
# them.
DIALOGUES = {"train": (40_000, 0), "dev": (1_000, 500_000)}
TOKENIZER_DIALOGUES = 5_000


def corpus_folder(corpus: Corpus, data: Path, runs: Path) -> Path:
    """Return the folder of the data of a corpus, and derive it if necessary."""
    if corpus.derived is None:
        return data / corpus.folder
    derive(corpus.derived, data / corpus.folder, runs / "data" / corpus.data_name)
    return runs / "data" / corpus.data_name


def read_data(
    system: System, data: Path, run: Path, config: TrainConfig, vocab_size: int, tokenizer: Tokenizer | None = None
) -> TrainingData:
    """Read and encode the data of a system; chat systems ignore `data`, because the seed determines
    their dialogues. Without a tokenizer, one with `vocab_size` is trained on the data.
    """
    if system.corpus.chat is not None:
        return _read_dialogues(system, config, vocab_size, tokenizer)
    source, target = system.corpus.languages or (None, None)
    corpus = open_corpus(data, Reading(system.task, source=source, target=target))
    facts = check_corpus(corpus)
    tokenizer = tokenizer or train_tokenizer(read_texts(corpus.train), vocab_size)
    encoder = partial(encode, labels=tuple(facts.labels))
    prepared = prepare(run, corpus, facts, tokenizer, encoder, config.max_length_tokens)
    return dataclasses.replace(prepared, dev_records=())  # the study needs no metrics of each epoch


def _read_dialogues(system: System, config: TrainConfig, vocab_size: int, tokenizer: Tokenizer | None) -> TrainingData:
    if tokenizer is None:
        drawn = draw_dialogues(config.seed, TOKENIZER_DIALOGUES, system.has_ghost_attention)
        tokenizer = train_tokenizer([dialogue.text_and_answers()[0] for dialogue in drawn], vocab_size)
    splits = []
    for count, offset in DIALOGUES.values():
        drawn = draw_dialogues(config.seed + offset, count, system.has_ghost_attention)
        examples = encode_dialogues(tokenizer, drawn, all_answers=system.all_answers)
        splits.append([example for example in examples if len(example[0]) <= config.max_length_tokens])
    train, dev = map(MemoryExamples, splits)
    return TrainingData(tokenizer, train, dev, hashlib.sha256(repr(tuple(splits)).encode()).hexdigest())


def encode_dialogues(tokenizer: Tokenizer, dialogues: Sequence[Dialogue], *, all_answers: bool) -> list[Example]:
    """Encode dialogues, whose loss includes the last answer or all answers."""
    texts, answers = zip(*(dialogue.text_and_answers() for dialogue in dialogues), strict=True)
    start_id = special_id(tokenizer, BOS)
    return [
        ([start_id, *encoding.ids], [0, *counted_tokens(encoding.offsets, spans if all_answers else spans[-1:])])
        for encoding, spans in zip(tokenizer.encode_batch(list(texts)), answers, strict=True)
    ]


def counted_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return 1 for each token that ends in a span of characters, and for the end token, else 0."""
    counted = [int(any(first < end <= last for first, last in spans)) for _, end in offsets]
    return [*counted[:-1], 1]

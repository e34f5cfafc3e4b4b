"""BLEU and chrF of a checkpoint on a test set, in two forms that are never mixed.

`tokenised_bleu` compares with the literature on Multi30k: output and reference lowercased, normalised, Moses-tokenised.
`bleu` and `chrf` score the text as a reader gets it: cased, with sacreBLEU's own 13a tokenisation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from tokenizers import Tokenizer
from tqdm import tqdm

from model.architectures.factory import TranslationModel
from model.data.text import read_lines, read_parallel
from model.data.tokenizer import decode_ids, encode_lines
from model.decoding.reference import beam, one_thread, pytorch_steps

MAX_NEW_TOKENS = 128
TEST_SPLIT = "test_2016_flickr"  # of Multi30k, as the literature reports it


@dataclass(frozen=True)
class Score:
    """A corpus score in percent, and sacreBLEU's signature of how it was made."""

    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.signature})"


@dataclass(frozen=True)
class Scores:
    bleu: Score
    chrf: Score
    tokenised_bleu: Score | None  # None where there is no tokenised reference


@dataclass(frozen=True)
class EvaluationSet:
    """Sentences, their translations, and the same translations lowercased, normalised and Moses-tokenised."""

    sources: list[str]
    references: list[str]
    tokenised_references: list[str] | None


def tokenised_path(folder: Path, split: str, target: str) -> Path:
    """Where Multi30k keeps the tokenised form of a split."""
    return folder / f"{split}.lc.norm.tok.{target}"


def read_test_set(folder: Path, split: str, source: str, target: str, limit: int | None = None) -> EvaluationSet:
    """Read the first `limit` pairs of a split, or all.

    Raises:
        FileNotFoundError: `split.source` or `split.target` is missing.
        ValueError: the files have different numbers of lines, or the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, it must be at least 1")
    sources, references = read_parallel(folder, split, source, target)
    path, tokenised = tokenised_path(folder, split, target), None
    if path.is_file():
        tokenised = read_lines(path)
        if len(tokenised) != len(references):
            raise ValueError(f"{path} has {len(tokenised)} lines, {split}.{target} has {len(references)}")
        tokenised = tokenised[:limit]
    return EvaluationSet(sources[:limit], references[:limit], tokenised)


def translate(
    model: TranslationModel, tokenizer: Tokenizer, sentences: Sequence[str], num_beams: int, length_penalty: float
) -> list[str]:
    """Translate one sentence after another by reference beam search, with a progress bar.

    Raises:
        ValueError: num_beams is below 1, the length penalty is not finite, or a sentence is too long for the model.
    """
    if num_beams < 1:
        raise ValueError(f"num_beams is {num_beams}, it must be at least 1")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty is {length_penalty}, it must be a finite number")
    config = model.config
    sources = encode_lines(tokenizer, sentences)
    for number, ids in enumerate(sources, start=1):
        if len(ids) > config.max_positions:
            raise ValueError(f"sentence {number} has {len(ids)} tokens, max_positions is {config.max_positions}")
    max_new_tokens = min(MAX_NEW_TOKENS, config.max_positions)
    outputs = []
    with one_thread():
        for ids in tqdm(sources, desc="translate", unit="sentence", leave=False):
            step = pytorch_steps(model, ids)
            (best,) = beam(step, config.bos_id, config.eos_id, max_new_tokens, num_beams, length_penalty)
            outputs.append(decode_ids(tokenizer, best.ids))
    return outputs


def moses_lines(lines: Sequence[str], language: str) -> list[str]:
    """Lowercase, normalise punctuation and tokenise, as Multi30k made its `lc.norm.tok` files."""
    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [
        tokenizer.tokenize(
            normalizer.normalize(line.lower()), return_str=True, escape=True, aggressive_dash_splits=False
        )
        for line in lines
    ]


def score(outputs: Sequence[str], test_set: EvaluationSet, target: str) -> Scores:
    """Score translations of a test set's sources; `target` is the language's two letters, for Moses."""
    tokenised_bleu = None
    if test_set.tokenised_references is not None:
        # force: the text is tokenised on purpose, which sacreBLEU would warn of.
        metric = BLEU(tokenize="none", force=True)
        tokenised_bleu = _corpus_score(metric, moses_lines(outputs, target), test_set.tokenised_references)
    return Scores(
        bleu=_corpus_score(BLEU(tokenize="13a"), outputs, test_set.references),
        chrf=_corpus_score(CHRF(), outputs, test_set.references),
        tokenised_bleu=tokenised_bleu,
    )


def _corpus_score(metric: BLEU | CHRF, outputs: Sequence[str], references: Sequence[str]) -> Score:
    value = metric.corpus_score(outputs, [references]).score
    return Score(value, str(metric.get_signature()))

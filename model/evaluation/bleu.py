"""BLEU and chrF of translations of a test set.

There are two kinds of scores, which must not be compared with each other. `tokenised_bleu` is
comparable with the literature on Multi30k: output and reference are lowercased, normalized and
Moses-tokenized. `bleu` and `chrf` are computed on the cased text that a reader gets, `bleu` with
the tokenization of the target language.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import _bootstrap_resample
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from tokenizers import Tokenizer
from tqdm import tqdm

from sightline.base.errors import UsageError
from sightline.model.architectures.factory import TranslationModel
from sightline.model.config import PretrainedConfig
from sightline.model.data.pretrained import target_tokenizer
from sightline.model.data.records import PairRecord, Record
from sightline.model.data.text import read_lines, read_parallel
from sightline.model.data.tokenizer_training import decode_ids, encode_lines
from sightline.model.decoding.batched import translate_batch
from sightline.model.evaluation.length_groups import MAX_TOKENS, encode_fitting, grouped
from sightline.model.evaluation.result import Evaluation, Method, shortened

MAX_NEW_TOKENS = 128

# Tokenizers of sacreBLEU for languages with other words than 13a finds: their codes, and characters
# that others do not have. Japanese comes before Chinese, because it has Chinese characters, too.
_TOKENIZERS = (
    ("ja-mecab", "ja jpn", re.compile("[\u3040-\u30ff]")),
    ("ko-mecab", "ko kor", re.compile("[\uac00-\ud7a3]")),
    ("zh", "zh zho chi cmn yue wuu lzh", re.compile("[\u3400-\u9fff]")),
    # Thai, Lao, Tibetan, Dzongkha, Burmese and Khmer
    ("char", "th tha lo lao bo bod dz dzo my mya km khm", re.compile("[\u0e00-\u109f\u1780-\u17ff]")),
)
_MIN_SHARE = 0.1  # of the characters of the references, above which they are in such a language


@dataclass(frozen=True)
class Score:
    """Corpus score in percent, and the sacreBLEU signature of its settings."""

    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.signature})"


@dataclass(frozen=True)
class Scores:
    bleu: Score
    chrf: Score
    tokenised_bleu: Score | None  # None without a tokenized reference


@dataclass(frozen=True)
class EvaluationSet:
    """Source sentences and references, which `tokenised_references` has lowercased, normalized and
    Moses-tokenized.
    """

    sources: list[str]
    references: list[str]
    tokenised_references: list[str] | None


def tokenised_path(folder: Path, split: str, target: str) -> Path:
    """Return the path of the tokenized references of a split, named as in Multi30k."""
    return folder / f"{split}.lc.norm.tok.{target}"


def read_test_set(folder: Path, split: str, source: str, target: str, limit: int | None = None) -> EvaluationSet:
    """Read the first `limit` pairs of a split, or all of them. Tokenized references are optional.
    Raises `ValueError` for files of different numbers of lines.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}")
    sources, references = read_parallel(folder, split, source, target)
    path, tokenised = tokenised_path(folder, split, target), None
    if path.is_file():
        tokenised = read_lines(path)
        if len(tokenised) != len(references):
            raise ValueError(
                f"{path} has {len(tokenised)} lines, but {split}.{target} has {len(references)}; they must be the same "
                "sentences"
            )
        tokenised = tokenised[:limit]
    return EvaluationSet(sources[:limit], references[:limit], tokenised)


def translate(
    model: TranslationModel, tokenizer: Tokenizer, sentences: Sequence[str], num_beams: int, length_penalty: float
) -> list[str]:
    """Translate sentences by beam search, with a progress bar on a terminal. Raises `ValueError`
    for a sentence that is too long for the model.
    """
    if num_beams < 1:
        raise UsageError(f"num_beams must be at least 1, got {num_beams}")
    if not math.isfinite(length_penalty):
        raise UsageError(f"length_penalty must be a finite number, got {length_penalty}")
    longest = model.config.max_positions
    sources = encode_fitting(tokenizer, sentences, longest)
    return _translate(model, tokenizer, sources, min(MAX_NEW_TOKENS, longest), num_beams, length_penalty)


def _translate(
    model: TranslationModel,
    tokenizer: Tokenizer,
    sources: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> list[str]:
    if isinstance(model.config, PretrainedConfig):
        tokenizer = target_tokenizer(model.config, tokenizer)
    outputs = [""] * len(sources)
    with tqdm(total=len(sources), desc="translate", unit="sentence", leave=False, disable=None) as bar:
        for group in grouped(list(map(len, sources)), MAX_TOKENS // num_beams):
            rows = [sources[index] for index in group]
            generated = translate_batch(model, rows, max_new_tokens, num_beams, length_penalty)
            for index, ids in zip(group, generated, strict=True):
                outputs[index] = decode_ids(tokenizer, ids)
            bar.update(len(group))
    return outputs


MAX_VALIDATED = 100  # sentences that `evaluate_translation` translates
BOOTSTRAP_SAMPLES = 1000


def evaluate_translation(model: TranslationModel, tokenizer: Tokenizer, records: Sequence[Record]) -> Evaluation:
    """Return chrF and BLEU of greedy translations of the first `MAX_VALIDATED` pairs.

    Pairs that are too long for the model are skipped. A translation has at most twice as many
    tokens as the longest source, and ten, so that an untrained model takes little time.
    """
    longest = model.config.max_positions
    pairs = [record for record in records if isinstance(record, PairRecord)][:MAX_VALIDATED]
    encoded = encode_lines(tokenizer, [pair.source for pair in pairs])
    kept = [(pair, ids) for pair, ids in zip(pairs, encoded, strict=True) if len(ids) <= longest]
    if not kept:
        return Evaluation({})
    sources, references = [pair.source for pair, _ in kept], [pair.target for pair, _ in kept]
    rows = [ids for _, ids in kept]
    max_new_tokens = min(MAX_NEW_TOKENS, longest, 2 * max(map(len, rows)) + 10)
    outputs = _translate(model, tokenizer, rows, max_new_tokens)
    samples = [
        f"source: {shortened(source)} | reference: {shortened(reference)} | output: {shortened(output)}"
        for source, reference, output in zip(sources[:3], references[:3], outputs[:3], strict=True)
    ]
    scores = {
        name: _corpus_score(metric, outputs, references)
        for name, metric in (("chrF", CHRF()), ("BLEU", cased_bleu(references)))
    }
    methods = {name: Method(len(kept), search_name(1), figure.signature) for name, figure in scores.items()}
    return Evaluation({name: figure.value for name, figure in scores.items()}, tuple(samples), methods)


def search_name(num_beams: int, length_penalty: float = 1.0) -> str:
    """Describe the search for translations."""
    return "greedy" if num_beams == 1 else f"{num_beams} beams, length penalty {length_penalty:g}"


def cased_bleu(references: Sequence[str], language: str = "") -> BLEU:
    """Return the metric of cased text, with the tokenizer of the target language.

    Characters replace the words of Japanese and Korean if MeCab is not installed. The language is a
    code such as "zh-CN" or "zho_Hans"; if it does not decide, the script of the references does.
    """
    code, text = re.split("[-_]", language.lower())[0], "".join("".join(references).split())
    tokenizer = next((name for name, codes, _ in _TOKENIZERS if code in codes.split()), None) or next(
        (name for name, _, script in _TOKENIZERS if len(script.findall(text)) > _MIN_SHARE * len(text)), "13a"
    )
    # `force` silences the warning of sacreBLEU about outputs that look tokenized.
    try:
        return BLEU(tokenize=tokenizer, force=True)
    except RuntimeError:  # MeCab is missing
        return BLEU(tokenize="char", force=True)


def bootstrapped_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return BLEU and chrF with 95 % confidence intervals as fields of a report.

    The intervals contain the scores of 95 % of sets of sentences that are drawn with replacement
    (bootstrap; Koehn 2004), with the seed of sacreBLEU.
    """
    fields = {}
    for name, metric in (("bleu", cased_bleu(references)), ("chrf", CHRF())):
        value = metric.corpus_score(outputs, [references]).score
        # `corpus_score` can resample too, but fails if the score of a sample is 0.
        statistics = metric._extract_corpus_statistics(outputs, [references])
        metric.n_bootstrap = BOOTSTRAP_SAMPLES
        metric.seed, samples = _bootstrap_resample(statistics, metric, BOOTSTRAP_SAMPLES)
        scores = sorted(float(sample.score) for sample in samples)
        rank = BOOTSTRAP_SAMPLES // 40
        interval = [round(scores[rank], 2), round(scores[-1 - rank], 2)]
        fields[name] = {"value": value, "interval_95": interval, "signature": str(metric.get_signature())}
    return fields


def translation_rows(pairs: Sequence[PairRecord], outputs: Sequence[str]) -> list[dict[str, Any]]:
    """Describe each pair with the output and its chrF."""
    chrf = CHRF()
    return [
        {
            "source": pair.source,
            "reference": pair.target,
            "output": output,
            "chrF": round(chrf.sentence_score(output, [pair.target]).score, 2),
        }
        for pair, output in zip(pairs, outputs, strict=True)
    ]


def moses_lines(lines: Sequence[str], language: str) -> list[str]:
    """Lowercase, normalize and tokenize lines, as in the `lc.norm.tok` files of Multi30k."""
    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [
        tokenizer.tokenize(
            normalizer.normalize(line.lower()), return_str=True, escape=True, aggressive_dash_splits=False
        )
        for line in lines
    ]


def score(outputs: Sequence[str], test_set: EvaluationSet, target: str) -> Scores:
    """Score translations of the sources of a test set; `target` is the code of their language."""
    tokenised_bleu = None
    if test_set.tokenised_references is not None:
        # `force` silences the warning of sacreBLEU about tokenized text, which is intended here.
        metric = BLEU(tokenize="none", force=True)
        tokenised_bleu = _corpus_score(metric, moses_lines(outputs, target), test_set.tokenised_references)
    return Scores(
        bleu=_corpus_score(cased_bleu(test_set.references, target), outputs, test_set.references),
        chrf=_corpus_score(CHRF(), outputs, test_set.references),
        tokenised_bleu=tokenised_bleu,
    )


def _corpus_score(metric: BLEU | CHRF, outputs: Sequence[str], references: Sequence[str]) -> Score:
    value = metric.corpus_score(outputs, [references]).score
    return Score(value, str(metric.get_signature()))

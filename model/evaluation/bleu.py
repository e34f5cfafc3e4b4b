"""BLEU and chrF of translations.

There are two kinds of scores, which must not be compared with each other. `tokenised_bleu` is
comparable with the literature on Multi30k: output and reference are lowercased, normalized and
Moses-tokenized. `bleu` and `chrf` are computed on the cased text that a reader gets, `bleu` with
the tokenization of the target language.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import _bootstrap_resample
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from tokenizers import Tokenizer
from tqdm import tqdm

from sightline.model.architectures.factory import TranslationModel
from sightline.model.config import PretrainedConfig
from sightline.model.data.encoding import target_tokenizer
from sightline.model.data.records import PairRecord, Record
from sightline.model.data.text import read_lines, read_parallel
from sightline.model.data.tokenizer_training import decode_ids, encode_lines
from sightline.model.decoding import translate_batch
from sightline.model.evaluation.length_groups import MAX_TOKENS, encode_fitting, grouped
from sightline.model.evaluation.result import Evaluation, Method, only, sample_lines

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
    interval: tuple[float, float] | None = None  # of 95 %


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
    tokenised_references: list[str] | None = None


def tokenised_path(folder: Path, split: str, target: str) -> Path:
    """Return the path of the tokenized references of a split, named as in Multi30k."""
    return folder / f"{split}.lc.norm.tok.{target}"


def read_test_set(folder: Path, split: str, source: str, target: str, limit: int | None = None) -> EvaluationSet:
    """Read the first `limit` pairs of a split, or all of them. Tokenized references are optional.
    Raises `ValueError` for files of different numbers of lines.
    """
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
    model: TranslationModel,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    num_beams: int = 1,
    length_penalty: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """Translate sentences by beam search, with a progress bar on a terminal. Raises `ValueError`
    for a sentence that is too long for the model.
    """
    sources = encode_fitting(tokenizer, sentences, model.config.max_positions)
    max_new_tokens = min(max_new_tokens, model.config.max_positions)
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
    longest, pairs = model.config.max_positions, only(records, PairRecord)[:MAX_VALIDATED]
    encoded = encode_lines(tokenizer, [pair.source for pair in pairs])
    fitting = test_set_of([pair for pair, ids in zip(pairs, encoded, strict=True) if len(ids) <= longest])
    if not fitting.sources:
        return Evaluation({})
    limit = 2 * max(len(ids) for ids in encoded if len(ids) <= longest) + 10
    outputs = translate(model, tokenizer, fitting.sources, max_new_tokens=min(MAX_NEW_TOKENS, limit))
    return evaluate_outputs(outputs, fitting, "greedy")


def evaluate_outputs(outputs: Sequence[str], test_set: EvaluationSet, search: str, target: str = "") -> Evaluation:
    """Return the scores of translations with intervals, and each translation with its chrF.
    `target` is the code of the language.
    """
    scores, chrf = score(outputs, test_set, target, BOOTSTRAP_SAMPLES), CHRF()
    named = {"chrF": scores.chrf, "BLEU": scores.bleu, "tok-lc BLEU": scores.tokenised_bleu}
    known = {name: one for name, one in named.items() if one is not None}
    predictions = [
        {
            "source": source,
            "reference": reference,
            "output": output,
            "chrF": round(chrf.sentence_score(output, [reference]).score, 2),
        }
        for source, reference, output in zip(test_set.sources, test_set.references, outputs, strict=True)
    ]
    return Evaluation(
        {name: one.value for name, one in known.items()},
        sample_lines(predictions),
        {name: Method(len(outputs), search, one.signature, one.interval) for name, one in known.items()},
        predictions,
        {"outputs": outputs},
    )


def test_set_of(pairs: Sequence[PairRecord]) -> EvaluationSet:
    return EvaluationSet([pair.source for pair in pairs], [pair.target for pair in pairs])


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


def moses_lines(lines: Sequence[str], language: str) -> list[str]:
    """Lowercase, normalize and tokenize lines, as in the `lc.norm.tok` files of Multi30k."""
    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [
        tokenizer.tokenize(
            normalizer.normalize(line.lower()), return_str=True, escape=True, aggressive_dash_splits=False
        )
        for line in lines
    ]


def score(outputs: Sequence[str], test_set: EvaluationSet, target: str, num_samples: int = 0) -> Scores:
    """Score translations of the sources of a test set; `target` is the code of their language.
    `num_samples` adds intervals, see `_corpus_score`.
    """
    tokenised_bleu = None
    if test_set.tokenised_references is not None:
        # `force` silences the warning of sacreBLEU about tokenized text, which is intended here.
        metric, tokenised = BLEU(tokenize="none", force=True), moses_lines(outputs, target)
        tokenised_bleu = _corpus_score(metric, tokenised, test_set.tokenised_references, num_samples)
    return Scores(
        bleu=_corpus_score(cased_bleu(test_set.references, target), outputs, test_set.references, num_samples),
        chrf=_corpus_score(CHRF(), outputs, test_set.references, num_samples),
        tokenised_bleu=tokenised_bleu,
    )


def _corpus_score(metric: BLEU | CHRF, outputs: Sequence[str], references: Sequence[str], num_samples: int) -> Score:
    """Return a score. If there are samples, its interval contains the scores of 95 % of sets of
    sentences that are drawn with replacement (bootstrap; Koehn 2004), with the seed of sacreBLEU.
    """
    value, interval = metric.corpus_score(outputs, [references]).score, None
    if num_samples:
        # `corpus_score` can resample too, but fails if the score of a sample is 0.
        statistics = metric._extract_corpus_statistics(outputs, [references])
        metric.n_bootstrap = num_samples
        metric.seed, samples = _bootstrap_resample(statistics, metric, num_samples)
        scores, rank = sorted(float(sample.score) for sample in samples), num_samples // 40
        interval = (round(scores[rank], 2), round(scores[-1 - rank], 2))
    return Score(value, str(metric.get_signature()), interval)

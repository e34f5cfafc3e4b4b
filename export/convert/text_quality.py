"""Comparison of a converted bundle with its float32 bundle on plain text.

The measure depends on the model:

- encoder: cosines of the pooled embeddings, and agreement of the labels of a model with labels;
- decoder-only: divergence of the probabilities of the next token, agreement of the first choice,
  and perplexity;
- encoder-decoder: chrF of the greedy outputs with those of the float32 model as references.

All graphs run in ONNX Runtime in batches of texts of similar length. Rows of a batch are
independent, so that the batches do not change the result.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sightline.base.bundle import (
    LABEL_OUTPUTS,
    AgreementQuality,
    EmbeddingQuality,
    LabelQuality,
    Manifest,
    PredictionQuality,
    SentenceEmbedding,
    TextQuality,
)
from sightline.base.text.prompt import tokenize_with_template
from sightline.base.text.tokenizer import TextTokenizer
from sightline.export.check.sessions import (
    Array,
    Sessions,
    default_language_ids,
    encode,
    initial_states,
    run_step,
    zero_states,
)
from sightline.export.import_errors import VerificationError
from sightline.export.options import (
    MAX_DIVERGENCE,
    MAX_SCORE_DIFFERENCE,
    MIN_CHRF,
    MIN_COSINE,
    MIN_SAME_FIRST,
    MIN_SAME_LABELS,
)
from sightline.model.data.tokenizer_training import decode_ids, encode_lines

BATCH_ROWS = 16
MAX_NEW_TOKENS = 128  # of each greedy output
CHRF_ORDER = 6  # longest character n-grams; default of sacreBLEU
CHRF_BETA = 2  # weight of recall; default of sacreBLEU

Ids = Sequence[int]


@dataclass(frozen=True)
class PlainText:
    """Texts without references."""

    texts: Sequence[str]


def text_ids(manifest: Manifest, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts as the service does by default.

    An embedding model gets its default prompt before each text. A model with a single score, which
    compares two texts, gets each text with the next one, in its template if it has one. A
    multilingual model gets the tokens of its default languages.
    """
    pairs = list(zip(texts, (*texts[1:], *texts[:1]), strict=True))
    if manifest.pair_template is not None:
        with_template = TextTokenizer(Tokenizer.from_str(tokenizer.to_str()))
        return [tokenize_with_template(with_template, manifest.pair_template, *pair) for pair in pairs]
    if manifest.labels and manifest.label_kind == "score":
        return [encoding.ids for encoding in tokenizer.encode_batch(pairs)]
    embedding, prompt = manifest.embedding, ""
    if embedding is not None and embedding.default_prompt is not None and manifest.decoder is None:
        prompt = embedding.prompts[embedding.default_prompt]
    before, after, _ = default_language_ids(manifest)
    return [[*before, *ids, *after] for ids in encode_lines(tokenizer, [prompt + text for text in texts])]


def compare_on_texts(
    float32: Sessions, quantized: Sessions, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, text: PlainText
) -> TextQuality:
    """Measure the loss of a converted bundle on texts.

    Raises `ValueError` if there is nothing to predict in all texts.
    """
    manifest = float32.manifest
    sources = text_ids(manifest, source_tokenizer, text.texts)
    if manifest.decoder is None:
        return _compare_encoders(float32, quantized, sources)
    if manifest.is_decoder_only:
        return _compare_predictions(float32, quantized, sources)
    return _compare_outputs(float32, quantized, target_tokenizer, sources)


def check_text_loss(quality: TextQuality) -> None:
    """Check that a measured loss is within its limit."""
    way_out = "try a smaller --block-size, more --bits or float32 for one group of layers, or use --force"
    if isinstance(quality, AgreementQuality):
        way_out += "; or measure BLEU on parallel text with --data"
    for problem in _problems(quality):
        raise VerificationError(f"{problem}; {way_out}")


def _problems(quality: TextQuality) -> Iterator[str]:
    """Yield the measures that are beyond their limits; NaN is beyond each."""
    match quality:
        case EmbeddingQuality(labels=labels):
            if not quality.mean_cosine >= MIN_COSINE:
                yield (
                    f"the embeddings have a mean cosine of {quality.mean_cosine:.4f} with those of float32, but at "
                    f"least {MIN_COSINE} is required"
                )
            if labels is not None and not labels.same_best >= MIN_SAME_LABELS:
                yield (
                    f"{labels.same_best:.1%} of {labels.compared} best labels equal those of float32, but at least "
                    f"{MIN_SAME_LABELS:.0%} is required"
                )
            if labels is not None and labels.labels == 1 and not labels.max_difference <= MAX_SCORE_DIFFERENCE:
                yield (
                    f"a score differs by {labels.max_difference:.3f} from that of float32, but at most "
                    f"{MAX_SCORE_DIFFERENCE} is accepted"
                )
        case PredictionQuality():
            if quality.mean_divergence is None or not quality.mean_divergence <= MAX_DIVERGENCE:
                yield (
                    f"the probabilities of the next token diverge from those of float32 by a mean of "
                    f"{quality.mean_divergence:.4f} nats, but at most {MAX_DIVERGENCE} is accepted (perplexity "
                    f"{quality.float32:.2f} before and {quality.quantized:.2f} after)"
                )
            if quality.same_first is None or not quality.same_first >= MIN_SAME_FIRST:
                yield (
                    f"{quality.same_first:.1%} of the most probable next tokens equal those of float32, but at least "
                    f"{MIN_SAME_FIRST:.0%} is required"
                )
        case AgreementQuality():
            if not quality.chrf >= MIN_CHRF:
                yield (
                    f"the outputs have a chrF of {quality.chrf:.1f} with those of float32, but at least {MIN_CHRF:g} "
                    "is required"
                )


def batches(sources: Sequence[Ids]) -> Iterator[list[int]]:
    """Return the indices of sources in batches of similar lengths, the shortest first."""
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    for start in range(0, len(order), BATCH_ROWS):
        yield order[start : start + BATCH_ROWS]


# Encoders


def _compare_encoders(float32: Sessions, quantized: Sessions, sources: Sequence[Ids]) -> EmbeddingQuality:
    manifest, cosines, same, differences = float32.manifest, list[float](), list[bool](), [0.0]
    for rows in batches(sources):
        batch = [sources[row] for row in rows]
        before, after = (encode(sessions, batch) for sessions in (float32, quantized))
        for row, source in enumerate(batch):
            vectors = [pool(outputs["hidden"][row, : len(source)], manifest.embedding) for outputs in (before, after)]
            cosines.append(cosine(*vectors))
            if manifest.labels:
                old, new = (label_probabilities(manifest, outputs, row, len(source)) for outputs in (before, after))
                same += (old.argmax(axis=-1) == new.argmax(axis=-1)).tolist()
                differences.append(float(np.abs(old - new).max()))
    labels = None
    if manifest.labels:
        labels = LabelQuality(
            labels=len(manifest.labels),
            compared=len(same),
            same_best=float(np.mean(same)),
            max_difference=max(differences),
        )
    return EmbeddingQuality(
        texts=len(sources), mean_cosine=float(np.mean(cosines)), min_cosine=min(cosines), labels=labels
    )


def pool(hidden: Array, embedding: SentenceEmbedding | None) -> NDArray[np.float64]:
    """Return the embedding (M,) of a text from its hidden states (S, M), not normalized."""
    states = hidden.astype(np.float64)
    pooled = {"mean": states.mean(axis=0), "max": states.max(axis=0), "first": states[0], "last": states[-1]}
    return np.asarray(pooled["mean" if embedding is None else embedding.pooling])


def cosine(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def label_probabilities(manifest: Manifest, outputs: dict[str, Array], row: int, length: int) -> Array:
    """Return the probabilities of the labels of a text (1, C), or of its tokens (S, C).

    Of a model that finds answers, they are those of the tokens (2, S): to be first, and last.
    """
    scores = outputs[LABEL_OUTPUTS[manifest.label_kind]][row].astype(np.float64)
    if manifest.label_kind == "span":
        powers = np.exp(scores[:length] - scores[:length].max(axis=0)).T
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
    if manifest.label_kind == "tokens":
        return np.asarray(np.exp(scores[:length]))
    if manifest.label_kind == "classes":
        return np.asarray(np.exp(scores[None]))
    return np.asarray(0.5 * (1 + np.tanh(scores[None] / 2)))  # the sigmoid, without overflow


# Decoder-only models


def _compare_predictions(float32: Sessions, quantized: Sessions, sources: Sequence[Ids]) -> PredictionQuality:
    predicted = sum(len(source) - 1 for source in sources)
    if not predicted:
        raise ValueError("each text has only one token, so that there is none to predict; use longer texts")
    before_total = after_total = divergence = 0.0
    num_same = 0
    for rows in batches(sources):
        batch = [sources[row] for row in rows]
        steps = zip(predictions(float32, batch), predictions(quantized, batch), strict=True)
        for (targets, before), (_, after) in steps:
            index = np.arange(len(targets)), targets
            before_total += float(before[index].sum())
            after_total += float(after[index].sum())
            divergence += float((np.exp(before) * (before - after)).sum())
            num_same += int((before.argmax(axis=-1) == after.argmax(axis=-1)).sum())
    return PredictionQuality(
        texts=len(sources),
        predicted_tokens=predicted,
        float32=math.exp(-before_total / predicted),
        quantized=math.exp(-after_total / predicted),
        mean_divergence=max(divergence / predicted, 0.0),
        same_first=num_same / predicted,
    )


def predictions(sessions: Sessions, sources: Sequence[Ids]) -> Iterator[tuple[list[int], NDArray[np.float64]]]:
    """Yield the next tokens of the texts after each position, and the log-probabilities (N, V).

    Each step reads one token of every text. Shorter texts repeat their last token until the end;
    these predictions are left out.
    """
    longest = max(map(len, sources))
    states = zero_states(sessions.manifest.states, len(sources), longest)
    lengths = [len(source) for source in sources]
    for step in range(longest - 1):
        tokens = [source[min(step, len(source) - 1)] for source in sources]
        outputs = run_step(sessions, states, tokens, [step] * len(sources), lengths, ["logprobs"])
        rows = [row for row, source in enumerate(sources) if step + 1 < len(source)]
        yield [sources[row][step + 1] for row in rows], outputs["logprobs"][rows].astype(np.float64)


# Encoder-decoder models


def _compare_outputs(
    float32: Sessions, quantized: Sessions, tokenizer: Tokenizer, sources: Sequence[Ids]
) -> AgreementQuality:
    same, before, after = 0, list[str](), list[str]()
    for rows in batches(sources):
        batch = [sources[row] for row in rows]
        old, new = (greedy_outputs(sessions, batch) for sessions in (float32, quantized))
        same += sum(old_ids == new_ids for old_ids, new_ids in zip(old, new, strict=True))
        before += [decode_ids(tokenizer, ids) for ids in old]
        after += [decode_ids(tokenizer, ids) for ids in new]
    return AgreementQuality(texts=len(sources), chrf=chrf(after, before), same_outputs=same / len(sources))


def greedy_outputs(
    sessions: Sessions,
    sources: Sequence[Ids],
    measured: Sequence[str] = (),
    on_step: Callable[[dict[str, Array], list[bool]], None] = lambda outputs, is_done: None,
) -> list[list[int]]:
    """Generate greedily from several sources, without the end token.

    Suppressed tokens and the target prefix of the default language apply, other settings do not.
    `on_step` gets the outputs `measured` of each step that chooses a token, and which rows ended
    before.
    """
    manifest = sessions.manifest
    _, _, prefix = default_language_ids(manifest)
    forced = [*manifest.tokens.start_ids, *prefix]
    new_tokens = min(MAX_NEW_TOKENS, manifest.max_new_tokens_for(max(map(len, sources))) - len(prefix))
    steps = len(forced) + new_tokens - 1
    states = initial_states(manifest, encode(sessions, sources), steps)
    lengths = [len(source) for source in sources]
    outputs: list[list[int]] = [[] for _ in sources]
    tokens, is_done = [forced[0]] * len(sources), [False] * len(sources)
    suppressed = list(manifest.generation.suppress_tokens)
    requested = ["logits" if manifest.shortlist is None else "top_ids", *measured]
    for step in range(steps):
        scores = run_step(sessions, states, tokens, [step] * len(sources), lengths, requested)
        if step + 1 < len(forced):
            tokens = [forced[step + 1]] * len(sources)
            continue
        on_step(scores, is_done)
        if manifest.shortlist is None:
            scores["logits"][:, suppressed] = -np.inf
            tokens = scores["logits"].argmax(axis=-1).tolist()
        else:
            allowed = ~np.isin(scores["top_ids"], suppressed)
            tokens = scores["top_ids"][np.arange(len(sources)), allowed.argmax(axis=-1)].tolist()
        for row, token in enumerate(tokens):
            is_done[row] = is_done[row] or token in manifest.tokens.end_ids
            if not is_done[row]:
                outputs[row].append(token)
        if all(is_done):
            break
    return outputs


def chrf(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Compute corpus chrF2 in percent (Popović 2015), as sacreBLEU does by default.

    It is the F-score of character n-grams of 1 to 6 characters without whitespace, with precision
    and recall averaged over the lengths of n-grams.
    """
    precisions, recalls = [], []
    for order in range(1, CHRF_ORDER + 1):
        matches = num_output = num_reference = 0
        for output, reference in zip(outputs, references, strict=True):
            ngrams, expected = _ngrams(output, order), _ngrams(reference, order)
            matches += (ngrams & expected).total()
            num_output += ngrams.total() if expected else 0
            num_reference += expected.total()
        if num_output and num_reference:
            precisions.append(matches / num_output)
            recalls.append(matches / num_reference)
    if not precisions:  # all outputs or all references are empty, which shows nothing
        return 0.0
    precision, recall = np.mean(precisions), np.mean(recalls)
    if precision + recall == 0:
        return 0.0
    weight = CHRF_BETA**2
    return float(100 * (1 + weight) * precision * recall / (weight * precision + recall))


def _ngrams(text: str, order: int) -> Counter[str]:
    characters = "".join(text.split())
    return Counter(characters[start : start + order] for start in range(len(characters) - order + 1))

"""Evaluation of a model of any task on records, and its report for a reader."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.model.architectures.factory import Model, TranslationModel
from sightline.model.config import task_of
from sightline.model.data.records import PairRecord, Record, TaskName
from sightline.model.evaluation.accuracy import evaluate_classification
from sightline.model.evaluation.bleu import EvaluationSet, evaluate_outputs, search_name, test_set_of, translate
from sightline.model.evaluation.entities import evaluate_tagging
from sightline.model.evaluation.language import evaluate_language
from sightline.model.evaluation.ranking import evaluate_encoder, evaluate_reranking
from sightline.model.evaluation.result import Evaluation, only

EVALUATIONS: Mapping[TaskName, Callable[[Any, Tokenizer, Sequence[Record]], Evaluation]] = {
    "tagging": evaluate_tagging,
    "classification": evaluate_classification,
    "language-model": evaluate_language,
    "reranking": partial(evaluate_reranking, max_records=None),
    "encoder": partial(evaluate_encoder, max_pairs=None),
}


def evaluate_model(
    model: Model, tokenizer: Tokenizer, records: Sequence[Record], num_beams: int = 5, length_penalty: float = 1.0
) -> Evaluation:
    """Return metrics of a model with their settings and, where defined, 95 % intervals.

    - Translation: BLEU and chrF of beam search, with sacreBLEU's signatures, and all outputs.
    - Classification: accuracy and F1, the scores of each label, and the most frequent confusions.
    - Tagging: F1 of entities, in total and by label, and texts with errors.
    - Language model: perplexity, and for dialogues the share of replies that are reproduced.
    - Encoder: recall and mean reciprocal rank, or for scores their correlation.
    - Reranking: nDCG and mean reciprocal rank, and for scores their correlation.

    The model is in evaluation mode. Raises `UsageError` if there are no records, the task does not
    have such records, or the settings of beam search are invalid; `ValueError` if a text is too
    long for the model, or the model lacks a label.
    """
    if not records:
        raise UsageError("there is nothing to evaluate: the data has no records")
    if isinstance(model, TranslationModel):
        pairs = test_set_of(only(records, PairRecord))
        return evaluate_search(model, tokenizer, pairs, "", num_beams, length_penalty)
    return EVALUATIONS[task_of(model.config)](model, tokenizer, records)


def evaluate_search(
    model: TranslationModel,
    tokenizer: Tokenizer,
    test_set: EvaluationSet,
    target: str,
    num_beams: int,
    length_penalty: float,
) -> Evaluation:
    """Return BLEU and chrF of beam search; `target` is the code of the language, or empty."""
    outputs = translate(model, tokenizer, test_set.sources, num_beams, length_penalty)
    return evaluate_outputs(outputs, test_set, search_name(num_beams, length_penalty), target)


def report_lines(evaluation: Evaluation) -> list[str]:
    """Return tables of the metrics and of the scores of each label, and sample outputs."""
    rows, signatures = [("metric", "value", "95 % interval", "examples")], list[str]()
    for name, value in evaluation.metrics.items():
        method = evaluation.methods[name]
        interval = "{:.2f} to {:.2f}".format(*method.interval) if method.interval else ""
        shown = f"{value:.6g}" if name == "perplexity" else f"{value:.2f}"
        rows.append((name, shown, interval, f"{method.examples:,}"))
        signatures += [f"{name}: {method.search}, {method.signature}"] if method.signature else []
    lines = [*_aligned(rows), *signatures]
    if labels := evaluation.details.get("labels"):
        (unit,) = {*next(iter(labels.values()))} - {"precision", "recall", "f1"}  # texts or entities
        scores = [
            (label, *(f"{found[name]:.2f}" for name in ("precision", "recall", "f1")), f"{found[unit]:,}")
            for label, found in labels.items()
        ]
        lines += ["", *_aligned([("label", "precision", "recall", "F1", unit), *scores])]
    return [*lines, *([""] if evaluation.samples else []), *evaluation.samples]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; all columns but the first are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip() for first, *others in rows
    ]

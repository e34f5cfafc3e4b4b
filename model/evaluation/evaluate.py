"""Evaluation of a checkpoint of any task on records, as the fields of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.encoder import TextEncoder
from sightline.model.architectures.factory import Model, TaggingModel, TranslationModel
from sightline.model.architectures.pretrained import (
    PretrainedClassifier,
    PretrainedDecoder,
    PretrainedEncoder,
    PretrainedReranker,
)
from sightline.model.checkpoint import load_metadata, load_model
from sightline.model.data.records import DialogueRecord, LabelledRecord, PairRecord, Record, TaggedRecord, TextRecord
from sightline.model.evaluation.accuracy import (
    accuracy_fields,
    chosen_labels,
    confusion_lines,
    confusion_matrix,
    count_labels,
    exact_matches,
    expected_labels,
    label_fields,
    label_metrics,
    prediction_rows,
    scores_of,
)
from sightline.model.evaluation.bleu import bootstrapped_scores, search_name, translate, translation_rows
from sightline.model.evaluation.entities import tagging_fields
from sightline.model.evaluation.language import language_evaluation, language_fields
from sightline.model.evaluation.ranking import ranking_fields
from sightline.model.evaluation.result import Evaluation, Method
from sightline.model.evaluation.retrieval import retrieval_fields
from sightline.model.parts import weights_file

RecordT = TypeVar("RecordT", bound=Record)


def evaluate_checkpoint(
    checkpoint: Path, records: Sequence[Record], *, num_beams: int = 5, length_penalty: float = 1.0
) -> dict[str, Any]:
    """Return the report of a checkpoint: its metadata, and the fields of `evaluate_model`."""
    model, tokenizer = load_model(checkpoint)
    report = evaluate_model(model, tokenizer, records, num_beams=num_beams, length_penalty=length_penalty)
    return {"checkpoint": load_metadata(weights_file(checkpoint)), **report}


def evaluate_model(
    model: Model, tokenizer: Tokenizer, records: Sequence[Record], *, num_beams: int = 5, length_penalty: float = 1.0
) -> dict[str, Any]:
    """Return metrics of a model with their settings and, where defined, 95 % intervals.

    - Translation: BLEU and chrF of beam search, with sacreBLEU's signatures, and all outputs.
    - Classification: accuracy and F1, the scores of each label, and the most frequent confusions.
    - Tagging: F1 of entities, in total and by label, and texts with errors.
    - Language model: perplexity, and for dialogues the share of replies that are reproduced.
    - Encoder: recall and mean reciprocal rank, or for scores their correlation.
    - Reranking: nDCG and mean reciprocal rank, and for scores their correlation.

    `predictions` of the report describes each record with the output of the model.

    The model is in evaluation mode. Raises `UsageError` if there are no records, the task does not
    have such records, or the settings of beam search are invalid; `ValueError` if a text is too
    long for the model, or the model lacks a label.
    """
    if not records:
        raise UsageError("there is nothing to evaluate: the data has no records")
    if isinstance(model, TranslationModel):
        return _translation(model, tokenizer, _only(PairRecord, records), num_beams, length_penalty)
    if isinstance(model, TaggingModel):
        return tagging_fields(model, tokenizer, _only(TaggedRecord, records))
    if isinstance(model, Classifier | PretrainedClassifier):
        return _classification(model, tokenizer, _only(LabelledRecord, records))
    if isinstance(model, CausalModel | PretrainedDecoder):
        for record in records:
            if not isinstance(record, TextRecord | DialogueRecord):
                raise _other_record(record, "texts or dialogues")
        return {"task": "language-model", **language_fields(model, tokenizer, records)}
    if isinstance(model, PretrainedReranker):
        return {"task": "reranking", **ranking_fields(model, tokenizer, _only(PairRecord, records))}
    assert isinstance(model, TextEncoder | PretrainedEncoder)
    return {"task": "encoder", **retrieval_fields(model, tokenizer, _only(PairRecord, records))}


def headline(report: Mapping[str, Any]) -> Evaluation:
    """Return the main metrics of a report of `evaluate_model`."""
    if report["task"] == "language-model":
        return language_evaluation(report)
    if report["task"] == "translation":
        scores = {name: report[name.lower()] for name in ("BLEU", "chrF")}
        search = search_name(report["num_beams"], report["length_penalty"])
        methods = {
            name: Method(report["sentences"], search, score["signature"], score.get("interval_95"))
            for name, score in scores.items()
        }
        return Evaluation({name: round(score["value"], 2) for name, score in scores.items()}, methods=methods)
    if report["task"] in ("encoder", "reranking") and "metrics" in report:
        return Evaluation(report["metrics"], methods=dict.fromkeys(report["metrics"], Method(report["pairs"])))
    if report["task"] in ("classification", "tagging"):
        metrics, method = report["metrics"], Method(report["sentences"])
    else:
        names = {"recall@1": "recall_at_1", "recall@10": "recall_at_10", "MRR": "mrr"}
        metrics, method = {name: report[field] for name, field in names.items()}, Method(report["pairs"])
    methods = dict.fromkeys(metrics, method)
    for name in {"accuracy", "exact match", "recall@1"} & metrics.keys():
        methods[name] = replace(method, interval=report["interval_95"])
    return Evaluation(metrics, methods=methods)


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a report for a reader."""
    evaluation, signatures = headline(report), list[str]()
    rows = [("metric", "value", "95 % interval", "examples")]
    for name, value in evaluation.metrics.items():
        method = evaluation.methods[name]
        interval = "{:.2f} to {:.2f}".format(*method.interval) if method.interval else ""
        shown = f"{value:.6g}" if name == "perplexity" else f"{value:.2f}"
        rows.append((name, shown, interval, f"{method.examples:,}"))
        signatures += [f"{name}: {method.search}, {method.signature}"] if method.signature else []
    lines = [f"evaluated on {report['data']}", "", *_aligned(rows), *signatures]
    if report["task"] in ("classification", "tagging"):
        names, counted = ("precision", "recall", "f1"), "texts" if report["task"] == "classification" else "entities"
        scores = [
            (label, *(f"{found[name]:.2f}" for name in names), f"{found[counted]:,}")
            for label, found in report["labels"].items()
        ]
        lines += ["", *_aligned([("label", "precision", "recall", "F1", counted), *scores])]
    examples = [*report.get("confusions", ()), *report.get("samples", ())]
    return [*lines, *([""] if examples else []), *examples]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; all columns but the first are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip() for first, *others in rows
    ]


def _translation(
    model: TranslationModel,
    tokenizer: Tokenizer,
    pairs: Sequence[PairRecord],
    num_beams: int,
    length_penalty: float,
) -> dict[str, Any]:
    outputs = translate(model, tokenizer, [pair.source for pair in pairs], num_beams, length_penalty)
    return {
        "task": "translation",
        "sentences": len(outputs),
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        **bootstrapped_scores(outputs, [pair.target for pair in pairs]),
        "outputs": outputs,
        "predictions": translation_rows(pairs, outputs),
    }


def _classification(
    model: Classifier | PretrainedClassifier, tokenizer: Tokenizer, records: Sequence[LabelledRecord]
) -> dict[str, Any]:
    labels, texts = model.config.labels, [record.text for record in records]
    expected = expected_labels(records, labels)
    scores, multi_label = scores_of(model, tokenizer, texts), model.config.multi_label
    predicted = chosen_labels(scores, multi_label)
    metrics = label_metrics(predicted, expected, len(labels), multi_label)
    return {
        "task": "classification",
        "multi_label": multi_label,
        **accuracy_fields(exact_matches(predicted, expected)),
        "metrics": {name: round(value, 2) for name, value in metrics.items()},
        "labels": label_fields(count_labels(predicted, expected, len(labels)), labels),
        "confusions": confusion_lines(texts, predicted, expected, labels),
        "confusion": {} if multi_label else confusion_matrix(predicted, expected, labels),
        "predictions": prediction_rows(texts, scores, expected, labels, multi_label),
    }


DESCRIPTIONS = {
    PairRecord: "pairs",
    LabelledRecord: "labelled texts",
    TaggedRecord: "texts with entities",
    TextRecord: "texts",
    DialogueRecord: "dialogues",
}


def _only(kind: type[RecordT], records: Sequence[Record]) -> list[RecordT]:
    checked = list[RecordT]()
    for record in records:
        if not isinstance(record, kind):
            raise _other_record(record, DESCRIPTIONS[kind])
        checked.append(record)
    return checked


def _other_record(record: Record, needed: str) -> UsageError:
    return UsageError(f"the model is evaluated on {needed}, but the data has {DESCRIPTIONS[type(record)]}")

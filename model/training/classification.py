"""Tasks with labels: classification of texts, and tagging of tokens. The loss is the cross-entropy
of the labels; if a text has any number of them, the binary cross-entropy of each label.

A new classifier starts with log-count ratios: how much more often texts of a label have a token.
They are the weights of a naive Bayes classifier, on which Wang and Manning 2012 ("Baselines and
Bigrams", section 2.1) train linear models. Here, they are features of the tokens. Shapes use V
vocabulary, C labels, K features, M width of the model.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.factory import TaggingModel
from sightline.model.architectures.pretrained import PretrainedClassifier, PretrainedReranker
from sightline.model.data.batches import LabelledBatch, make_labelled_batch, make_tagged_batch
from sightline.model.data.examples import Examples
from sightline.model.data.tags import NO_TAG
from sightline.model.evaluation.accuracy import evaluate_classification
from sightline.model.evaluation.entities import evaluate_tagging
from sightline.model.training.task import Task

RATIO_SCALE = 4.0  # of the features, relative to that of the random embeddings
MAX_RATIO_SHARE = 0.25  # of the width that features may have


def count_texts(batch: LabelledBatch, pad_id: int) -> int:
    return len(batch.labels)


def class_weights(texts: Mapping[str, int], total: int, *, multi_label: bool) -> Tensor:
    """Return the weights with which all labels count equally, given the number of texts of each.

    With one label for a text, their mean over the texts is 1. Otherwise, they weight the texts that
    have the label, so that these count as much as those that do not.
    """
    counts = torch.tensor(list(texts.values()), dtype=torch.float32)
    return (total - counts).clamp(min=1) / counts if multi_label else total / len(counts) / counts


def label_loss(
    model: Classifier | PretrainedClassifier | PretrainedReranker,
    batch: LabelledBatch,
    smoothing: float = 0.0,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the sum of the label-smoothed cross-entropies of a batch, in nats. `weights` are those
    of the labels (C,), if there are any.

    With any number of labels, or a score of a text, labels are targets between 0 and 1, and the sum
    is over texts and labels; with label smoothing, a target is `smoothing / 2` instead of 0, and
    `1 - smoothing / 2` instead of 1.
    """
    scores = model(batch.source, batch.source_lengths)  # (B, C), or (B, S, C) of tags
    if weights is not None:
        weights = weights.to(scores.device)
    if batch.labels.is_floating_point():  # scores are logits
        targets = batch.labels * (1 - smoothing) + smoothing / 2
        return functional.binary_cross_entropy_with_logits(scores, targets, pos_weight=weights, reduction="sum")
    # Scores are log-probabilities, which softmax does not change.
    scores, labels = scores.flatten(0, -2), batch.labels.flatten()
    return functional.cross_entropy(
        scores, labels, weights, ignore_index=NO_TAG - 1, label_smoothing=smoothing, reduction="sum"
    )


def log_ratios(examples: Examples, vocab_size: int, num_labels: int) -> Tensor:
    """Return the log-count ratios (V, C) of all tokens. A ratio compares the share of the texts
    with a label that have the token with that of the other texts; one text is added to each count.
    """
    having, texts = torch.zeros(vocab_size, num_labels), torch.zeros(num_labels)  # texts with a token and a label
    of_all = torch.zeros(vocab_size)
    for index in range(len(examples)):
        ids, labels = map(list, examples[index])
        tokens = torch.tensor(sorted(set(ids)))
        of_all[tokens] += 1
        for label in labels:
            having[tokens, label] += 1
            texts[label] += 1
    others, other_texts = of_all.unsqueeze(1) - having, len(examples) - texts
    return ((having + 1) / (texts + 2)).log() - ((others + 1) / (other_texts + 2)).log()


def embed_log_ratios(model: Classifier | PretrainedClassifier, examples: Examples) -> None:
    """Replace the last columns of the token embeddings of one of our own models by the log-count
    ratios of all labels.

    They are the last, because sinusoidal positions vary least there. Many labels are replaced by
    the principal components of their ratios; for two that exclude each other, one column is enough.
    """
    if isinstance(model, PretrainedClassifier):
        return
    config = model.config
    ratios = log_ratios(examples, config.vocab_size, len(config.labels))
    num_features = len(config.labels) - (not config.multi_label)
    num_features = max(1, min(num_features, int(MAX_RATIO_SHARE * config.d_model)))
    _, _, directions = torch.linalg.svd(ratios.T @ ratios)  # (C, C)
    features = ratios @ directions[:num_features].T  # (V, K)
    features = features * (num_features / len(config.labels)) ** 0.5  # the size of a label's ratios
    with torch.no_grad():
        # `embed` multiplies by sqrt(d_model).
        model.embedding.weight[:, -num_features:] = RATIO_SCALE * config.d_model**-0.5 * features


CLASSIFICATION: Task[LabelledBatch, Classifier | PretrainedClassifier] = Task(
    name="classification",
    make_batch=make_labelled_batch,
    count=count_texts,
    training_loss=label_loss,
    evaluate=evaluate_classification,
    initialise=embed_log_ratios,
)

TAGGING: Task[LabelledBatch, TaggingModel] = Task(
    name="tagging",
    make_batch=make_tagged_batch,
    count=lambda batch, pad_id: int((batch.labels != NO_TAG - 1).sum()),
    training_loss=label_loss,
    evaluate=evaluate_tagging,
)

"""Initial token embeddings of a classifier: how much more often texts of a label have a token.

Log-count ratios are the weights of a naive Bayes classifier, on which Wang and Manning 2012
("Baselines and Bigrams", section 2.1) train linear models. Here, they are features of the tokens
with which the training starts. Shapes use V vocabulary, C labels, K features, M width of the model.
"""

import torch
from torch import Tensor

from sightline.model.architectures.classifier import Classifier
from sightline.model.data.examples import Examples

SCALE = 4.0  # of the features, relative to that of the random embeddings
MAX_SHARE = 0.25  # of the width that features may have


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


def embed_log_ratios(model: Classifier, examples: Examples) -> None:
    """Replace the last columns of the token embeddings by the log-count ratios of all labels.

    They are the last, because sinusoidal positions vary least there. Many labels are replaced by
    the principal components of their ratios; for two that exclude each other, one column is enough.
    """
    config = model.config
    ratios = log_ratios(examples, config.vocab_size, len(config.labels))
    num_features = len(config.labels) - (not config.multi_label)
    num_features = max(1, min(num_features, int(MAX_SHARE * config.d_model)))
    _, _, directions = torch.linalg.svd(ratios.T @ ratios)  # (C, C)
    features = ratios @ directions[:num_features].T  # (V, K)
    features = features * (num_features / len(config.labels)) ** 0.5  # the size of a label's ratios
    with torch.no_grad():
        # `embed` multiplies by sqrt(d_model).
        model.embedding.weight[:, -num_features:] = SCALE * config.d_model**-0.5 * features

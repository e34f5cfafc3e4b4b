"""Transformer encoders that classify texts, or tokens.

Shapes use B batch, S source, M width of the model, C labels.
"""

from torch import Tensor, nn

from sightline.model.architectures.encoder import EncoderOnlyModel, mean_pool
from sightline.model.config import ClassifierConfig
from sightline.model.precision import at_least_float32


class Classifier(EncoderOnlyModel):
    """Encoder of Vaswani et al. 2017, mean pooling over its tokens, and a linear layer."""

    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        self.output = nn.Linear(config.d_model, len(config.labels))
        self.init_weights()

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the scores of the labels (B, C), given hidden states (B, S, M): log-probabilities,
        or with `multi_label` logits, whose sigmoids are the probabilities of each label.
        """
        logits = at_least_float32(self.output(self.dropout(mean_pool(hidden, mask))))
        return logits if self.config.multi_label else logits.log_softmax(dim=-1)

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the scores (B, C) of padded sources (B, S), see `classify`. In training mode,
        words are dropped as `source_mask` describes.
        """
        mask = self.source_mask(source, source_lengths)
        return self.classify(self._encode(source, mask)[0], mask)


class Tagger(Classifier):
    """Encoder of Vaswani et al. 2017, and a linear layer for each token."""

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the log-probabilities (B, S, C) of the labels of tokens of padded sources (B, S).
        In training mode, padding replaces dropped words, whose tags their context tells.
        """
        is_kept = self.source_mask(source, source_lengths)
        hidden = self.encode(source.masked_fill(~is_kept, self.config.pad_id), source_lengths)[0]
        return at_least_float32(self.output(self.dropout(hidden))).log_softmax(dim=-1)

"""Transformer encoder for text classification.

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

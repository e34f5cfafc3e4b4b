"""Models by their configurations, and what each is trained to minimise."""

from typing import Any

from torch import Tensor

from model.architectures.causal import CausalModel
from model.architectures.classifier import Classifier
from model.architectures.recurrent import RecurrentModel
from model.architectures.transformer import Transformer
from model.config import CausalConfig, ClassifierConfig, ModelConfig, RecurrentConfig, TransformerConfig
from model.data.batches import Batch
from model.training.hard_attention import marginal_loss, reinforce_loss
from model.training.loss import projected_cross_entropy

TranslationModel = Transformer | RecurrentModel
Model = TranslationModel | Classifier | CausalModel


def build_model(config: ModelConfig) -> Model:
    """A model with fresh weights."""
    if isinstance(config, CausalConfig):
        return CausalModel(config)
    if isinstance(config, ClassifierConfig):
        return Classifier(config)
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(config)
    assert isinstance(config, TransformerConfig), "every configuration has a model"
    return Transformer(config)


def cross_entropy(model: TranslationModel, batch: Batch, smoothing: float) -> Tensor:
    """Sum of the cross-entropies over the real target tokens, in nats."""
    memory: Any  # each model decodes its own
    memory, _ = model.encode(batch.source, batch.source_lengths)
    decoded, _, _ = model.decode(batch.target_input, memory, batch.source_lengths)
    return projected_cross_entropy(
        decoded.flatten(0, 1), model.embedding.weight, batch.target_output.flatten(), smoothing, model.config.pad_id
    )


def training_loss(model: TranslationModel, batch: Batch, smoothing: float) -> Tensor:
    """What is minimised: the sum over the real target tokens of a batch, in nats."""
    if isinstance(model, RecurrentModel) and model.config.selection == "reinforce":
        return reinforce_loss(model, batch, smoothing)
    if isinstance(model, RecurrentModel) and model.config.selection == "marginal":
        return marginal_loss(model, batch, smoothing)
    return cross_entropy(model, batch, smoothing)

"""Language-model task: cross-entropy of the tokens that an example marks.

An example has the token ids of a text or a dialogue, and 1 for each token that is part of the loss
(`sightline.model.data.encoding`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.pretrained import PretrainedDecoder
from sightline.model.config import ArchitectureConfig
from sightline.model.data.batches import TensorBatch, pad
from sightline.model.data.examples import Example
from sightline.model.evaluation.language import evaluate_language
from sightline.model.training.loss import output_cross_entropy
from sightline.model.training.task import Task

IGNORED = -100  # target of a token without loss


@dataclass(frozen=True)
class LanguageBatch(TensorBatch):
    """Padded token ids without the last token (B, T), and the next tokens as targets (B, T),
    `IGNORED` where they are not part of the loss.
    """

    ids: Tensor
    targets: Tensor


def make_batch(examples: Sequence[Example], config: ArchitectureConfig) -> LanguageBatch:
    targets = [
        [token if is_counted else IGNORED for token, is_counted in zip(ids[1:], mask[1:], strict=True)]
        for ids, mask in examples
    ]
    return LanguageBatch(pad([ids[:-1] for ids, _ in examples], config.pad_id), pad(targets, IGNORED))


def token_loss(model: CausalModel | PretrainedDecoder, batch: LanguageBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the cross-entropies over the tokens that are part of the loss, in nats."""
    features, _ = model.hidden_states(batch.ids)
    return output_cross_entropy(model, features.flatten(0, 1), batch.targets.flatten(), smoothing, IGNORED)


def count_targets(batch: LanguageBatch, pad_id: int) -> int:
    return int((batch.targets != IGNORED).sum())


LANGUAGE_MODEL: Task[LanguageBatch, CausalModel | PretrainedDecoder] = Task(
    name="language-model",
    make_batch=make_batch,
    count=count_targets,
    training_loss=token_loss,
    evaluate=evaluate_language,
)

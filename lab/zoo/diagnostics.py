"""Size of attention scores and of gradients, recorded during a training.

The claims about the factor 1 / sqrt(d_k), residual connections and depth are about these sizes, see
lab/docs/attention-study.md. They are computed on single examples, which have no padding, in
evaluation mode: a training that records them gives the same weights as one that does not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lab.bench.record import rounded
from sightline.model.layers.multi_head_attention import MultiHeadAttention
from sightline.model.layers.recurrent_attention import ScoreFunction
from sightline.model.training.folder import add_line
from sightline.model.training.task import Task
from sightline.model.training.trainer import Trainer

EXAMPLES = 16  # of dev
DIAGNOSTICS = "diagnostics.jsonl"  # in the folder of a run; of a repeated epoch, the last line counts


def diagnose(model: Any, task: Task[Any, Any], batches: Sequence[Any], pad_id: int) -> dict[str, Any]:
    """Compute the sizes of scores and gradients of a model, and leave its mode and weights.

    Args:
        model: the model, whose gradients are reset.
        batches: batches of one example each, on the device of the model.

    Returns:
        `gradients`: norm of the gradient of the mean validation loss for the parameters of each
        layer, by the name of the layer. `scores`: for each attention, `spread`, the mean over
        queries of the standard deviation over keys, and `largest`, the largest absolute value.
        Scores of Transformers omit relative positions. Causal attention includes later keys.
    """
    was_training = model.training
    model.eval()
    model.zero_grad(set_to_none=True)
    count = max(sum(task.count(batch, pad_id) for batch in batches), 1)
    with _scores(model) as scores:
        for batch in batches:
            (task.validation_loss(model, batch) / count).backward()  # type: ignore[no-untyped-call]
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = layer_of(name)
            squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.double().square().sum())
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return {
        "gradients": {name: rounded(math.sqrt(total)) for name, total in squares.items()},
        "scores": {
            name: {"spread": rounded(spread / number), "largest": rounded(largest)}
            for name, (spread, largest, number) in scores.items()
        },
    }


def layer_of(parameter: str) -> str:
    """Return the layer of a parameter: "encoder.0" for encoder.0.feed_forward.inner.weight."""
    first, _, rest = parameter.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdigit() else first


@contextmanager
def _scores(model: nn.Module) -> Iterator[Mapping[str, tuple[float, float, int]]]:
    """Sum the spread of scores and count their queries while the model runs, by attention."""
    sums: dict[str, tuple[float, float, int]] = {}
    queries: dict[str, Tensor] = {}
    handles = list[RemovableHandle]()

    def add(name: str, scores: Tensor) -> None:
        """Add scores (..., K)."""
        if scores.size(-1) < 2:
            return
        spread, largest, number = sums.get(name, (0.0, 0.0, 0))
        spreads = scores.detach().std(dim=-1, correction=0)
        sums[name] = (
            spread + float(spreads.sum()),
            max(largest, float(scores.detach().abs().max())),
            number + spreads.numel(),
        )

    def observe(name: str, module: MultiHeadAttention) -> None:
        def remember(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            queries[name] = module.split_heads(output.detach())

        def compare(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            keys = module.split_heads(output.detach())
            add(name, queries.pop(name) @ keys.transpose(-2, -1) * module.scale)

        handles.extend((module.query.register_forward_hook(remember), module.key.register_forward_hook(compare)))

    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            observe(name, module)
        elif isinstance(module, ScoreFunction):
            handles.append(module.register_forward_hook(lambda _, inputs, output, name=name: add(name, output)))
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


class DiagnosedTrainer(Trainer):
    """Trainer that records the sizes before the training and after each epoch."""

    def observe(self, epoch: int) -> None:
        indices = range(min(EXAMPLES, len(self.dev_examples)))
        batches = [self.make_batch(self.dev_examples, np.array([index])).to(self.device) for index in indices]
        sizes = diagnose(self.model, self.task, batches, self.model_config.pad_id)
        add_line(self.folder.path / DIAGNOSTICS, {"epoch": epoch, **sizes})

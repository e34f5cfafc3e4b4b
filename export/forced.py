"""What a PyTorch model makes of targets that are given: the one side of every comparison of `export.verify`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from export.recurrent import STATE_INPUTS
from model.architectures.causal import CausalModel
from model.architectures.factory import TranslationModel
from model.architectures.recurrent import RecurrentModel, State, Step
from model.data.batches import pad

Ids = Sequence[int]


@dataclass(frozen=True)
class ForcedPass:
    """One pass over padded sources (B, S) and what the decoder reads (B, T); what stands in padding means nothing."""

    hidden: Tensor  # (B, S, M)
    logits: Tensor  # (B, T, V)
    maps: Mapping[str, Tensor | None]  # by kind, (L, B, H, rows, columns); None where the model has none
    # What a recurrent decoder carries, (B, T + 1, ...) before each token and after the last, by the step's input.
    states: Mapping[str, Tensor] = field(default_factory=dict)


def forced_pass(
    model: TranslationModel | CausalModel,
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    carried: Mapping[str, Tensor] | None = None,
) -> ForcedPass:
    """Run a model over sources and given targets.

    Args:
        model: in evaluation mode.
        sources: token ids.
        targets: what the step reads: they begin with the start token, or with the source's own last token.
        carried: the `ForcedPass.states` that the steps of a recurrent decoder start from, in place of those that the
            steps before them left.
    """
    if isinstance(model, CausalModel):
        return _causal_pass(model, sources, targets)
    if isinstance(model, RecurrentModel):
        return _recurrent_pass(model, sources, targets, carried)
    padded, lengths = pad(sources, model.config.pad_id), torch.tensor([len(source) for source in sources])
    memory, encoder_maps = model.encode(padded, lengths, need_weights=True)
    target = pad(targets, model.config.pad_id)
    decoded, decoder_maps, cross_maps = model.decode(target, memory, lengths, need_weights=True)
    maps = {"encoder": None, "decoder": decoder_maps, "cross": cross_maps, **(encoder_maps or {})}
    return ForcedPass(memory, model.logits(decoded), maps)


def _recurrent_pass(
    model: RecurrentModel, sources: Sequence[Ids], targets: Sequence[Ids], carried: Mapping[str, Tensor] | None
) -> ForcedPass:
    padded, lengths = pad(sources, model.config.pad_id), torch.tensor([len(source) for source in sources])
    memory, _ = model.encode(padded, lengths)
    left, steps = [model.begin(memory)], list[Step]()
    for position, embedded in enumerate(model.embed_steps(pad(targets, model.config.pad_id))):
        state = left[-1]
        if carried:
            state = State(*(carried[STATE_INPUTS[name]][:, position] for name in State._fields))
        steps.append(model.step(embedded, position, state, memory, lengths))
        left.append(steps[-1].state)
    features, cross = model.stacked(steps)
    states = {
        STATE_INPUTS[name]: torch.stack([getattr(state, name) for state in left], dim=1) for name in State._fields
    }
    maps = {"encoder": None, "decoder": None, "cross": cross}
    return ForcedPass(memory.annotations, model.logits(features), maps, states)


def _causal_pass(model: CausalModel, sources: Sequence[Ids], targets: Sequence[Ids]) -> ForcedPass:
    whole = [[*source[:-1], *target] for source, target in zip(sources, targets, strict=True)]
    features, maps = model.read(pad(whole, model.config.pad_id), need_weights=True)
    assert maps is not None
    # Each row's part from its source's last token on, (T, ...), as if that were the first.
    places = [
        slice(len(source) - 1, len(source) - 1 + len(target)) for source, target in zip(sources, targets, strict=True)
    ]
    logits = _stacked([model.logits(features[row, place]) for row, place in enumerate(places)])
    rows = _stacked([maps[:, row, :, place].permute(2, 0, 1, 3) for row, place in enumerate(places)])  # (B, T, L, H, C)
    longest = max(map(len, sources))
    return ForcedPass(
        features[:, :longest], logits, {"encoder": None, "decoder": rows.permute(2, 0, 3, 1, 4), "cross": None}
    )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """(T, ...) of different lengths to (B, longest, ...)."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

"""Teacher-forced passes of a PyTorch model, the reference of `export.check.verify`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from export.graphs.recurrent import STATE_INPUTS
from model.architectures.causal import CausalModel
from model.architectures.factory import TranslationModel
from model.architectures.recurrent import RecurrentModel, State, Step
from model.data.batches import pad

Ids = Sequence[int]


@dataclass(frozen=True)
class ForcedPass:
    """Results of one pass over padded sources (B, S) and decoder inputs (B, T).

    Values at padding are undefined.
    """

    hidden: Tensor  # (B, S, M)
    logits: Tensor  # (B, T, V)
    maps: Mapping[str, Tensor | None]  # attention weights by kind, (L, B, H, queries, keys), or None
    # States of a recurrent decoder before each token and after the last, (B, T + 1, ...), by input
    # name of the graph.
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
        targets: decoder inputs. They begin with the start token, or with the last token of the
            source for a causal model.
        carried: `ForcedPass.states` of another pass. Each step of a recurrent decoder starts from
            them instead of the state that the step before computed.
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
    after, steps = [model.initial_state(memory)], list[Step]()
    for position, embedded in enumerate(model.embed_steps(pad(targets, model.config.pad_id))):
        state = after[-1]
        if carried:
            state = State(*(carried[STATE_INPUTS[name]][:, position] for name in State._fields))
        steps.append(model.step(embedded, position, state, memory, lengths))
        after.append(steps[-1].state)
    features, cross = model.stack_steps(steps)
    states = {
        STATE_INPUTS[name]: torch.stack([getattr(state, name) for state in after], dim=1) for name in State._fields
    }
    maps = {"encoder": None, "decoder": None, "cross": cross}
    return ForcedPass(memory.annotations, model.logits(features), maps, states)


def _causal_pass(model: CausalModel, sources: Sequence[Ids], targets: Sequence[Ids]) -> ForcedPass:
    whole = [[*source[:-1], *target] for source, target in zip(sources, targets, strict=True)]
    features, maps = model.hidden_states(pad(whole, model.config.pad_id), need_weights=True)
    assert maps is not None
    # The positions of each row from the last token of its source on, which is its first decoder
    # input.
    spans = [
        slice(len(source) - 1, len(source) - 1 + len(target)) for source, target in zip(sources, targets, strict=True)
    ]
    logits = _stacked([model.logits(features[row, span]) for row, span in enumerate(spans)])
    rows = _stacked([maps[:, row, :, span].permute(2, 0, 1, 3) for row, span in enumerate(spans)])  # (B, T, L, H, C)
    longest = max(map(len, sources))
    return ForcedPass(
        features[:, :longest], logits, {"encoder": None, "decoder": rows.permute(2, 0, 3, 1, 4), "cross": None}
    )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Pad tensors (T, ...) of different lengths to (B, longest, ...)."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

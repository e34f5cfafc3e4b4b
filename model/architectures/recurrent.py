"""Recurrent encoder-decoders: Cho's fixed context vector, Bahdanau's and Luong's attention, hard attention.

Shapes use B batch, S source, T target, E embedding, H state of the decoder, A annotation, K key, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from model.config import RecurrentConfig
from model.layers.dropout import Dropout
from model.layers.recurrent_attention import SCORES, PredictedPosition, align

Select = Callable[[Tensor], Tensor]


class Memory(NamedTuple):
    """What the encoder gives the decoder."""

    annotations: Tensor  # (B, S, A), 0 where the source is padded
    keys: Tensor  # (B, S, K), what the score needs of the annotations
    state: Tensor  # (B, H), the decoder's first
    context: Tensor  # (B, A), the encoder's last state in each direction


class State(NamedTuple):
    """What the decoder carries from one step to the next."""

    hidden: Tensor  # (B, H)
    cell: Tensor  # (B, H), an LSTM's; a GRU leaves it as it is
    feed: Tensor  # (B, E), the last attentional vector, for input feeding


class Step(NamedTuple):
    """What one step gives."""

    features: Tensor  # (B, E), what the embedding's matrix turns into logits
    weights: Tensor  # (B, S), all 0 where there is no attention
    state: State


class RecurrentModel(nn.Module):
    """Encoder, decoder, attention, and one embedding for source, target and output."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.dropout = Dropout(config.dropout)
        encoder = nn.LSTM if config.cell == "lstm" else nn.GRU
        self.encoder = encoder(
            config.embedding_size, config.encoder_size, batch_first=True, bidirectional=config.bidirectional
        )
        self.bridge = nn.Linear(config.encoder_size, config.decoder_size)
        inputs = config.embedding_size
        if config.query == "previous":
            inputs += config.annotation_size
        elif config.input_feeding:
            inputs += config.embedding_size
        cell = nn.LSTMCell if config.cell == "lstm" else nn.GRUCell
        self.cell = cell(inputs, config.decoder_size)
        self.score = None if config.attention == "none" else SCORES[config.attention](config)
        self.position = PredictedPosition(config.decoder_size) if config.window == "local-p" else None
        self.readout = Readout(config)
        if config.selection == "reinforce":  # what a sentence costs in the mean, for `model.training.hard_attention`
            self.register_buffer("baseline", torch.zeros(()))
            self.baseline: Tensor
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.zeros_(parameter)
            elif "weight_hh" in name:
                for gate in parameter.chunk(4 if self.config.cell == "lstm" else 3):
                    nn.init.orthogonal_(gate)
            else:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=self.config.embedding_size**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, E)."""
        if ids.size(1) > self.config.max_positions:
            raise ValueError(f"{ids.size(1)} tokens are more than max_positions ({self.config.max_positions})")
        # As large as a state, so that both count at first.
        embedded: Tensor = self.dropout(self.embedding(ids) * self.config.embedding_size**0.5)
        return embedded

    def embed_steps(self, ids: Tensor) -> tuple[Tensor, ...]:
        """What each step reads of ids (B, T): T times (B, E), in whose gradient no step writes the others' zeros."""
        steps: tuple[Tensor, ...] = self.embed(ids).unbind(dim=1)
        return steps

    def encode(self, source: Tensor, source_lengths: Tensor, need_weights: bool = False) -> tuple[Memory, None]:
        """Encode padded sources (B, S); there are no maps of the encoder."""
        packed = pack_padded_sequence(self.embed(source), source_lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = self.encoder(packed)
        annotations, _ = pad_packed_sequence(outputs, batch_first=True, total_length=source.size(1))  # (B, S, A)
        hidden = last[0] if self.config.cell == "lstm" else last  # (directions, B, A / directions)
        # Bahdanau et al. 2015, section A.2.2: the decoder begins from the backward state at the first token, which is
        # the last that the backward direction computes.
        state = torch.tanh(self.bridge(hidden[-1]))
        annotations = self.dropout(annotations)
        keys = annotations[:, :, :0] if self.score is None else self.score.keys(annotations)
        return Memory(annotations, keys, state, self.dropout(hidden.transpose(0, 1).flatten(1))), None

    def begin(self, memory: Memory) -> State:
        """The decoder's state before its first step."""
        feed = memory.state.new_zeros(memory.state.size(0), self.config.embedding_size)
        return State(memory.state, torch.zeros_like(memory.state), feed)

    def step(
        self,
        embedded: Tensor,
        position: int,
        state: State,
        memory: Memory,
        source_lengths: Tensor,
        select: Select | None = None,
    ) -> Step:
        """Read one token a row.

        Args:
            embedded: (B, E), the token that was last written.
            position: how many tokens have been read before.
            state: what the last step left.
            memory: of the sources.
            source_lengths: (B,).
            select: what becomes of the weights (B, S); without, they are taken as they are, or the largest of them.
        """
        select = select or self._select
        if self.config.query == "previous":
            # c_i from s_(i-1), then s_i = f(s_(i-1), y_(i-1), c_i) (Bahdanau et al. 2015, equations 4 to 6). A fixed
            # context vector is read at every step, as in Cho et al. 2014, section 2.2 (equation 3 of Bahdanau et al.).
            context, weights = self._attend(state.hidden, position, memory, source_lengths, select)
            hidden, cell = self._advance(torch.cat((embedded, context), dim=1), state)
        else:
            # h_t first, then c_t from it (Luong et al. 2015, section 3).
            hidden, cell = self.advance(embedded, state)
            context, weights = self._attend(hidden, position, memory, source_lengths, select)
        read = self.readout(hidden, context, embedded)
        return Step(self.features(read), weights, State(hidden, cell, read))

    def features(self, read: Tensor) -> Tensor:
        """What the embedding's matrix turns into logits, from what the readout gives; both (B, E)."""
        scaled: Tensor = self.dropout(self.readout.gain * read)
        return scaled

    def advance(self, embedded: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The next state and cell where the query is the current state: no context is needed for them."""
        inputs = torch.cat((embedded, state.feed), dim=1) if self.config.input_feeding else embedded
        return self._advance(inputs, state)

    def _advance(self, inputs: Tensor, state: State) -> tuple[Tensor, Tensor]:
        if self.config.cell == "lstm":
            hidden, cell = self.cell(inputs, (state.hidden, state.cell))
            return hidden, cell
        return self.cell(inputs, state.hidden), state.cell

    def _attend(
        self, query: Tensor, position: int, memory: Memory, source_lengths: Tensor, select: Select
    ) -> tuple[Tensor, Tensor]:
        """The context vector (B, A) and the weights (B, S)."""
        if self.score is None:
            return memory.context, memory.annotations.new_zeros(memory.annotations.shape[:2])
        weights = select(self.weigh(query, position, memory, source_lengths))
        return (weights.unsqueeze(1) @ memory.annotations).squeeze(1), weights

    def _select(self, weights: Tensor) -> Tensor:
        if self.config.selection == "soft":
            return weights
        return functional.one_hot(weights.argmax(dim=1), weights.size(1)).to(weights.dtype)

    def weigh(self, query: Tensor, position: int, memory: Memory, source_lengths: Tensor) -> Tensor:
        """The distribution over the source (B, S), before anything is selected from it."""
        assert self.score is not None
        scores = self.score(query, memory.keys)
        if self.config.window == "global":
            return align(scores, source_lengths)
        if self.position is not None:
            centres = self.position(query, source_lengths)
        else:
            # p_t = t; a target longer than its source keeps looking at the end.
            centres = (source_lengths - 1).clamp(max=position).to(scores.dtype)
        return align(scores, source_lengths, centres, self.config.window_radius, is_gaussian=self.position is not None)

    def decode(
        self, target: Tensor, memory: Memory, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, None, Tensor | None]:
        """Read target prefixes (B, T).

        Returns:
            (B, T, E), no maps of the decoder, and the cross weights (1, B, 1, T, S) where they are wanted and exist.
        """
        features, weights = self.stacked(list(self.steps(target, memory, source_lengths)))
        return features, None, weights if need_weights else None

    def steps(self, target: Tensor, memory: Memory, source_lengths: Tensor) -> Iterator[Step]:
        """What each of the T steps gives that read target prefixes (B, T)."""
        state = self.begin(memory)
        for position, embedded in enumerate(self.embed_steps(target)):
            step = self.step(embedded, position, state, memory, source_lengths)
            state = step.state
            yield step

    def stacked(self, steps: Sequence[Step]) -> tuple[Tensor, Tensor | None]:
        """Features (B, T, E) of all steps, and their weights (1, B, 1, T, S), of one layer and head, or None."""
        features = torch.stack([step.features for step in steps], dim=1)
        if self.score is None:
            return features, None
        return features, torch.stack([step.weights for step in steps], dim=1)[None, :, None]

    def logits(self, features: Tensor) -> Tensor:
        """(..., E) to (..., V), by the embedding's own matrix."""
        return features @ self.embedding.weight.T


class Readout(nn.Module):
    """From a state and its context to what is compared with the embeddings."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.has_maxout = config.query == "previous"
        # After tanh all lies within (-1, 1), and the embeddings' entries are about E^(-1/2) at first: without a gain no
        # logit is far from 0 until they have grown. Luong's output matrix is no embedding, and learns its own scale.
        self.gain = 1.0 if self.has_maxout else config.embedding_size**0.25
        size = config.decoder_size + config.annotation_size
        if self.has_maxout:
            self.inner = nn.Linear(size + config.embedding_size, 2 * config.embedding_size)
        else:
            self.inner = nn.Linear(size, config.embedding_size, bias=False)

    def forward(self, hidden: Tensor, context: Tensor, embedded: Tensor) -> Tensor:
        """States (B, H), contexts (B, A) and embedded tokens (B, E) to (B, E), which is to be multiplied by `gain`.

        With "previous" t_i = max of pairs of U_o s_i + V_o E y_(i-1) + C_o c_i (Bahdanau et al. 2015, section A.2.2,
        which prints s_(i-1); the state that has read y_(i-1) is taken here). With "current" tanh(W_c [c_t; h_t])
        (Luong et al. 2015, equation 5).
        """
        if not self.has_maxout:
            attentional: Tensor = self.inner(torch.cat((context, hidden), dim=1)).tanh()
            return attentional
        pairs: Tensor = self.inner(torch.cat((hidden, embedded, context), dim=1)).unflatten(1, (-1, 2))
        return pairs.amax(dim=-1)

"""Recurrent encoder-decoders with a fixed context vector, Bahdanau, Luong or hard attention.

An annotation is the encoder's hidden state of one source token (Bahdanau et al. 2015).

Shapes use B batch, S source, T target, E embedding, H decoder state, A annotation, K key, V
vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sightline.model.config import RecurrentConfig
from sightline.model.layers.dropout import Dropout
from sightline.model.layers.recurrent_attention import SCORES, PredictedPosition, align

Select = Callable[[Tensor], Tensor]


class Memory(NamedTuple):
    """Outputs of the encoder that the decoder uses."""

    annotations: Tensor  # (B, S, A), 0 where the source is padded
    keys: Tensor  # (B, S, K), the annotations as projected for the score function
    state: Tensor  # (B, H), the initial state of the decoder
    context: Tensor  # (B, A), the last encoder state of each direction; (B, 0) if steps do not read it


class RecurrentState(NamedTuple):
    """State of the decoder between two steps."""

    hidden: Tensor  # (B, H)
    cell: Tensor  # (B, H), the cell state of an LSTM; a GRU does not change it
    feed: Tensor  # (B, E), the previous attentional vector, for input feeding


class RecurrentStep(NamedTuple):
    """Outputs of one decoder step."""

    features: Tensor  # (B, E), to be multiplied by the embedding matrix
    weights: Tensor  # (B, S), all 0 without attention
    state: RecurrentState


class RecurrentModel(nn.Module):
    """Recurrent encoder-decoder with one embedding matrix for source, target and output."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.dropout = Dropout(config.dropout)
        encoder = nn.LSTM if config.cell == "lstm" else nn.GRU
        self.encoder = encoder(
            config.embedding_size, config.encoder_size, batch_first=True, bidirectional=config.bidirectional
        )
        # Without another path from the source, the initial state depends on both directions.
        states = config.encoder_size if config.feeds_context else config.annotation_size
        self.bridge = nn.Linear(states, config.decoder_size)
        inputs = config.embedding_size
        if config.query == "previous":
            inputs += config.context_size
        elif config.input_feeding:
            inputs += config.embedding_size
        cell = nn.LSTMCell if config.cell == "lstm" else nn.GRUCell
        self.cell = cell(inputs, config.decoder_size)
        self.score = None if config.attention == "none" else SCORES[config.attention](config)
        self.position = PredictedPosition(config.decoder_size) if config.window == "local-p" else None
        self.readout = Readout(config)
        if config.selection == "reinforce":
            # Moving average of the cost of a sentence, for the loss of REINFORCE.
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
        """Embed token ids (B, T) as (B, T, E); T is at most `max_positions`."""
        if ids.size(1) > self.config.max_positions:
            raise ValueError(f"input has {ids.size(1)} tokens, but max_positions is {self.config.max_positions}")
        # Scaled to the size of the states, so that both contribute to the gates at the start of
        # training.
        embedded: Tensor = self.dropout(self.embedding(ids) * self.config.embedding_size**0.5)
        return embedded

    def embed_steps(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the embeddings of token ids (B, T) as a tuple of T tensors (B, E). `unbind` avoids
        a dense gradient (B, T, E) at each step.
        """
        steps: tuple[Tensor, ...] = self.embed(ids).unbind(dim=1)
        return steps

    def encode(self, source: Tensor, source_lengths: Tensor, need_weights: bool = False) -> tuple[Memory, None]:
        """Encode padded token ids (B, S), ignoring those at and beyond `source_lengths` (B,). There
        are no attention weights in a recurrent encoder, so None replaces them.
        """
        packed = pack_padded_sequence(self.embed(source), source_lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = self.encoder(packed)
        annotations, _ = pad_packed_sequence(outputs, batch_first=True, total_length=source.size(1))  # (B, S, A)
        hidden = last[0] if self.config.cell == "lstm" else last  # (directions, B, A / directions)
        # Bahdanau et al. 2015, section A.2.2: the decoder's initial state depends on the backward
        # state at the first token, which is the last state that the backward direction computes.
        last_states = hidden.transpose(0, 1).flatten(1)  # (B, A)
        state = torch.tanh(self.bridge(hidden[-1] if self.config.feeds_context else last_states))
        annotations = self.dropout(annotations)
        keys = annotations[:, :, :0] if self.score is None else self.score.keys(annotations)
        return Memory(annotations, keys, state, self.dropout(last_states)[:, : self.config.context_size]), None

    def initial_state(self, memory: Memory) -> RecurrentState:
        """Return the decoder's state before its first step."""
        feed = memory.state.new_zeros(memory.state.size(0), self.config.embedding_size)
        return RecurrentState(memory.state, torch.zeros_like(memory.state), feed)

    def step(
        self,
        embedded: Tensor,
        position: int,
        state: RecurrentState,
        memory: Memory,
        source_lengths: Tensor,
        select: Select | None = None,
    ) -> RecurrentStep:
        """Run the decoder on one token of each sequence.

        Args:
            embedded: (B, E), the embedding of the previous target token.
            position: number of tokens that the decoder has read before.
            source_lengths: (B,).
            select: maps attention weights (B, S) to those that are used. By default, soft attention
                uses them as they are, and hard attention a one-hot vector at their maximum.
        """
        select = select or self._select
        if self.config.query == "previous":
            # c_i from s_(i-1), then s_i = f(s_(i-1), y_(i-1), c_i) (Bahdanau et al. 2015, equations
            # 4 to 6). A fixed context vector is an input of every step, as in Cho et al. 2014,
            # section 2.2 (equation 3 of Bahdanau et al. 2015), or has width 0.
            context, weights = self._attend(state.hidden, position, memory, source_lengths, select)
            hidden, cell = self._run_cell(torch.cat((embedded, context), dim=1), state)
        else:
            # h_t first, then c_t from it (Luong et al. 2015, section 3).
            hidden, cell = self.update_state(embedded, state)
            context, weights = self._attend(hidden, position, memory, source_lengths, select)
        read = self.readout(hidden, context, embedded)
        return RecurrentStep(self.features(read), weights, RecurrentState(hidden, cell, read))

    def features(self, read: Tensor) -> Tensor:
        """Return the input of `logits` (B, E): the readout times its gain, after dropout."""
        scaled: Tensor = self.dropout(self.readout.gain * read)
        return scaled

    def update_state(self, embedded: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor]:
        """Return the next hidden and cell state (B, H), for `query` "current", which needs no
        context vector to update its state.
        """
        inputs = torch.cat((embedded, state.feed), dim=1) if self.config.input_feeding else embedded
        return self._run_cell(inputs, state)

    def _run_cell(self, inputs: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor]:
        if self.config.cell == "lstm":
            hidden, cell = self.cell(inputs, (state.hidden, state.cell))
            return hidden, cell
        return self.cell(inputs, state.hidden), state.cell

    def _attend(
        self, query: Tensor, position: int, memory: Memory, source_lengths: Tensor, select: Select
    ) -> tuple[Tensor, Tensor]:
        """Return the context vector (B, A) and the attention weights (B, S)."""
        if self.score is None:
            return memory.context, memory.annotations.new_zeros(memory.annotations.shape[:2])
        weights = select(self.attention_weights(query, position, memory, source_lengths))
        return (weights.unsqueeze(1) @ memory.annotations).squeeze(1), weights

    def _select(self, weights: Tensor) -> Tensor:
        if self.config.selection == "soft":
            return weights
        return functional.one_hot(weights.argmax(dim=1), weights.size(1)).to(weights.dtype)

    def attention_weights(self, query: Tensor, position: int, memory: Memory, source_lengths: Tensor) -> Tensor:
        """Return the attention weights (B, S) before any hard selection."""
        assert self.score is not None
        scores = self.score(query, memory.keys)
        if self.config.window == "global":
            return align(scores, source_lengths)
        if self.position is not None:
            centres = self.position(query, source_lengths)
        else:
            # p_t = t (Luong et al. 2015, section 3.2), but at most the last source position.
            centres = (source_lengths - 1).clamp(max=position).to(scores.dtype)
        return align(scores, source_lengths, centres, self.config.window_radius, is_gaussian=self.position is not None)

    def decode(
        self, target: Tensor, memory: Memory, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, None, Tensor | None]:
        """Run the decoder over target prefixes (B, T), beginning with the start token.

        Returns features (B, T, E), None in place of self-attention weights, and the cross-attention
        weights (1, B, 1, T, S), None unless requested, and for a model without attention.
        """
        features, weights = self.stack_steps(list(self.steps(target, memory, source_lengths)))
        return features, None, weights if need_weights else None

    def steps(self, target: Tensor, memory: Memory, source_lengths: Tensor) -> Iterator[RecurrentStep]:
        """Yield the outputs of each of the T steps over target prefixes (B, T)."""
        state = self.initial_state(memory)
        for position, embedded in enumerate(self.embed_steps(target)):
            step = self.step(embedded, position, state, memory, source_lengths)
            state = step.state
            yield step

    def stack_steps(self, steps: Sequence[RecurrentStep]) -> tuple[Tensor, Tensor | None]:
        """Stack the features of all steps (B, T, E) and their weights (1, B, 1, T, S), which have
        one layer and one head and are None for a model without attention.
        """
        features = torch.stack([step.features for step in steps], dim=1)
        if self.score is None:
            return features, None
        return features, torch.stack([step.weights for step in steps], dim=1)[None, :, None]

    def logits(self, features: Tensor) -> Tensor:
        """Project features (..., E) to logits (..., V) with the embedding matrix."""
        return features @ self.embedding.weight.T


class Readout(nn.Module):
    """Output layer of the decoder before the embedding matrix."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.has_maxout = config.query == "previous"
        # The output of tanh lies within (-1, 1) and embedding entries start near E^(-1/2), so that
        # without a gain all logits would stay near 0 early in training. The output matrix of Luong
        # et al. is separate from the embedding and learns its own scale.
        self.gain = 1.0 if self.has_maxout else config.embedding_size**0.25
        size = config.decoder_size + config.context_size
        if self.has_maxout:
            self.inner = nn.Linear(size + config.embedding_size, 2 * config.embedding_size)
        else:
            self.inner = nn.Linear(size, config.embedding_size, bias=False)

    def forward(self, hidden: Tensor, context: Tensor, embedded: Tensor) -> Tensor:
        """Combine decoder state (B, H), context vector (B, A) and embedded token (B, E) as (B, E),
        not yet multiplied by `gain`.

        With `query` "previous", this is the maxout layer t_i, the maximum of pairs of U_o s_i + V_o
        E y_(i-1) + C_o c_i (Bahdanau et al. 2015, section A.2.2; the paper prints s_(i-1), but this
        layer uses s_i, the state that has read y_(i-1)). With `query` "current", it is tanh(W_c
        [c_t; h_t]) (Luong et al. 2015, equation 5).
        """
        if not self.has_maxout:
            attentional: Tensor = self.inner(torch.cat((context, hidden), dim=1)).tanh()
            return attentional
        pairs: Tensor = self.inner(torch.cat((hidden, embedded, context), dim=1)).unflatten(1, (-1, 2))
        return pairs.amax(dim=-1)

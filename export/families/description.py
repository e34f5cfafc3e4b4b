"""Description of a model as frozen options.

`sightline.export.families` derives a description from the configuration of a checkpoint or of a
training run, `sightline.export.graphs` builds ONNX graphs from it, and
`sightline.export.check.numpy_reference` computes the same with NumPy.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import AlignmentStep, LabelKind

Activation = Literal["relu", "relu2", "gelu", "gelu_10", "gelu_tanh", "quick_gelu", "silu", "mish", "tanh"]

Guided = tuple[AlignmentStep, int, int]  # step, layer and head of a decoder, as indices from 0


@dataclass(frozen=True)
class Norm:
    """Normalization over the last axis."""

    kind: Literal["layer", "rms"]  # LayerNorm (Ba et al. 2016), or RMSNorm (Zhang and Sennrich 2019)
    epsilon: float
    has_bias: bool = True  # of LayerNorm; RMSNorm has none


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021), with the two halves of a head as pairs.

    With fewer than D / 2 frequencies for a head of D dimensions, the other pairs at the end of both
    halves are not rotated.
    """

    frequencies: tuple[float, ...]  # radians per position
    factor: float = 1.0  # cosines and sines of rotated pairs are multiplied by it
    max_positions: int | None = None  # longer texts have other frequencies; None: no text has


@dataclass(frozen=True)
class RelativeBias:
    """Learned bias of scores by the bucket of the distance between query and key, for all layers.

    See Raffel et al. 2020, section 2.1.
    """

    buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True)
class Disentangled:
    """Scores between tokens and relative positions (He et al. 2021, "DeBERTa", equation 4).

    A score is the sum of three products: of query and key, of the query and the key of their
    distance, and of the key and the query of their distance. All layers share the vectors of
    distances; each layer has projections of them.
    """

    span: int  # the table has twice as many vectors; distances beyond it share the first or the last
    # Distance at which logarithmic buckets reach the span. None: each distance has its own vector.
    max_distance: int | None
    has_keys: bool  # products of queries with keys of distances
    has_queries: bool  # products of keys with queries of distances
    has_norm: bool  # normalization of the table
    is_shared: bool  # the projections of queries and keys serve distances, too

    @property
    def projections(self) -> tuple[str, ...]:
        """Return the names of the projections of the table that a layer has."""
        return ("relative_key",) * self.has_keys + ("relative_query",) * self.has_queries


@dataclass(frozen=True)
class Convolution:
    """Convolution of the embeddings along the text, which is added to the output of layer 0."""

    size: int  # positions that an output depends on, an odd number
    activation: Activation


@dataclass(frozen=True)
class ProjectedKeys:
    """Attention to projected keys and values in place of those of tokens (Wang et al. 2020, eq. 7).

    `key` and `value` are the numbers of the matrices. Layers with the same number share a matrix.
    """

    size: int  # number of projected keys
    key: int
    value: int


@dataclass(frozen=True)
class RelativeKeys:
    """Learned vectors of distances, added to the keys (Shaw et al. 2018, equations 4 and 5).

    All heads of a layer share the 2 * span + 1 vectors; larger distances the first or the last.
    """

    span: int

    def rows_of_distances(self, distances: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the vector for each distance from a query to a key."""
        return np.clip(distances, -self.span, self.span) + self.span


@dataclass(frozen=True)
class Attention:
    """Multi-head attention, with groups of query heads that share a key and value head."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float  # factor of the scores before the softmax
    rotary: Rotary | None = None
    head_norm: Norm | None = None  # normalization of each query and key head
    # A causal query attends to this many positions, its own included. A query that is not causal
    # attends to `window // 2` positions on each side. None: to all positions.
    window: int | None = None
    has_projections: bool = True  # False: queries, keys, values and the result have no linear layer
    has_bias: bool = True  # of the projections to queries, keys and values
    has_output_bias: bool = True  # of the projection of the result
    projected_keys: ProjectedKeys | None = None  # only in an encoder
    relative_keys: RelativeKeys | None = None
    softcap: float | None = None  # scaled scores x become softcap * tanh(x / softcap)
    joins_heads: bool = False  # `head_norm` normalizes all heads of a token as one vector


@dataclass(frozen=True)
class FeedForward:
    """Two linear layers with an activation between them.

    A gated one multiplies the activation by a third layer of the same input (Shazeer 2020).
    """

    activation: Activation
    size: int  # outputs of the first layer
    gated: bool = False
    has_bias: bool = True
    has_output_bias: bool | None = None  # of the last layer; None: as the others


@dataclass(frozen=True)
class TokenEmbedding:
    """Conversion of token ids to vectors."""

    scale: float = 1.0
    has_positions: bool = False  # adds a learned or sinusoidal table
    skipped_positions: int = 0  # rows at the start of the checkpoint's table that no token uses
    # This token id has row 0 of the table and is not counted: the others have rows 1, 2, … in their
    # order. None: the rows are the indices of the tokens. Only in an encoder.
    padding: int | None = None
    # Tokens after the first occurrence of this token id have type 1, others type 0.
    type_separator: int | None = None
    types: int = 0  # rows of an added table of token types; always type 0 without a separator
    has_norm: bool = False
    # Size of the vectors before a linear layer to the width of the model. None: no such layer.
    projected_from: int | None = None
    projects_tokens: bool = False  # that layer has no bias and precedes the positions

    @property
    def position_offset(self) -> int:
        """Return the number of rows before that of the first token in the table of positions."""
        return int(self.padding is not None)


@dataclass(frozen=True)
class Stack:
    """Layers of an encoder or decoder."""

    width: int
    norm: Norm
    norm_place: Literal["pre", "post", "none"]  # of the normalization of residual states
    attention: tuple[Attention, ...]  # one for each layer
    feed_forward: FeedForward
    embedding: TokenEmbedding
    cross: Attention | None = None  # cross-attention of a decoder
    relative_bias: RelativeBias | None = None
    # ALiBi (Press et al. 2022): the bias of a head is its slope times the distance, negated. In an
    # encoder, keys before and after a query count alike.
    slopes: tuple[float, ...] | None = None
    disentangled: Disentangled | None = None  # only of an encoder
    convolution: Convolution | None = None  # only of an encoder
    has_final_norm: bool = False
    # Size of the hidden states after a linear layer without bias at the end. None: no such layer.
    projected_to: int | None = None
    skips_first_norm: bool = False  # layer 0 has no normalization before its attention
    # The result of each sublayer is normalized before it is added to the input of the sublayer.
    has_output_norms: bool = False
    residual_scale: float = 1.0  # the result of each sublayer is multiplied by it
    has_residual: bool = True  # the input of a sublayer is added to its result
    is_parallel: bool = False  # the feed-forward sublayer reads the input of the attention sublayer
    is_causal: bool = False  # queries of an encoder attend to no later position, as those of a decoder
    # "ssru": a recurrent unit in place of self-attention (Kim et al. 2019, section 3.1).
    cell: Literal["attention", "ssru"] = "attention"

    @property
    def output_size(self) -> int:
        """Return the size of the hidden states that the stack returns."""
        return self.projected_to or self.width

    @property
    def layers(self) -> int:
        return len(self.attention)


@dataclass(frozen=True)
class Head:
    """Computation of label scores from the last hidden states."""

    # "tokens": scores for every token. "end": the hidden state of the reader at the last end token.
    pooling: Literal["first", "mean", "last", "tokens", "end"]
    label_kind: LabelKind
    activation: Activation | None = None  # of a dense layer between hidden states and scores; None: no such layer
    has_norm: bool = False  # normalization after the activation
    has_bias: bool = True  # of the dense layer
    has_output_bias: bool = True  # of the layer that returns the scores
    padding: int | None = None  # the pooling "last" skips this token id at the end of a text
    # Token ids of yes and no, if the score is the difference of their logits.
    answers: tuple[int, int | None] | None = None


@dataclass(frozen=True)
class Predictions:
    """Scores of all tokens at a position, as of a masked language model, from its hidden state.

    A dense layer, an activation, the normalization of the encoder, and the product with a table.
    """

    size: int  # of the vectors that are multiplied by the table
    activation: Activation
    is_tied: bool = True  # the table is that of the embeddings
    has_bias: bool = True  # of the dense layer
    has_output_bias: bool = True  # of the scores


@dataclass(frozen=True)
class Reader:
    """Decoder that reads the source after a start token, for a score of the whole text.

    See Lewis et al. 2020, "BART", section 3.1. Its modules are those of a decoder.
    """

    stack: Stack
    start_id: int
    end_id: int  # the hidden state at the last such token of the source is pooled


@dataclass(frozen=True)
class Description:
    """One model. At least one of encoder and decoder is present."""

    family: str
    vocabulary: int  # tokens of the decoder, or of a model with one vocabulary
    max_positions: int  # longest sequence in tokens
    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head | None = None
    reader: Reader | None = None  # between the encoder and the head
    predictions: Predictions | None = None  # only of an encoder
    labels: tuple[str, ...] = ()
    source_vocabulary: int | None = None  # tokens of the encoder; None: those of the decoder
    logits_scale: float = 1.0
    logits_softcap: float | None = None  # logits x become softcap * tanh(x / softcap)
    guided_alignment: Guided | None = None  # the cross-attention that was trained on word alignments
    reads_pairs: bool = True  # False: the token types of a pair of texts are not known

    @property
    def has_position_limit(self) -> bool:
        """Return False if all positions are relative, so that training alone has a limit."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        return any(stack.relative_bias is None or stack.embedding.has_positions for stack in stacks)

    @property
    def is_decoder_only(self) -> bool:
        return self.encoder is None

    @property
    def encoder_stack(self) -> Stack:
        """Encoder of a model that has one."""
        assert self.encoder is not None, "the model has no encoder"
        return self.encoder

    @property
    def decoder_stack(self) -> Stack:
        """Decoder of a model that has one."""
        assert self.decoder is not None, "the model has no decoder"
        return self.decoder

    @property
    def first_stack(self) -> Stack:
        """Encoder, or the decoder of a decoder-only model."""
        return self.encoder or self.decoder_stack


def rotary_tables(rotary: Rotary, positions: int, size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cosines and sines (positions, D / 2) of rotary embedding for heads of size D.

    Angles are products in float32, as in transformers: at position 10,000, that rounding changes an
    angle by up to 5e-4 radians, and the model was trained with it.
    """
    frequencies = np.array(rotary.frequencies, np.float32)
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies).astype(np.float64)
    missing = [(0, 0), (0, size // 2 - len(frequencies))]
    cosines, sines = rotary.factor * np.cos(angles), rotary.factor * np.sin(angles)
    return np.pad(cosines, missing, constant_values=1.0), np.pad(sines, missing)

"""Reference of Firefox's translation models in NumPy and float64.

It is slow and obvious: one sentence, one token after another, no caches. It shares only the reader
of Marian files with the import. Vectors are rows, d is the width, and LN is layer normalization
with epsilon 1e-6.

Embedding of token i at position t: sqrt(d) E[i] + p[t], with p[t] = [sin(t w), cos(t w)] for
w_k = 10000^(-k / (d/2 - 1)), k = 0 .. d/2 - 1. The first input of the decoder is p[0] alone: there
is no start token. All layers normalize after the residual connection:

- attention: LN(x + A(x, m) W_o + b_o), with A the attention of Vaswani et al. 2017. The encoder
  attends to itself (m = x), the decoder to the encoder's output.
- feed-forward: LN(x + relu(x W_1 + b_1) W_2 + b_2).
- SSRU (Kim et al. 2019, From Research to Production and Back, section 3.1), which replaces the
  decoder's self-attention: f_t = sigmoid(x_t W_f + b_f), c_t = f_t c_(t-1) + (1 - f_t) x_t W with
  c_0 = 0, output LN(x_t + relu(c_t)).

A decoder layer is SSRU, attention, feed-forward. Logits are y E^T + b. The embeddings E are one
table `Wemb`, or `encoder_Wemb` and `decoder_Wemb` for separate vocabularies. The attention of the
first head of the last decoder layer was trained as the alignment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sightline.export.sources.firefox.marian_binary import MarianModel

Array = NDArray[np.float64]
EPSILON = 1e-6  # as in src/models/transformer.h of Marian
END_ID = 0  # `</s>` in all vocabularies of Firefox


@dataclass(frozen=True)
class Translation:
    """Greedy translation of a sentence."""

    ids: list[int]  # without the end token
    cross_attention: Array  # (T, layers, heads, S), T with the step that generates the end token


class FirefoxReference:
    """Greedy translation with a Marian model."""

    def __init__(self, model: MarianModel) -> None:
        """Read all weights. The architecture is not checked."""
        self._weights = {name: model.read(name).astype(np.float64) for name in model.entries}
        shared = "Wemb" in self._weights
        self._source_embedding = self._weights["Wemb" if shared else "encoder_Wemb"]
        self._target_embedding = self._weights["Wemb" if shared else "decoder_Wemb"]
        self._width = self._source_embedding.shape[1]
        sizes = [model.config[key] for key in ("enc-depth", "dec-depth", "transformer-heads")]
        self._encoder_layers, self._decoder_layers, self._heads = (int(str(size)) for size in sizes)

    def encode(self, source_ids: Sequence[int]) -> Array:
        """Return the output of the encoder (S, d)."""
        states = np.stack([self._embed(self._source_embedding, id_, index) for index, id_ in enumerate(source_ids)])
        for layer in range(1, self._encoder_layers + 1):
            states = self._attend(f"encoder_l{layer}_self", states, states)[0]
            states = self._feed_forward(f"encoder_l{layer}_ffn", states)
        return states

    def steps(self, source_ids: Sequence[int], target_ids: Sequence[int | None]) -> Iterator[tuple[Array, Array]]:
        """Yield the logits (V,) and the cross-attention (layers, heads, S) of each decoder step.

        Args:
            source_ids: ids of the source with the end token.
            target_ids: inputs of the decoder; the first is None. Ids may be added while iterating.
        """
        memory = self.encode(source_ids)
        cells = [np.zeros((1, self._width)) for _ in range(self._decoder_layers)]
        position = 0
        while position < len(target_ids):
            state = self._embed(self._target_embedding, target_ids[position], position)[None]
            maps = []
            for layer in range(1, self._decoder_layers + 1):
                name = f"decoder_l{layer}"
                state, cells[layer - 1] = self._recur(f"{name}_rnn", state, cells[layer - 1])
                state, attention = self._attend(f"{name}_context", state, memory)
                state = self._feed_forward(f"{name}_ffn", state)
                maps.append(attention[:, 0])
            logits = state @ self._target_embedding.T + self._weights["decoder_ff_logit_out_b"]
            yield logits[0], np.stack(maps)
            position += 1

    def translate(
        self,
        source_ids: Sequence[int],
        max_new_tokens: int,
        candidates: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> Translation:
        """Translate a sentence greedily.

        Args:
            source_ids: ids of the source with the end token.
            max_new_tokens: maximum number of generated tokens, end token included.
            candidates: ids that may be generated; all by default.
        """
        inputs: list[int | None] = [None]
        maps = []
        allowed = np.arange(len(self._target_embedding)) if candidates is None else np.asarray(candidates)
        for logits, attention in self.steps(source_ids, inputs):
            best = int(allowed[logits[allowed].argmax()])
            maps.append(attention)
            if best == END_ID or len(inputs) == max_new_tokens:
                break
            inputs.append(best)
        return Translation([id_ for id_ in inputs[1:] if id_ is not None], np.stack(maps))

    def _embed(self, table: Array, id_: int | None, position: int) -> Array:
        half = self._width // 2
        angles = position * 10000.0 ** (-np.arange(half) / (half - 1))
        positions: Array = np.concatenate([np.sin(angles), np.cos(angles)])
        if id_ is None:
            return positions
        embedded: Array = np.sqrt(self._width) * table[id_] + positions
        return embedded

    def _affine(self, name: str, kind: str, values: Array) -> Array:
        result: Array = values @ self._weights[f"{name}_W{kind}"] + self._weights[f"{name}_b{kind}"]
        return result

    def _norm(self, name: str, values: Array) -> Array:
        centred = values - values.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        result: Array = scaled * self._weights[f"{name}_ln_scale"] + self._weights[f"{name}_ln_bias"]
        return result

    def _attend(self, name: str, queries: Array, memory: Array) -> tuple[Array, Array]:
        """Return the output of an attention layer (T, d) and its weights (heads, T, S)."""
        query, key, value = (
            self._affine(name, kind, values).reshape(len(values), self._heads, -1).swapaxes(0, 1)
            for kind, values in (("q", queries), ("k", memory), ("v", memory))
        )
        scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context = (weights @ value).swapaxes(0, 1).reshape(len(queries), -1)
        return self._norm(f"{name}_Wo", queries + self._affine(name, "o", context)), weights

    def _feed_forward(self, name: str, values: Array) -> Array:
        inner = np.maximum(self._affine(name, "1", values), 0)
        return self._norm(f"{name}_ffn", values + self._affine(name, "2", inner))

    def _recur(self, name: str, values: Array, cell: Array) -> tuple[Array, Array]:
        """Return the output of the SSRU (1, d) and its new cell (1, d)."""
        forget = 1 / (1 + np.exp(-self._affine(name, "f", values)))
        cell = forget * cell + (1 - forget) * (values @ self._weights[f"{name}_W"])
        return self._norm(f"{name}_ffn", values + np.maximum(cell, 0)), cell

"""Greedy decoding of the Transformer in PyTorch with static caches and, optionally, CUDA graphs and
compilation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.transformer import Transformer
from sightline.model.layers.multi_head_attention import MultiHeadAttention, length_mask
from sightline.model.layers.transformer_layer import DecoderLayer

Mode = Literal["eager", "CUDA graph", "compiled CUDA graph"]
MODES: tuple[Mode, ...] = ("eager", "CUDA graph", "compiled CUDA graph")
WARM_UP_STEPS = 3  # before a step is captured as a CUDA graph


class TorchDecoder:
    """Decoder for one batch size and source length.

    All rows start together, because the captured step has one position for all of them.

    Shapes use L layers, B rows, H heads, T target positions, S source positions, D width of a head,
    M model width.
    """

    def __init__(self, model: Transformer, rows: int, source_tokens: int, new_tokens: int, mode: Mode) -> None:
        """Allocate the caches and capture the step.

        Args:
            model: The model, on its device and in its data type.
            rows: B.
            source_tokens: S; shorter sources are padded.
            new_tokens: Number of tokens that each output has.
            mode: "eager", or a mode that needs CUDA.
        """
        config, like = model.config, model.embedding.weight
        self._model = model
        shape = (config.decoder_layers, rows, config.num_heads, -1, config.d_model // config.num_heads)

        def cache(positions: int) -> Tensor:
            return torch.zeros(
                [positions if size == -1 else size for size in shape], dtype=like.dtype, device=like.device
            )

        positions = new_tokens + WARM_UP_STEPS
        self._keys, self._values = cache(positions), cache(positions)  # (L, B, H, T, D)
        self._source_keys, self._source_values = cache(source_tokens), cache(source_tokens)  # (L, B, H, S, D)
        self._positions = torch.arange(positions, device=like.device).unsqueeze(0)  # (1, T)
        self._source_mask = torch.ones(rows, 1, 1, source_tokens, dtype=torch.bool, device=like.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._new_tokens = new_tokens
        self._run = self._prepare(mode)

    def _prepare(self, mode: Mode) -> Callable[[], Any]:
        if mode == "eager":
            return self._step
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        step = torch.compile(self._step) if mode == "compiled CUDA graph" else self._step
        side.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._position.zero_()
        with torch.inference_mode(), torch.cuda.graph(graph):
            step()
        return graph.replay

    @torch.inference_mode()
    def decode(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return `new_tokens` tokens for each source of at most `source_tokens`; end tokens do not
        end an output.
        """
        self._encode(sources)
        read = []
        for _ in range(self._new_tokens):
            self._run()
            read.append(self._tokens.clone())
        return cast(list[list[int]], torch.stack(read, dim=1).tolist())

    def _encode(self, sources: Sequence[Sequence[int]]) -> None:
        model, device = self._model, self._tokens.device
        width = self._source_mask.size(-1)
        padded = [[*source, *[model.config.pad_id] * (width - len(source))] for source in sources]
        lengths = torch.tensor([len(source) for source in sources], device=device)
        memory, _ = model.encode(torch.tensor(padded, device=device), lengths)
        for number, layer in enumerate(self._layers()):
            cross = layer.cross_attention
            self._source_keys[number] = cross.split_heads(cross.key(memory))
            self._source_values[number] = cross.split_heads(cross.value(memory))
        self._source_mask.copy_(length_mask(lengths, width).unsqueeze(1))
        self._tokens.fill_(model.config.bos_id)
        self._position.zero_()

    def _layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self._model.decoder]

    def _step(self) -> None:
        model = self._model
        embedded = model.embedding(self._tokens) * math.sqrt(model.config.d_model)
        x = (embedded + model.positions[self._position]).unsqueeze(1)  # (B, 1, M)
        is_read = self._positions <= self._position  # (1, T)
        for number, layer in enumerate(self._layers()):
            own, keys, values = layer.self_attention, self._keys[number], self._values[number]
            keys.index_copy_(2, self._position, own.split_heads(own.key(x)))
            values.index_copy_(2, self._position, own.split_heads(own.value(x)))
            x = layer.self_attention_norm(x, _attend(own, x, keys, values, is_read))
            keys, values = self._source_keys[number], self._source_values[number]
            attended = _attend(layer.cross_attention, x, keys, values, self._source_mask)
            x = layer.cross_attention_norm(x, attended)
            x = layer.feed_forward_norm(x, layer.feed_forward(x))
        self._tokens.copy_(model.logits(x[:, 0]).argmax(dim=-1))
        self._position.add_(1)


def _attend(attention: MultiHeadAttention, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    queries = attention.split_heads(attention.query(x))  # (B, H, 1, D)
    heads = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return cast(Tensor, attention.output(attention.merge_heads(heads)))

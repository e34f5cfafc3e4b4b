"""Encoders of Hugging Face like BERT, with a head for classification or pooling for embeddings.

All are post-norm Transformer encoders (Devlin et al. 2019). Modules have the names of the
checkpoints, so that a state dictionary is the content of `model.safetensors`. Shapes use B batch, S
source, M width of the model, H heads, C labels.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.model.architectures.encoder import mean_pool
from sightline.model.config import PretrainedConfig
from sightline.model.data.pretrained import FAMILIES
from sightline.model.layers.dropout import Dropout
from sightline.model.layers.multi_head_attention import length_mask
from sightline.model.precision import at_least_float32

# Those of `sightline.model.data.pretrained.ACTIVATIONS`.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}
MPNET_BUCKETS, MPNET_DISTANCE = 32, 128  # of the relative bias; constants in transformers


def place(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Add a module by a dotted path, with empty modules for its parents, and return it."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(name, module)
    return module


@dataclass(frozen=True)
class Names:
    """Names of the modules of a layer, and keys of its sizes in config.json."""

    layers: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    inner: str = "intermediate.dense"
    outer: str = "output.dense"
    norm: str = "output.LayerNorm"
    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    num_layers: str = "num_hidden_layers"
    inner_width: str = "intermediate_size"
    activation: str = "hidden_act"
    attention_dropout: str = "attention_probs_dropout_prob"


BERT = Names()
MPNET = Names(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
DISTILBERT = Names(
    "transformer.layer",
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
    "dim",
    "n_heads",
    "n_layers",
    "hidden_dim",
    "activation",
    "attention_dropout",
)
NAMES = {"mpnet": MPNET, "distilbert": DISTILBERT}  # of all other families: BERT


class BertLayer(nn.Module):
    """Self-attention and feed-forward layer, each with dropout, residual and normalization."""

    def __init__(self, config: PretrainedConfig, names: Names, eps: float) -> None:
        super().__init__()
        width, inner = config.fields[names.width], config.fields[names.inner_width]
        self._names, self.num_heads = names, config.fields[names.heads]
        for path in (names.query, names.key, names.value, names.output):
            place(self, path, nn.Linear(width, width))
        place(self, names.attention_norm, nn.LayerNorm(width, eps=eps))
        place(self, names.inner, nn.Linear(width, inner))
        place(self, names.outer, nn.Linear(inner, width))
        place(self, names.norm, nn.LayerNorm(width, eps=eps))
        self.activation = ACTIVATIONS[config.value(names.activation, "gelu")]
        self.attention_dropout = float(config.value(names.attention_dropout, 0.1))
        self.dropout = Dropout(config.dropout)

    def _apply_module(self, path: str, x: Tensor) -> Tensor:
        result: Tensor = self.get_submodule(path)(x)
        return result

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run the layer on x (B, S, M). The mask, broadcastable to (B, H, S, S), is True where a
        query may attend to a key, or has numbers that are added to the scores.
        """
        names, apply = self._names, self._apply_module
        q, k, v = (
            apply(path, x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)  # (B, H, S, M / H)
            for path in (names.query, names.key, names.value)
        )
        p = self.attention_dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=p)
        attended = apply(names.output, attended.transpose(1, 2).flatten(2))
        x = apply(names.attention_norm, x + self.dropout(attended))
        inner = self.activation(apply(names.inner, x))
        return apply(names.norm, x + self.dropout(apply(names.outer, inner)))


class BertEncoder(nn.Module):
    """Encoder without a head, and its embeddings of texts."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        names, family = NAMES.get(config.family, BERT), FAMILIES[config.family]
        width, eps = config.fields[names.width], config.value("layer_norm_eps", 1e-12)
        eps = 1e-12 if config.family == "distilbert" else eps  # transformers has it as a constant
        pad = 1 if config.family == "mpnet" else config.fields.get("pad_token_id", 0)
        rows = config.value("max_position_embeddings", 512)
        self.first_position = pad + 1 if family.skipped_positions is None else family.skipped_positions
        self._types = config.value("type_vocab_size", 2) if config.family not in NAMES else 0
        self.embeddings = nn.Module()
        place(self.embeddings, "word_embeddings", nn.Embedding(config.vocab_size, width, padding_idx=pad))
        place(self.embeddings, "position_embeddings", nn.Embedding(rows, width))
        if self._types:
            place(self.embeddings, "token_type_embeddings", nn.Embedding(self._types, width))
        place(self.embeddings, "LayerNorm", nn.LayerNorm(width, eps=eps))
        layers = nn.ModuleList(BertLayer(config, names, eps) for _ in range(config.fields[names.num_layers]))
        place(self, names.layers, layers)
        self._layers = names.layers
        if config.family == "mpnet":
            place(self, "encoder.relative_attention_bias", nn.Embedding(MPNET_BUCKETS, config.fields[names.heads]))
        if config.has_pooler:  # kept for users of the checkpoint, and never trained
            place(self, "pooler.dense", nn.Linear(width, width)).requires_grad_(False)
        self.dropout = Dropout(config.dropout)

    def hidden_states(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the last hidden states (B, S, M) of ids (B, S), S at most `max_positions`."""
        size = source.size(1)
        if size > self.config.max_positions:
            raise ValueError(f"input has {size} tokens, but max_positions is {self.config.max_positions}")
        table = self.embeddings
        positions = torch.arange(self.first_position, self.first_position + size, device=source.device)
        x = table.word_embeddings(source) + table.position_embeddings(positions)  # type: ignore[operator]
        if self._types:
            x = x + table.token_type_embeddings.weight[0]  # type: ignore[index, union-attr]
        x = self.dropout(table.LayerNorm(x))  # type: ignore[operator]
        mask = length_mask(source_lengths, size).unsqueeze(1)  # (B, 1, 1, S)
        if self.config.family == "mpnet":
            mask = self._relative_bias(size, source.device).masked_fill(~mask, -math.inf)  # (B, H, S, S)
        hidden: Tensor = x
        for layer in cast(Iterable[BertLayer], self.get_submodule(self._layers)):
            hidden = layer(hidden, mask)
        return hidden

    def _relative_bias(self, size: int, device: torch.device) -> Tensor:
        """Return the bias (1, H, S, S) of the scores of MPNet. The distance of a key from a query
        chooses one of 32 rows of the table: 16 for each direction, 8 of them for single distances
        and 8 for ranges up to 128.
        """
        places = torch.arange(size, device=device)
        distance = places[:, None] - places[None, :]  # of the query from the key
        half = MPNET_BUCKETS // 2
        exact = half // 2
        size_of = distance.abs()
        ratio = torch.log(size_of.clamp(min=1).float() / exact) / math.log(MPNET_DISTANCE / exact)
        far = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        bucket = torch.where(size_of < exact, size_of, far) + half * (distance < 0)
        table: Tensor = self.get_submodule("encoder.relative_attention_bias")(bucket)  # (S, S, H)
        return table.permute(2, 0, 1).unsqueeze(0)

    def embed(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the pooled hidden states (B, M) of padded token ids (B, S)."""
        hidden = at_least_float32(self.hidden_states(source, source_lengths))
        mask = length_mask(source_lengths, source.size(1)).squeeze(1)  # (B, S)
        if self.config.pooling == "mean":
            return mean_pool(hidden, mask)
        if self.config.pooling == "max":
            return hidden.masked_fill(~mask.unsqueeze(2), -math.inf).amax(dim=1)
        if self.config.pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), source_lengths - 1]
        return hidden[:, 0]

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return `embed` of the arguments, each vector divided by its norm."""
        return functional.normalize(self.embed(source, source_lengths), dim=-1)


class BertClassifier(nn.Module):
    """Encoder with the classification head of its family, which reads the first token."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        prefix, width = FAMILIES[config.family].prefix, config.value("hidden_size", config.fields.get("dim"))
        encoder = BertEncoder(config)
        self.add_module(prefix.removesuffix("."), encoder)
        self._encoder = prefix.removesuffix(".")
        # Modules before and after the activation. Dropout precedes the second, or both.
        if config.family == "bert":
            self._dense, self.output_name, self._drops_first = f"{prefix}pooler.dense", "classifier", False
        elif config.family == "distilbert":
            self._dense, self.output_name, self._drops_first = "pre_classifier", "classifier", False
        else:
            self._dense, self.output_name, self._drops_first = "classifier.dense", "classifier.out_proj", True
        self._activation = torch.relu if config.family == "distilbert" else torch.tanh
        deviation = float(config.value("initializer_range", 0.02))
        for path, outputs in ((self._dense, width), (self.output_name, len(config.labels))):
            linear = nn.Linear(width, outputs)
            nn.init.normal_(linear.weight, std=deviation)
            nn.init.zeros_(linear.bias)
            place(self, path, linear)
        self.dropout = Dropout(_head_dropout(config))

    def logits(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the score of each label (B, C)."""
        first = self.get_submodule(self._encoder).hidden_states(source, source_lengths)[:, 0]  # type: ignore[operator]
        first = self.dropout(first) if self._drops_first else first
        inner = self._activation(self.get_submodule(self._dense)(first))
        return at_least_float32(self.get_submodule(self.output_name)(self.dropout(inner)))

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the log-probabilities (B, C) of the labels of padded sources (B, S); if a text has
        any number of labels, the logits, whose sigmoids are the probabilities.
        """
        logits = self.logits(source, source_lengths)
        return logits if self.config.multi_label else logits.log_softmax(dim=-1)


def _head_dropout(config: PretrainedConfig) -> float:
    """Return the dropout probability of the head, as transformers chooses it."""
    if config.family == "distilbert":
        return float(config.value("seq_classif_dropout", 0.2))
    own = None if config.family == "mpnet" else config.fields.get("classifier_dropout")
    return config.dropout if own is None else float(own)

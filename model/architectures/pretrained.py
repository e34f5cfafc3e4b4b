"""Models of transformers, which others trained first, as modules of the tasks.

A state dictionary has the names of transformers. Shapes use B batch, S source, T target tokens, M
width of the model, V vocabulary, C labels.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.base.errors import UsageError, list_of
from sightline.model.architectures.encoder import mean_pool
from sightline.model.config import PretrainedConfig
from sightline.model.layers.dropout import Dropout
from sightline.model.layers.multi_head_attention import length_mask
from sightline.model.precision import at_least_float32

# Keys of the probability of dropout of hidden states, or else of attention weights.
_DROPOUT_KEYS = (
    "hidden_dropout_prob", "dropout", "dropout_rate", "resid_pdrop", "hidden_dropout", "mlp_dropout",
    "attention_dropout",
)  # fmt: skip
LABELLED = ("classification", "reranking", "tagging")  # tasks of models with labels
_LABEL_KEYS = ("num_labels", "_num_labels", "id2label", "label2id", "problem_type")
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "encoder": "AutoModel",
    "language-model": "AutoModelForCausalLM",
    "reranking": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "translation": "AutoModelForSeq2SeqLM",
}
# A tensor of a layer, which no model omits but T5's encoder
_LAYER = re.compile(r"^(?!decoder\.).*(layers?|block|h)\.\d+\.")


def transformers_config(config: PretrainedConfig) -> Any:
    """Return the configuration of transformers of a model, as it is saved."""
    import transformers

    fields = config.fields
    if config.task in LABELLED:
        fields = {key: value for key, value in fields.items() if key not in _LABEL_KEYS}
        fields |= {"id2label": dict(enumerate(config.labels))}
        if config.task == "classification":
            fields["problem_type"] = f"{'multi' if config.multi_label else 'single'}_label_classification"
        fields |= {"label2id": {label: index for index, label in enumerate(config.labels)}}
        if fields.get("pad_token_id") is None:  # a decoder finds the last token of a text by it
            fields["pad_token_id"] = config.pad_id
    made = type(transformers.AutoConfig.for_model(config.family)).from_dict(dict(fields))
    if (key := dropout_key(made)) is not None:
        setattr(made, key, config.dropout)
    return made


def dropout_key(config: Any) -> str | None:
    """Return the key of the dropout of hidden states in a configuration of transformers."""
    return next((key for key in _DROPOUT_KEYS if isinstance(getattr(config, key, None), int | float)), None)


class PretrainedModel(nn.Module):
    """Base of the models of all tasks."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.module = _class(config).from_config(transformers_config(config), dtype=torch.float32)
        self.module.config.use_cache = False
        # It is faster on a CPU.
        for parent in list(self.module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Dropout:
                    setattr(parent, name, Dropout(child.p))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the weights, each of them once, by their names in transformers."""
        tied = self.module.all_tied_weights_keys
        return {name: tensor for name, tensor in self.module.state_dict().items() if name not in tied}

    def load_state_dict(self, weights: Mapping[str, Any], *_: Any, **__: Any) -> None:  # type: ignore[override]
        missing, unknown = self.module.load_state_dict(weights, strict=False)
        if unknown or not set(missing) <= set(self.module.all_tied_weights_keys):
            raise RuntimeError(f"the weights are of another model:\nmissing {missing[:3]}, unknown {unknown[:3]}")

    def load(self, folder: Path, labels: Sequence[str]) -> None:
        """Load the weights in a folder that others wrote, as float32; on the device "meta", compare
        names and shapes. `labels` are those of its classifier, empty if it is none. Rows of labels
        that the checkpoint has are kept; the output layer is new if one of them is not.

        Raises `UsageError` if other weights are missing or unknown.
        """
        config, is_known = self.config, set(self.config.labels) <= set(labels)
        if config.task in LABELLED and is_known:
            config = dataclasses.replace(config, labels=tuple(labels))
        loaded, report = _class(config).from_pretrained(
            folder,
            config=transformers_config(config),
            dtype=torch.float32,
            device_map=self.module.device,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        base = "" if is_known else f"{loaded.base_model_prefix}."
        missing = [name for name in report["missing_keys"] if name.startswith(base) and "pooler" not in name]
        missing += [name for name, *_ in report["mismatched_keys"] if name.startswith(base)]
        unknown = [name for name in report["unexpected_keys"] if _LAYER.search(name)]
        check_names(folder, missing, unknown)
        weights = loaded.state_dict()
        if config.task in LABELLED:
            head = (name for name, layer in loaded.named_modules() if isinstance(layer, nn.Linear))
            output = [name for name in head if not name.startswith(f"{loaded.base_model_prefix}.")][-1]
            rows = [config.labels.index(label) for label in self.config.labels]
            for name in (f"{output}.weight", f"{output}.bias"):
                if name in weights:
                    weights[name] = weights[name][rows] if is_known else self.module.state_dict()[name]
        self.load_state_dict(weights)

    def add_adapters(self, rank: int) -> None:
        """Freeze the weights, and train a low-rank update of each linear layer but the output layer
        (LoRA; Hu et al. 2022).
        """
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        is_transposed = any(isinstance(layer, Conv1D) for layer in self.module.modules())  # as in GPT-2
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", fan_in_fan_out=is_transposed)
        inject_adapter_in_model(config, self.module)

    def merged_weights(self) -> dict[str, Tensor]:
        """Return the weights, to which the updates of `add_adapters` are added."""
        from peft.tuners.lora import LoraLayer

        updated: dict[str, Any] = {
            name: layer for name, layer in self.module.named_modules() if isinstance(layer, LoraLayer)
        }
        weights = dict[str, Tensor]()
        for name, tensor in self.state_dict().items():
            layer, _, part = name.rpartition(".base_layer.")
            if part == "weight":
                tensor = tensor + updated[layer].get_delta_weight("default")
            if ".lora_" not in name:
                weights[name.replace(".base_layer.", ".")] = tensor
        return weights

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write weights and configuration as transformers does."""
        self.module.config.use_cache = True
        self.module.save_pretrained(folder, state_dict=dict(weights), max_shard_size="1TB")


def check_names(folder: Path, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise `UsageError` if tensors are missing in a checkpoint, or unknown."""
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise UsageError(
                f"{folder} {problem} tensors: {list_of(sorted(names), 3)}; its configuration may belong to another "
                "checkpoint, or it is a variant that cannot be trained"
            )


def _class(config: PretrainedConfig) -> Any:
    """Return the class of transformers for the task of a model, which prints no progress."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if config.task == "encoder" and config.family in ("t5", "mt5"):
        return transformers.AutoModelForTextEncoding
    return getattr(transformers, _CLASSES[config.task])


class PretrainedEncoder(PretrainedModel):
    """Encoder whose pooled hidden state, divided by its norm, is the vector of a text."""

    def embed(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the pooled hidden states (B, M) of padded token ids (B, S)."""
        mask = length_mask(source_lengths, source.size(1))  # (B, S)
        hidden = at_least_float32(self.module(source, attention_mask=mask.long()).last_hidden_state)
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


class PretrainedClassifier(PretrainedModel):
    """Encoder with the classification head of its family."""

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the log-probabilities (B, C) of the labels of padded sources (B, S); if a text has
        any number of labels, the logits, whose sigmoids are the probabilities.
        """
        mask = length_mask(source_lengths, source.size(1))
        logits = at_least_float32(self.module(source, attention_mask=mask.long()).logits)
        return logits if self.config.multi_label else logits.log_softmax(dim=-1)


class PretrainedReranker(PretrainedModel):
    """Encoder that reads a query and a document together, and predicts a score."""

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the logits (B,) of the scores of padded pairs (B, S)."""
        mask = length_mask(source_lengths, source.size(1))
        types = {}
        if self.config.type_separators:  # tokens after the first separator have the type 1
            is_separator = source == self.config.type_separators[0]
            types["token_type_ids"] = (is_separator.cumsum(dim=1) > is_separator.long()).long()
        logits = self.module(source, attention_mask=mask.long(), **types).logits
        return at_least_float32(logits).squeeze(1)


class PretrainedTagger(PretrainedClassifier):
    """Encoder with a linear layer for each token, whose scores are (B, S, C)."""


class PretrainedGenerator(PretrainedModel):
    """Model with an output layer over the vocabulary."""

    @property
    def output_weight(self) -> Tensor:
        """Weight (V, M) that projects hidden states to logits."""
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight

    def _features(self, hidden: Tensor) -> Tensor:
        """Scale hidden states as the family does before the projection."""
        config = self.module.config
        if getattr(config, "scale_decoder_outputs", False):  # of T5
            hidden = hidden * config.d_model**-0.5
        return hidden / getattr(config, "logits_scaling", 1.0)  # of Granite

    @property
    def softcap(self) -> float | None:
        """Number c for which logits x become c tanh(x / c), as in Gemma 2."""
        cap: float | None = getattr(self.module.config, "final_logit_softcapping", None)
        return cap

    def logits(self, features: Tensor) -> Tensor:
        """Project features (..., M), scaled hidden states, to logits (..., V)."""
        logits, cap = features @ self.output_weight.T, self.softcap
        if (bias := getattr(self.module, "final_logits_bias", None)) is not None:
            logits = logits + bias
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def projection(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return two matrices whose product is the logits (N, V) of features (N, M) before the
        softcap. A bias is a further column of the weights.
        """
        weight, bias = self.output_weight, getattr(self.module, "final_logits_bias", None)
        if bias is None:
            return features, weight
        return functional.pad(features, (0, 1), value=1.0), torch.cat([weight, bias.T], dim=1)


class PretrainedDecoder(PretrainedGenerator):
    """Causal language model."""

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, None]:
        """Return features (B, T, M) of token ids (B, T), the input of `logits`; and None in place
        of attention weights. Padding on the right needs no mask.
        """
        return self._features(self.module.base_model(ids).last_hidden_state), None

    def forward(self, ids: Tensor) -> Tensor:
        """Return next-token logits (B, T, V) after each token of `ids` (B, T)."""
        return self.logits(self.hidden_states(ids)[0])


class PretrainedTranslator(PretrainedGenerator):
    """Encoder-decoder."""

    @property
    def embedding(self) -> Any:
        """Layer with the weights of the output projection."""
        return self.module.get_output_embeddings()

    def encode(self, source: Tensor, source_lengths: Tensor) -> tuple[Tensor, None]:
        """Return the hidden states (B, S, M) of padded token ids (B, S)."""
        mask = length_mask(source_lengths, source.size(1))
        return self.module.get_encoder()(source, attention_mask=mask.long()).last_hidden_state, None

    def decode(self, target: Tensor, memory: Tensor, source_lengths: Tensor) -> tuple[Tensor, None, None]:
        """Return features (B, T, M) of target ids (B, T), the input of `logits`."""
        mask = length_mask(source_lengths, memory.size(1))
        decoded = self.module.get_decoder()(
            input_ids=target, encoder_hidden_states=memory, encoder_attention_mask=mask.long(), use_cache=False
        )
        return self._features(decoded.last_hidden_state), None, None

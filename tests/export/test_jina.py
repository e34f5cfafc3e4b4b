"""Jina embeddings of version 2, compared with an implementation from its paper.

Transformers has none. This one follows Günther et al. 2023, section 3: BERT without position
embeddings, with the symmetric variant of ALiBi and GEGLU layers. The slopes are those of BLOOM in
Transformers, which has ALiBi in its causal form.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from sightline.export.check.verify import ComparedTexts, compared_rows
from sightline.export.import_errors import ImportFailedError
from tests.support.tables import read_table
from tests.zoo.comparing import TOLERANCE, assert_graphs_equal_the_reference, import_folder, token_types

CONFIG: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"], "attention_probs_dropout_prob": 0.0, "attn_implementation": None,
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "classifier_dropout": None, "emb_pooler": "mean", "feed_forward_type": "geglu", "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64, "model_max_length": 64, "model_type": "bert", "pad_token_id": 0,
    "position_embedding_type": "alibi", "torch_dtype": "float32", "transformers_version": "4.26.0",
    "type_vocab_size": 2, "use_cache": True, "vocab_size": 211,
}  # fmt: skip
# Heads that are a power of two, and others.
SHAPES = {
    "small": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 37},
    "base": {"hidden_size": 36, "num_attention_heads": 12, "num_hidden_layers": 2, "intermediate_size": 29},
    "odd": {"hidden_size": 30, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 41},
}


class Jina(nn.Module):
    """Names of modules are those of the repositories."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]

        def norm() -> nn.Module:
            return nn.LayerNorm(width, config["layer_norm_eps"])

        def layer() -> nn.Module:
            projections = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
            output = nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": norm()})
            attention = nn.ModuleDict({"self": nn.ModuleDict(projections), "output": output})
            gated, outer = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width)
            mlp = nn.ModuleDict({"gated_layers": gated, "wo": outer, "layernorm": norm()})
            return nn.ModuleDict({"attention": attention, "mlp": mlp})

        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], width),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], width),
                "LayerNorm": norm(),
            }
        )
        layers = nn.ModuleList([layer() for _ in range(config["num_hidden_layers"])])
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, ids: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states (S, M), and the attention maps (layers, H, S, S)."""
        x = self.embeddings["word_embeddings"](ids) + self.embeddings["token_type_embeddings"](types)
        x, maps = self.embeddings["LayerNorm"](x), []
        positions = torch.arange(len(ids))
        distances = (positions[:, None] - positions).abs()
        slopes = _get_alibi_slopes(self.heads, torch.device("cpu"))
        layers: Any = self.encoder["layer"]
        for layer in layers:
            attention, mlp = layer["attention"], layer["mlp"]
            query, key, value = (
                attention["self"][name](x).unflatten(-1, (self.heads, -1)).transpose(0, 1)
                for name in ("query", "key", "value")
            )  # (H, S, D)
            scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5 - slopes[:, None, None] * distances
            maps.append(scores.softmax(-1))
            attended = (maps[-1] @ value).transpose(0, 1).flatten(1)
            x = attention["output"]["LayerNorm"](x + attention["output"]["dense"](attended))
            gate, up = mlp["gated_layers"](x).chunk(2, dim=-1)
            x = mlp["layernorm"](x + mlp["wo"](nn.functional.gelu(gate) * up))
        return x, torch.stack(maps)


@torch.no_grad()
def write_model(folder: Path, name: str, **changes: Any) -> Jina:
    """Write a random model, with the prefix and the head of a masked language model."""
    config = CONFIG | SHAPES[name] | changes
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = Jina(config)
    for key, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0, 0.3)
    tensors = {f"bert.{key}": parameter.detach().clone() for key, parameter in model.named_parameters()}
    tensors["cls.predictions.bias"] = torch.zeros(config["vocab_size"])
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_graph_and_numpy_equal_an_implementation_of_the_paper(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name)
    imported = import_folder(tmp_path)
    draw = np.random.default_rng(0)
    texts = ComparedTexts(tuple(tuple(draw.integers(100, 211, length).tolist()) for length in (64, 12, 7, 1)))
    assert_graphs_equal_the_reference(imported, texts)
    outputs = imported.outputs(texts)
    for number, ids in enumerate(texts.sources):
        hidden, maps = model(torch.tensor(ids), torch.tensor(token_types(ids)))
        rows = compared_rows(len(ids))
        np.testing.assert_allclose(outputs[f"hidden.{number}"], hidden.detach(), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(outputs[f"encoder.{number}"], maps.detach()[:, :, rows], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("changes", "message"), read_table(__file__))
def test_other_variants_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(tmp_path, "small", **changes)
    with pytest.raises(ImportFailedError, match=message):
        import_folder(tmp_path)


def test_the_variant_with_normalized_queries_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, "small")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["bert.encoder.layer.0.attention.self.layer_norm_q.weight"] = torch.from_numpy(np.ones(32, np.float32))
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ImportFailedError, match=r"1 tensors that its architecture does not use: .*layer_norm_q"):
        import_folder(tmp_path)

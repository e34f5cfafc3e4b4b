"""Small checkpoints in the layout of Hugging Face, with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCABULARY = 40
WIDTH, INNER, LAYERS, HEADS, POSITIONS = 16, 32, 2, 2, 24

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "transformers_version": "5.0.0",
}


def bert_tensors() -> dict[str, Any]:
    """Return random weights of a BERT encoder."""
    generator = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        for module, outputs, inputs in (
            ("attention.self.query", WIDTH, WIDTH),
            ("attention.self.key", WIDTH, WIDTH),
            ("attention.self.value", WIDTH, WIDTH),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", INNER, WIDTH),
            ("output.dense", WIDTH, INNER),
        ):
            shapes[f"encoder.layer.{layer}.{module}.weight"] = (outputs, inputs)
            shapes[f"encoder.layer.{layer}.{module}.bias"] = (outputs,)
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{layer}.{norm}.weight"] = (WIDTH,)
            shapes[f"encoder.layer.{layer}.{norm}.bias"] = (WIDTH,)
    return {name: generator.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def word_tokenizer(size: int = VOCABULARY) -> Tokenizer:
    """Return a WordPiece tokenizer of `size` tokens, with settings of truncation as MiniLM has."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(size - 4))]
    tokenizer = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding()
    return tokenizer


def write_bert(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint; `changes` are keys of config.json, None to remove one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(bert_tensors(), folder / "model.safetensors")
    word_tokenizer().save(str(folder / "tokenizer.json"))
    return folder

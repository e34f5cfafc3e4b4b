"""Tiny checkpoints of all families, and changes of their files that a hostile author could make."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from export.tokenizers.sentencepiece import SentencePieceModel
from tests.export.tokenizers.writing import special_pieces, unigram_pieces, write_sentencepiece

WORDS = ("<s>", "<pad>", "</s>", "<unk>", "[CLS]", "[SEP]", "en_XX", "de_DE", "__en__", "__de__")
VOCABULARY = 30
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 12, "max_position_embeddings": 20, "pad_token_id": 1,
}  # fmt: skip
SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")  # of ModernBERT
DECODER = ENCODER | {"num_key_value_heads": 1, "head_dim": 4, "bos_token_id": 0, "eos_token_id": 2}
BOTH: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 20,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 12, "num_layers": 1,
    "num_decoder_layers": 1, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "n_positions": 20,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}
CHECKPOINTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("BertForSequenceClassification", ENCODER | {"num_labels": 3}),
    "roberta": ("RobertaModel", ENCODER),
    "xlm-roberta": ("XLMRobertaForTokenClassification", ENCODER | {"num_labels": 3}),
    "electra": ("ElectraModel", ENCODER | {"embedding_size": 6}),
    "mpnet": ("MPNetModel", ENCODER | {"max_position_embeddings": 150}),
    "distilbert": (
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": 8, "n_heads": 2, "n_layers": 2, "hidden_dim": 12}
        | {"max_position_embeddings": 20},
    ),
    "albert": ("AlbertModel", ENCODER | {"embedding_size": 6}),
    "modernbert": ("ModernBertModel", ENCODER | {"local_attention": 6, **dict.fromkeys(SPECIAL, 2)}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_positions": 20, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_inner": 12}
        | {"bos_token_id": 0, "eos_token_id": 2},
    ),
    "llama": ("LlamaForCausalLM", DECODER | {"rope_parameters": ROPE}),
    "smollm3": ("SmolLM3ForCausalLM", DECODER | {"use_sliding_window": True, "sliding_window": 6}),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", DECODER | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", DECODER),
    "marian": ("MarianMTModel", BOTH | {"decoder_start_token_id": 1, "forced_eos_token_id": 2}),
    "bart": ("BartForConditionalGeneration", BOTH),
    "mbart": ("MBartForConditionalGeneration", BOTH | {"decoder_start_token_id": 6}),
    "m2m_100": ("M2M100ForConditionalGeneration", BOTH | {"forced_bos_token_id": 8}),
    "pegasus": ("PegasusForConditionalGeneration", BOTH | {"forced_eos_token_id": 2}),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
}
CHECKPOINTS |= {
    "camembert": ("CamembertForQuestionAnswering", ENCODER),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        ENCODER
        | {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
        | {"position_buckets": 6, "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
    ),
    "nomic_bert": ("NomicBertModel", ENCODER),
    "gte": ("GteModel", ENCODER),
    "gemma": ("GemmaForCausalLM", DECODER),
    "gemma2": ("Gemma2ForCausalLM", DECODER | {"sliding_window": 5, "query_pre_attn_scalar": 4}),
    "gemma3_text": ("Gemma3ForCausalLM", DECODER | {"sliding_window": 5, "query_pre_attn_scalar": 4}),
    "phi3": (
        "Phi3ForCausalLM",
        {**DECODER, "original_max_position_embeddings": 10}
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 2.0],
                "long_factor": [2.0, 3.0],
                "original_max_position_embeddings": 10,
            }
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", DECODER),
    "granite": ("GraniteForCausalLM", DECODER | {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "gpt_neox": ("GPTNeoXForCausalLM", ENCODER | {"bos_token_id": 0, "eos_token_id": 2, "rotary_pct": 0.5}),
    "opt": (
        "OPTForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 8, "ffn_dim": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"max_position_embeddings": 20, "word_embed_proj_dim": 8, "pad_token_id": 1}
        | {"bos_token_id": 0, "eos_token_id": 2},
    ),
    "masked bert": ("BertForMaskedLM", ENCODER),
}
DEPTH = 4  # of nested values
SIZES: tuple[Any, ...] = (0, -1, 10**9, 10**400 - 1, 1e300, "text", None, [], [1, -5, "x"], {}, True)


def tokenizer_of(size: int = VOCABULARY) -> Tokenizer:
    """Return a WordPiece tokenizer with the special tokens of all families."""
    words = [*WORDS, *"abcdefghijklmnopqrstuvwxyz"][:size]
    tokenizer = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 4), ("[SEP]", 5)]
    )
    tokenizer.add_special_tokens(list(WORDS))
    return tokenizer


def write_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """Write a random checkpoint of a family, with changes of its configuration."""
    name, options = CHECKPOINTS[family]
    architecture = getattr(transformers, name)
    config = architecture.config_class(**{**options, **changes})
    config.architectures = [name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = architecture(config)
    model.save_pretrained(folder)
    if family == "marian":
        pieces = [*special_pieces("<unk>", "</s>"), *unigram_pieces("▁", *"abcdefghijklmnop")]
        for side in ("source", "target"):
            (folder / f"{side}.spm").write_bytes(write_sentencepiece(SentencePieceModel(tuple(pieces))))
        tokens = ["<s>", "<pad>", "</s>", *(piece.text for piece in pieces if piece.text != "</s>")]
        write_json(folder / "vocab.json", {token: id_ for id_, token in enumerate(tokens)})
    else:
        tokenizer_of().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"model_max_length": 16, "bos_token": "<s>", "eos_token": "</s>"})
    return folder


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class Change:
    """A value of a JSON file that another one replaces."""

    file: str
    keys: tuple[str | int, ...]  # of nested values; empty for the document itself
    value: Any

    def __str__(self) -> str:
        return f"{self.file} {'.'.join(map(str, self.keys))} = {json.dumps(self.value)[:20]}"

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        document: Any = [json.loads(path.read_text(encoding="utf-8"))]
        inner = document
        for key in (0, *self.keys[:-1]) if self.keys else ():
            inner = inner[key]
        inner[self.keys[-1] if self.keys else 0] = self.value
        write_json(path, document[0])


def changes_of(folder: Path) -> Iterator[Change]:
    """Yield all changes of the JSON files of a checkpoint: each value by each of `SIZES`."""
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for keys in ((), *_paths(document)):
            for value in SIZES:
                yield Change(path.name, keys, value)


def _paths(value: Any, depth: int = DEPTH) -> Iterator[tuple[str | int, ...]]:
    """Yield the keys of nested values; only the first and last key of long lists and objects."""
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return
    if len(keys) > (2 if isinstance(value, list) else 60 if depth == DEPTH else 20):
        keys = [keys[0], keys[-1]]
    for key in keys:
        yield (key,)
        if depth:
            yield from ((key, *rest) for rest in _paths(value[key], depth - 1))

"""Tiny checkpoints of all families, and changes of their files that a hostile author could make."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sightline.export.tokenizers.sentencepiece import SentencePieceModel
from tests.export.test_causal_encoders import IDENTITY, LANGUAGE_MODEL, MESSAGES, TEMPLATE
from tests.export.test_encoder_families import ORIGINAL_GTE
from tests.export.test_jina import write_model
from tests.export.test_predictions import sparse_files
from tests.export.tokenizers.writing import special_pieces, unigram_pieces, write_sentencepiece
from tests.zoo.folders import modules
from tests.zoo.models import random_model

WORDS = (
    *("<s>", "<pad>", "</s>", "<unk>", "[CLS]", "[SEP]", "en_XX", "de_DE", "__en__", "__de__"),
    *("<|im_start|>", "<|im_end|>", "yes", "no"),  # of a reranker
)
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
    "jina_embeddings_v3": ("JinaEmbeddingsV3Model", ENCODER),
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
    "jina_bert": ("", {}),  # Transformers has no class of it
    "opt": (
        "OPTForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 8, "ffn_dim": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"max_position_embeddings": 20, "word_embed_proj_dim": 8, "pad_token_id": 1}
        | {"bos_token_id": 0, "eos_token_id": 2},
    ),
    "masked bert": ("BertForMaskedLM", ENCODER),
    "new": ("GteModel", ENCODER | {"pad_token_id": 0}),
    "bart classifier": ("BartForSequenceClassification", BOTH | {"num_labels": 3}),
    "sentence-transformers": ("BertModel", ENCODER),
    "splade": ("BertForMaskedLM", ENCODER),
    "logit score": ("Qwen3ForCausalLM", DECODER | {"max_position_embeddings": 200}),
    "reranker": ("Qwen3ForCausalLM", DECODER | {"max_position_embeddings": 200}),
}
TASKS: dict[str, Literal["rerank"]] = {"reranker": "rerank"}  # that the user names
FOLDERS = {"sentence-transformers": "0_Transformer/"}  # of the Transformer, in older folders
FILES: dict[str, dict[str, Any]] = {
    "sentence-transformers": {
        "modules.json": [
            {"idx": 0, "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
            *modules("Transformer", "Pooling", "Dense", "Normalize")[1:],
        ],
        "0_Transformer/sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
        | {"pooling_mode_cls_token": False, "include_prompt": True},
        "2_Dense/config.json": {"in_features": 8, "out_features": 6, "bias": True, "activation_function": IDENTITY},
        "config_sentence_transformers.json": {"prompts": {"query": "a b ", "document": ""}}
        | {"default_prompt_name": None, "similarity_fn_name": "cosine"},
    },
    "splade": sparse_files(),
    "logit score": {
        "modules.json": modules("Transformer", "LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": 12, "false_token_id": 13},
        "sentence_bert_config.json": LANGUAGE_MODEL | {"modality_config": {"text": MESSAGES, "message": MESSAGES}},
        "config_sentence_transformers.json": {"prompts": {"web": "a b"}, "default_prompt_name": "web"},
    },
    "new": {"config.json": ORIGINAL_GTE},
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
    main = folder / FOLDERS.get(family, "")
    main.mkdir(parents=True, exist_ok=True)
    if family == "jina_bert":
        write_model(main, "small", vocab_size=VOCABULARY, max_position_embeddings=20, model_max_length=20)
    else:
        _write_weights(family, main, changes)
    letters = unigram_pieces("▁", *"abcdefghijklmnop")
    if family == "marian":
        pieces = [*special_pieces("<unk>", "</s>"), *letters]
        for side in ("source", "target"):
            (folder / f"{side}.spm").write_bytes(write_sentencepiece(SentencePieceModel(tuple(pieces))))
        tokens = ["<s>", "<pad>", "</s>", *(piece.text for piece in pieces if piece.text != "</s>")]
        write_json(folder / "vocab.json", {token: id_ for id_, token in enumerate(tokens)})
    elif family == "opt":
        write_json(folder / "vocab.json", tokenizer_of().get_vocab())
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    elif family == "deberta-v2":
        pieces = [*special_pieces("[PAD]", "<unk>", "[CLS]", "[SEP]"), *letters]
        (folder / "spm.model").write_bytes(write_sentencepiece(SentencePieceModel(tuple(pieces))))
    else:
        tokenizer_of().save(str(main / "tokenizer.json"))
    is_pair = family in ("logit score", "reranker")
    options = {"model_max_length": 150, "chat_template": TEMPLATE} if is_pair else {"model_max_length": 16}
    write_json(main / "tokenizer_config.json", options | {"bos_token": "<s>", "eos_token": "</s>"})
    for name, content in FILES.get(family, {}).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_json(path, known | content if known else content)
    if family == "sentence-transformers":
        layer = {"linear.weight": torch.full((6, 8), 0.5), "linear.bias": torch.zeros(6)}
        save_file(layer, folder / "2_Dense" / "model.safetensors")
    return folder


def _write_weights(family: str, folder: Path, changes: dict[str, Any]) -> None:
    name, options = CHECKPOINTS[family]
    config = getattr(transformers, name).config_class(**{**options, **changes}, architectures=[name])
    random_model(config, name, scale=0.02).save_pretrained(folder)


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
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for keys in ((), *_paths(document)):
            for value in SIZES:
                yield Change(path.relative_to(folder).as_posix(), keys, value)


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

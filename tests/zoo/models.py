"""Tiny models of Transformers in odd sizes, with random weights.

`ENCODERS`, `DECODERS` and `SEQ2SEQ` hold the models by name.
"""

import copy
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Values = dict[str, Any]

ENCODER_TASKS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")
NO_ANSWERS = tuple(task for task in ENCODER_TASKS if task != "ForQuestionAnswering")  # of families without the class
CAUSAL_TASKS = ENCODER_TASKS[:2]  # of decoder-only models that read texts
TASK_OPTIONS: dict[str, Values] = {
    "ForSequenceClassification": {"num_labels": 5},
    "ForTokenClassification": {"num_labels": 3},
}


@dataclass(frozen=True)
class Tiny:
    """A small configuration, and the classes of Transformers whose models the tests compare."""

    start: str  # of the names of the classes, such as "Bert"
    values: Values
    tasks: tuple[str, ...] = ENCODER_TASKS
    generation: Values = field(default_factory=dict)  # settings of generation_config.json
    old_keys: Values = field(default_factory=dict)  # of config.json, without effect on Transformers

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(f"{self.start}{task}" for task in self.tasks)

    @property
    def model_type(self) -> str:
        return str(self.config().model_type)

    def config(self, architecture: str = "", **options: Any) -> Any:
        """Return a configuration of Transformers for one of the classes."""
        name = architecture or self.architectures[0]
        task_options = TASK_OPTIONS.get(name.removeprefix(self.start), {})
        # Transformers changes nested values that it is given.
        values = copy.deepcopy({**self.values, **task_options, **options})
        return getattr(transformers, name).config_class(**values, architectures=[name])

    def make(self, architecture: str = "", scale: float = 0.3, **options: Any) -> Any:
        """Return a random model of one of the classes, by default the first."""
        model = random_model(self.config(architecture, **options), architecture or self.architectures[0], scale)
        for key, value in self.generation.items():
            setattr(model.generation_config, key, value)
        return model

    def save(self, folder: Path, architecture: str = "", scale: float = 0.3, **options: Any) -> Any:
        """Save a random model as `save_pretrained` does, and return it."""
        model = self.make(architecture, scale, **options)
        model.save_pretrained(folder)
        edit_config(folder, **self.old_keys)
        return model


@torch.no_grad()
def random_model(config: Any, architecture: str = "", scale: float = 0.3, seed: int = 0) -> Any:
    """Return a model with random parameters, biases and norms included.

    Models of the same shapes have the same weights. By default, values in a small model are of
    order 1.

    Args:
        config: configuration of Transformers.
        architecture: name of the class, by default the one that generates text.
        scale: standard deviation of the parameters.
        seed: seed of the weights.
    """
    cls = getattr(transformers, architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls._from_config(config, attn_implementation="eager").eval()
        if config.model_type in ("t5", "mt5") and not config.tie_word_embeddings and hasattr(model, "lm_head"):
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        is_gemma = config.model_type.startswith("gemma")  # it normalizes with 1 + weight
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            if "embed_positions" not in name or config.model_type not in ("marian", "pegasus"):  # sinusoids
                parameter.normal_(1.0 if is_norm and not is_gemma else 0.0, scale)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_()
    return model


def edit_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change keys of config.json, where None removes a key, and return its content."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    values = {key: value for key, value in values.items() if key not in changes or value is not None}
    path.write_text(json.dumps(values), encoding="utf-8")
    return values


BERT_LIKE: Values = {
    "vocab_size": 211, "hidden_size": 30, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 37,
    "max_position_embeddings": 23,
}  # fmt: skip
# Heads of an even size, as rotary embedding needs.
ROTARY = BERT_LIKE | {"num_hidden_layers": 2, "pad_token_id": 0}
# Without positions in the embeddings, as published models are.
DEBERTA = BERT_LIKE | {"relative_attention": True, "position_biased_input": False}
MODERNBERT = BERT_LIKE | {"num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0}
THETA_7: Values = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
ENCODERS: dict[str, Tiny] = {
    "bert": Tiny("Bert", BERT_LIKE, (*ENCODER_TASKS, "ForPreTraining")),
    "bert with one head": Tiny("Bert", BERT_LIKE | {"num_attention_heads": 1, "num_hidden_layers": 1}),
    "bert with many heads": Tiny("Bert", BERT_LIKE | {"num_attention_heads": 15, "num_hidden_layers": 4}),
    "roberta": Tiny("Roberta", BERT_LIKE | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": Tiny("XLMRoberta", BERT_LIKE | {"pad_token_id": 3}),
    "camembert": Tiny("Camembert", BERT_LIKE | {"type_vocab_size": 1, "pad_token_id": 1}),
    "electra": Tiny("Electra", BERT_LIKE | {"embedding_size": 14}, (*ENCODER_TASKS, "ForPreTraining")),
    "electra without projection": Tiny("Electra", BERT_LIKE | {"embedding_size": 30}),
    "mpnet": Tiny("MPNet", BERT_LIKE | {"max_position_embeddings": 152}),
    "distilbert": Tiny(
        "DistilBert",
        {"vocab_size": 211, "dim": 30, "n_heads": 3, "n_layers": 3, "hidden_dim": 37, "max_position_embeddings": 23},
    ),
    "albert": Tiny("Albert", BERT_LIKE | {"embedding_size": 14}, (*ENCODER_TASKS, "ForPreTraining")),
    "albert with groups": Tiny(
        "Albert",
        BERT_LIKE | {"embedding_size": 14, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "modernbert": Tiny("ModernBert", MODERNBERT),
    "modernbert with biases": Tiny(
        "ModernBert",
        MODERNBERT
        | {"num_hidden_layers": 3, "attention_bias": True, "classifier_bias": True, "classifier_pooling": "mean"}
        | {"hidden_activation": "gelu_pytorch_tanh", "local_attention": 7, "mlp_bias": True, "norm_bias": True},
    ),
    "deberta-v2": Tiny(
        "DebertaV2",
        DEBERTA
        | {"position_buckets": 6, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    ),
    "deberta-v2 with own projections": Tiny(
        "DebertaV2",
        DEBERTA
        | {"attention_head_size": 10, "conv_act": "gelu", "conv_kernel_size": 5, "max_relative_positions": 9}
        | {"pooler_hidden_act": "tanh", "pos_att_type": "c2p|p2c", "position_biased_input": True, "type_vocab_size": 2},
    ),
    "deberta-v2 with scores of keys": Tiny(
        "DebertaV2",
        DEBERTA | {"conv_kernel_size": 3, "max_relative_positions": 19, "pos_att_type": ["p2c"], "position_buckets": 8},
    ),
    "deberta-v2 with scores of queries": Tiny("DebertaV2", DEBERTA | {"pos_att_type": ["c2p"], "position_buckets": 15}),
    "deberta-v2 without distances": Tiny("DebertaV2", BERT_LIKE),
    "nomic_bert": Tiny("NomicBert", ROTARY, NO_ANSWERS),
    "nomic_bert with one type": Tiny(
        "NomicBert", ROTARY | {"type_vocab_size": 1, "num_attention_heads": 5}, NO_ANSWERS
    ),
    "jina_embeddings_v3": Tiny("JinaEmbeddingsV3", ROTARY | THETA_7 | {"num_attention_heads": 5}),
    "jina_embeddings_v3 with two types": Tiny(
        "JinaEmbeddingsV3", ROTARY | {"type_vocab_size": 2, "hidden_act": "relu"}
    ),
    "gte": Tiny("Gte", ROTARY, NO_ANSWERS),
    "gte without types": Tiny(
        "Gte", ROTARY | {"type_vocab_size": 0, "num_attention_heads": 5, "hidden_act": "relu"}, NO_ANSWERS
    ),
    "gte with two types": Tiny("Gte", ROTARY | {"type_vocab_size": 2} | THETA_7, NO_ANSWERS),
}

POSITIONS = 40
LLAMA_LIKE: Values = {
    "vocab_size": 211, "max_position_embeddings": POSITIONS, "hidden_size": 60, "intermediate_size": 71,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "eos_token_id": [7, 9],
    "bos_token_id": 5, "pad_token_id": None,
}  # fmt: skip
GPT2_LIKE: Values = {
    "vocab_size": 211, "n_positions": POSITIONS, "n_embd": 60, "n_head": 5, "n_layer": 3, "n_inner": 71,
    "bos_token_id": 5, "eos_token_id": 7,
}  # fmt: skip
NEOX_LIKE = {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"}
# The layout of OPT names sizes differently.
OPT_LIKE = {key: value for key, value in NEOX_LIKE.items() if key != "intermediate_size"}
OPT_LIKE |= {"ffn_dim": 71, "word_embed_proj_dim": 60}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.4, 2.0, 3.5],
    "long_factor": [2.0, 3.0, 4.0, 8.0, 9.0],
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0}


def heads(queries: int, keys: int = 0, layers: int = 3) -> Values:
    """Return other numbers of heads and layers than those of `LLAMA_LIKE`."""
    return {"num_attention_heads": queries, "num_key_value_heads": keys or queries, "num_hidden_layers": layers}


def decoder(start: str, *values: Values, **options: Any) -> Tiny:
    """Return a model in the layout of Llama, with values that later ones replace."""
    merged = {key: value for some in (LLAMA_LIKE, *values, options) for key, value in some.items()}
    return Tiny(start, merged, ("ForCausalLM",))


DECODERS: dict[str, Tiny] = {
    "gpt2": Tiny("GPT2", GPT2_LIKE, ("LMHeadModel",)),
    "gpt2-untied": Tiny(
        "GPT2",
        GPT2_LIKE
        | {"n_layer": 1, "n_head": 4, "n_inner": None, "activation_function": "relu", "tie_word_embeddings": False},
        ("LMHeadModel",),
    ),
    "gpt2-scales": Tiny(
        "GPT2",
        GPT2_LIKE | {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
        ("LMHeadModel",),
    ),
    "llama": decoder("Llama", head_dim=12),
    "llama-biases": decoder(
        "Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 16},
    ),
    "llama-one-layer": decoder("Llama", heads(1, layers=1), head_dim=26, rope_parameters=LINEAR),
    "llama-yarn": decoder("Llama", rope_parameters={**YARN, "rope_theta": 10000.0}),
    "llama-dynamic": decoder(
        "Llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, hidden_act="mish"
    ),
    "mistral": decoder("Mistral", head_dim=14, sliding_window=5),
    "mistral-no-window": decoder("Mistral", sliding_window=None),
    "qwen2": decoder(
        "Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen2-one-layer": decoder("Qwen2", heads(5, layers=1)),
    "qwen3": decoder("Qwen3", heads(3, 1), head_dim=24),
    "qwen3-windows": decoder(
        "Qwen3", head_dim=20, attention_bias=True, use_sliding_window=True, sliding_window=1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={**YARN, "rope_theta": 1000.0, "attention_factor": 0.8, "truncate": False},
    ),
    "gemma": decoder("Gemma", num_key_value_heads=1, head_dim=14),
    "gemma-biases": decoder("Gemma", heads(4, layers=1), head_dim=22, attention_bias=True, tie_word_embeddings=False),
    "gemma2": decoder(
        "Gemma2", head_dim=12, query_pre_attn_scalar=30, sliding_window=5, attn_logit_softcapping=2.5,
        final_logit_softcapping=4.0,
    ),
    "gemma2-biases": decoder(
        "Gemma2", heads(3, layers=2), head_dim=26, attention_bias=True, hidden_activation="silu",
        layer_types=["full_attention", "sliding_attention"], sliding_window=1, attn_logit_softcapping=None,
        final_logit_softcapping=None, tie_word_embeddings=False, rope_parameters=LINEAR,
    ),
    "gemma3": decoder(
        "Gemma3", head_dim=18, query_pre_attn_scalar=11, sliding_window=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gemma3-softcap": decoder(
        "Gemma3", heads(2, 1, layers=7), head_dim=16, sliding_window=6, attention_bias=True,
        final_logit_softcapping=3.0,
    ),
    "phi3": decoder("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=POSITIONS, sliding_window=9),
    # Positions were extended from 40, so that cosines and sines have a factor.
    "phi3-partial": decoder(
        "Phi3", heads(3, 1, layers=2), max_position_embeddings=5 * POSITIONS,
        original_max_position_embeddings=POSITIONS, rope_parameters=LONGROPE | {"partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
    ),
    "phi3-small": decoder("Phi3", heads(5), hidden_act="relu2"),
    "olmo2": decoder("Olmo2"),
    "olmo2-bias": decoder("Olmo2", heads(3), attention_bias=True, tie_word_embeddings=True),
    "olmo2-one-key": decoder("Olmo2", num_hidden_layers=1, num_key_value_heads=1, rms_norm_eps=0.01),
    "granite": decoder(
        "Granite", embedding_multiplier=3.0, attention_multiplier=0.21, residual_multiplier=0.37, logits_scaling=2.5
    ),
    "granite-biases": decoder(
        "Granite", heads(3), attention_bias=True, mlp_bias=True, tie_word_embeddings=True, logits_scaling=0.5
    ),
    "granite-one-layer": decoder(
        "Granite", num_hidden_layers=1, num_key_value_heads=3, residual_multiplier=2.0, attention_multiplier=0.5
    ),
    "smollm3": decoder(
        "SmolLM3", num_hidden_layers=5, use_sliding_window=True, sliding_window=6, attention_bias=True
    ),
    "smollm3-one-key": decoder(
        "SmolLM3", num_hidden_layers=2, num_key_value_heads=1, no_rope_layers=[0, 1], tie_word_embeddings=False
    ),
}  # fmt: skip
DECODERS |= {
    name: Tiny(start, values, ("ForCausalLM",))
    for name, start, values in (
        (
            "gpt-neox",
            "GPTNeoX",
            NEOX_LIKE
            | {"num_attention_heads": 3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.3}},
        ),
        (
            "gpt-neox-sequential",
            "GPTNeoX",
            NEOX_LIKE
            | {"num_hidden_layers": 2, "use_parallel_residual": False, "hidden_act": "gelu_python"}
            | {"tie_word_embeddings": True},
        ),
        (
            "gpt-neox-no-bias",
            "GPTNeoX",
            NEOX_LIKE
            | {"num_attention_heads": 5, "attention_bias": False, "hidden_act": "gelu_fast"}
            | {"rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}},
        ),
        ("opt", "OPT", OPT_LIKE),
        (
            "opt-post-norm",
            "OPT",
            OPT_LIKE
            | {"num_attention_heads": 4, "num_hidden_layers": 2, "word_embed_proj_dim": 34}
            | {"do_layer_norm_before": False, "activation_function": "gelu", "tie_word_embeddings": False},
        ),
        (
            "opt-no-bias",
            "OPT",
            OPT_LIKE | {"num_attention_heads": 3, "enable_bias": False, "_remove_final_layer_norm": True},
        ),
    )
}
# Gemma 3 that sees later tokens, as EmbeddingGemma does.
EMBEDDING_GEMMA = LLAMA_LIKE | {
    "head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 9, "sliding_window": 4, "use_bidirectional_attention": True, "pad_token_id": 13,
}  # fmt: skip
ENCODERS |= {
    "gemma3 as encoder": Tiny("Gemma3Text", EMBEDDING_GEMMA | {"use_bidirectional_attention": False}, CAUSAL_TASKS),
    "embeddinggemma": Tiny("Gemma3Text", EMBEDDING_GEMMA, CAUSAL_TASKS),
    "embeddinggemma with an odd window": Tiny(
        "Gemma3Text",
        EMBEDDING_GEMMA
        | {"num_attention_heads": 2, "head_dim": 22, "sliding_window": 7, "attention_bias": True}
        | {"rope_parameters": {"full_attention": LINEAR}},
        CAUSAL_TASKS,
    ),
}
# One of each family. Labels are those of the last token that is no padding.
ENCODERS |= {
    f"{name} as encoder": replace(DECODERS[name], values=DECODERS[name].values | padding, tasks=tasks)
    for padding, tasks, names in (
        ({"pad_token_id": None}, CAUSAL_TASKS, ("llama-biases", "gpt2")),
        ({"pad_token_id": 13}, CAUSAL_TASKS[:1], ("granite",)),
        (
            {"pad_token_id": 13},
            CAUSAL_TASKS,
            ("mistral", "qwen2", "qwen3-windows", "smollm3", "gemma", "gemma2", "phi3-partial", "olmo2", "gpt-neox",
             "opt-post-norm"),
        ),
    )
    for name in names
}  # fmt: skip

# Odd sizes: one layer, other numbers of heads and layers in the decoder, and head sizes that are
# not multiples of 8.
BART_LIKE: Values = {
    "d_model": 36, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 23, "decoder_ffn_dim": 29, "vocab_size": 97,
    "max_position_embeddings": 24, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
MARIAN_LIKE = BART_LIKE | {"pad_token_id": 96, "decoder_start_token_id": 96, "eos_token_id": 0}
# Heads times their size is not the width, and longest inputs exceed the largest distance.
T5_LIKE: Values = {
    "d_model": 36, "d_kv": 10, "num_heads": 3, "d_ff": 23, "num_layers": 1, "num_decoder_layers": 2,
    "vocab_size": 97, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0, "n_positions": 24,
}  # fmt: skip
OLD_KEYS = {"add_bias_logits": False, "num_hidden_layers": 1, "classif_dropout": 0.0, "_num_labels": 3, "id2label": {}}
BEAMS = {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True, "max_length": 12}
GENERATES = ("ForConditionalGeneration",)
CLASSIFIES = ("ForSequenceClassification",)
NLI = {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}}
SEQ2SEQ: dict[str, Tiny] = {
    "marian": Tiny(
        "Marian",
        MARIAN_LIKE | {"scale_embedding": True, "activation_function": "swish"},
        ("MTModel",),
        {"bad_words_ids": [[96]], "num_beams": 4, "max_length": 12, "forced_eos_token_id": 0, "pad_token_id": 96},
        OLD_KEYS | {"static_position_embeddings": True, "normalize_before": False, "normalize_embedding": False},
    ),
    "marian with two vocabularies": Tiny(
        "Marian",
        MARIAN_LIKE
        | {"decoder_vocab_size": 83, "share_encoder_decoder_embeddings": False, "activation_function": "relu"}
        | {"pad_token_id": 82, "decoder_start_token_id": 82},
        ("MTModel",),
        {"suppress_tokens": [82, 5], "max_length": 10},
    ),
    "bart": Tiny(
        "Bart",
        BART_LIKE,
        GENERATES,
        BEAMS | {"forced_bos_token_id": 0, "forced_eos_token_id": 2, "no_repeat_ngram_size": 2, "min_length": 6},
        OLD_KEYS | {"add_final_layer_norm": False, "normalize_embedding": True, "static_position_embeddings": False},
    ),
    "bart without its head": Tiny("Bart", BART_LIKE | {"encoder_layers": 2}, ("Model",), old_keys={"max_length": 9}),
    "bart with many heads": Tiny(
        "Bart",
        BART_LIKE | {"encoder_attention_heads": 12, "decoder_attention_heads": 1, "decoder_layers": 1},
        GENERATES,
    ),
    "mbart": Tiny(
        "MBart",
        BART_LIKE | {"scale_embedding": True},
        GENERATES,
        BEAMS | {"forced_bos_token_id": 61, "early_stopping": "never"},
        OLD_KEYS | {"normalize_before": True, "add_final_layer_norm": True},
    ),
    "m2m100": Tiny("M2M100", BART_LIKE, GENERATES, BEAMS | {"forced_bos_token_id": 71}),
    "pegasus": Tiny(
        "Pegasus",
        BART_LIKE | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "scale_embedding": True},
        GENERATES,
        {"num_beams": 8, "length_penalty": 0.8, "max_length": 9, "forced_eos_token_id": 1},
        {"extra_pos_embeddings": 1, "static_position_embeddings": True},
    ),
    # The second tokens would follow the first ones.
    "t5": Tiny(
        "T5", T5_LIKE, GENERATES, {"max_length": 12, "bad_words_ids": [[67, 67], [46, 2]]}, {"output_past": True}
    ),
    "flan-t5": Tiny(
        "T5",
        T5_LIKE | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        GENERATES,
        {"max_length": 12, "num_beams": 2, "repetition_penalty": 1.3},
    ),
    "mt5": Tiny("MT5", T5_LIKE | {"num_layers": 2}, GENERATES, {"max_length": 12, "min_length": 11}),
    "t5 as encoder": Tiny("T5", T5_LIKE | {"num_layers": 3, "num_heads": 5}, ("EncoderModel",)),
    "mt5 as encoder": Tiny("MT5", T5_LIKE | {"num_layers": 3, "num_heads": 5}, ("EncoderModel",)),
    # The decoder of these reads the text, too.
    "bart as classifier": Tiny("Bart", BART_LIKE | NLI, CLASSIFIES),
    "bart as scaled classifier": Tiny(
        "Bart", BART_LIKE | {"scale_embedding": True, "activation_function": "relu", "num_labels": 4}, CLASSIFIES
    ),
    "bart as scorer": Tiny(
        "Bart",
        BART_LIKE | {"num_labels": 1, "decoder_start_token_id": 7, "decoder_attention_heads": 2, "decoder_layers": 1},
        CLASSIFIES,
    ),
}
MODELS = ENCODERS | DECODERS | SEQ2SEQ

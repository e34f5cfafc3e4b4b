"""Randomly initialised encoders of Hugging Face in small, odd shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from sightline.base.bundle import LABEL_OUTPUTS
from sightline.export.check.reference_encoder import Reference
from sightline.export.families import predictions
from sightline.export.families.description import Description
from sightline.export.families.table import describe, find_family
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.encoder import encoder_graph
from sightline.export.graphs.predict import predict_graph
from sightline.export.sources.checkpoint import Tensors, open_folder
from sightline.model.rounding import reference

UNIT_ROUNDOFF_RATIO = 2.0**-29  # of float64 and float32
CLS, SEP = 101, 102
SMALL = {"vocab_size": 211, "hidden_size": 30, "num_attention_heads": 3, "num_hidden_layers": 3}
BERT_LIKE = SMALL | {"intermediate_size": 37, "max_position_embeddings": 23}
# Adds special tokens and token types as BERT does.
TOKENIZER = {"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", SEP], "cls": ["[CLS]", CLS]}}


@dataclass(frozen=True)
class Case:
    """One shape of a family."""

    family: str  # start of the names of its classes, such as "Bert"
    config: Mapping[str, Any] = field(default_factory=lambda: BERT_LIKE)
    longest: int = 23
    is_causal: bool = False  # a decoder-only model, with an attention softmax that is always float32

    @property
    def tasks(self) -> list[str]:
        tasks = ["Model", "ForSequenceClassification"] if self.is_causal else list(TASKS)
        return [task for task in tasks if hasattr(transformers, f"{self.family}{task}")]  # Granite has one

    def make_config(self, **options: Any) -> Any:
        return getattr(transformers, f"{self.family}Config")(**{**self.config, **options})


CAUSAL = SMALL | {
    "hidden_size": 36,
    "intermediate_size": 37,
    "max_position_embeddings": 23,
    "num_key_value_heads": 1,
    "pad_token_id": 13,
}
EMBEDDING_GEMMA = CAUSAL | {
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 9,
    "sliding_window": 4,
    "use_bidirectional_attention": True,
}
FAMILIES = {
    "bert": Case("Bert"),
    "roberta": Case("Roberta", BERT_LIKE | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, 21),
    "xlm-roberta": Case("XLMRoberta", BERT_LIKE | {"pad_token_id": 3}, 19),
    "camembert": Case("Camembert", BERT_LIKE | {"type_vocab_size": 1, "pad_token_id": 1}, 21),
    "electra": Case("Electra", BERT_LIKE | {"embedding_size": 14}),
    "electra without projection": Case("Electra", BERT_LIKE | {"embedding_size": 30}),
    "mpnet": Case("MPNet", BERT_LIKE | {"max_position_embeddings": 152}, 150),
    "distilbert": Case(
        "DistilBert",
        {"vocab_size": 211, "dim": 30, "n_heads": 3, "n_layers": 3, "hidden_dim": 37, "max_position_embeddings": 23},
    ),
    "albert": Case("Albert", BERT_LIKE | {"embedding_size": 14}),
    "albert with groups": Case(
        "Albert",
        BERT_LIKE | {"embedding_size": 14, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "modernbert": Case("ModernBert", BERT_LIKE | {"num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0}),
    "modernbert with biases": Case(
        "ModernBert",
        BERT_LIKE
        | {
            "attention_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "hidden_activation": "gelu_pytorch_tanh",
            "local_attention": 7,
            "mlp_bias": True,
            "norm_bias": True,
            "pad_token_id": 0,
        },
    ),
    "llama": Case("Llama", CAUSAL | {"attention_bias": True, "pad_token_id": None}, is_causal=True),
    "mistral": Case("Mistral", CAUSAL | {"sliding_window": 4, "head_dim": 10}, is_causal=True),
    "qwen2": Case(
        "Qwen2",
        CAUSAL | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
        is_causal=True,
    ),
    "qwen3": Case(
        "Qwen3", CAUSAL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14}, is_causal=True
    ),
    "qwen3 with windows": Case(
        "Qwen3",
        CAUSAL
        | {
            "attention_bias": True,
            "head_dim": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 3,
            "use_sliding_window": True,
        },
        is_causal=True,
    ),
    "smollm3": Case("SmolLM3", CAUSAL | {"no_rope_layers": [1, 0, 1]}, is_causal=True),
    "gemma": Case("Gemma", CAUSAL | {"head_dim": 14}, is_causal=True),
    "gemma2": Case(
        "Gemma2",
        CAUSAL | {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 4, "attn_logit_softcapping": 2.0},
        is_causal=True,
    ),
    "embeddinggemma": Case("Gemma3Text", EMBEDDING_GEMMA, is_causal=True),
    "embeddinggemma with an odd window": Case(
        "Gemma3Text",
        EMBEDDING_GEMMA
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 22,
            "sliding_window": 7,
            "attention_bias": True,
        }
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0}}},
        is_causal=True,
    ),
    "gemma3": Case("Gemma3Text", EMBEDDING_GEMMA | {"use_bidirectional_attention": False}, is_causal=True),
    "phi3": Case(
        "Phi3",
        CAUSAL
        | {"num_attention_heads": 2, "original_max_position_embeddings": 23, "max_position_embeddings": 64}
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.34,
                "short_factor": [1.0, 1.3, 2.0],
                "long_factor": [2.0, 3.0, 4.0],
            }
        },
        is_causal=True,
    ),
    "olmo2": Case("Olmo2", CAUSAL, is_causal=True),
    "granite": Case(
        "Granite",
        CAUSAL | {"embedding_multiplier": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
        is_causal=True,
    ),
    "gpt-neox": Case(
        "GPTNeoX",
        {key: value for key, value in CAUSAL.items() if key != "num_key_value_heads"} | {"num_attention_heads": 2},
        is_causal=True,
    ),
    "opt": Case(
        "OPT",
        SMALL
        | {"ffn_dim": 37, "max_position_embeddings": 23, "word_embed_proj_dim": 14, "do_layer_norm_before": False}
        | {"pad_token_id": 13},
        is_causal=True,
    ),
    "gpt2": Case(
        "GPT2", {"vocab_size": 211, "n_positions": 23, "n_embd": 30, "n_head": 3, "n_layer": 3}, is_causal=True
    ),
}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "Model": {},
    "ForSequenceClassification": {"num_labels": 5},
    "ForTokenClassification": {"num_labels": 3},
    "ForQuestionAnswering": {},
    "ForMaskedLM": {},
}
# Without positions in the embeddings, as published models are.
DEBERTA = BERT_LIKE | {"relative_attention": True, "position_biased_input": False}
FAMILIES |= {
    "deberta-v2": Case(
        "DebertaV2",
        DEBERTA
        | {"position_buckets": 6, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    ),
    "deberta-v2 with own projections": Case(
        "DebertaV2",
        DEBERTA
        | {
            "attention_head_size": 10,
            "conv_act": "gelu",
            "conv_kernel_size": 5,
            "max_relative_positions": 9,
            "pooler_hidden_act": "tanh",
            "pos_att_type": "c2p|p2c",
            "position_biased_input": True,
            "type_vocab_size": 2,
        },
    ),
    "deberta-v2 with scores of keys": Case(
        "DebertaV2",
        DEBERTA | {"conv_kernel_size": 3, "max_relative_positions": 19, "pos_att_type": ["p2c"], "position_buckets": 8},
    ),
    "deberta-v2 with scores of queries": Case("DebertaV2", DEBERTA | {"pos_att_type": ["c2p"], "position_buckets": 15}),
    "deberta-v2 without distances": Case("DebertaV2", BERT_LIKE),
}
# Heads of an even size, as rotary embedding needs.
ROTARY = BERT_LIKE | {"num_hidden_layers": 2, "pad_token_id": 0}
FAMILIES |= {
    "nomic_bert": Case("NomicBert", ROTARY),
    "nomic_bert with one type": Case("NomicBert", ROTARY | {"type_vocab_size": 1, "num_attention_heads": 5}),
    "nomic_bert with another base": Case(
        "NomicBert",
        ROTARY
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "hidden_act": "gelu"}
        | {"num_hidden_layers": 1, "intermediate_size": 53},
    ),
    "jina_embeddings_v3": Case("JinaEmbeddingsV3", ROTARY),
    "jina_embeddings_v3 with another base": Case(
        "JinaEmbeddingsV3",
        ROTARY | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "num_attention_heads": 5},
    ),
    "jina_embeddings_v3 with two types": Case(
        "JinaEmbeddingsV3", ROTARY | {"type_vocab_size": 2, "hidden_act": "relu"}
    ),
    "gte": Case("Gte", ROTARY),
    "gte without types": Case("Gte", ROTARY | {"type_vocab_size": 0, "num_attention_heads": 5, "hidden_act": "relu"}),
    "gte with two types": Case(
        "Gte",
        ROTARY | {"type_vocab_size": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
    ),
}
# Further shapes of families that have fewer than three above.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "with one layer": {"vocab_size": 150, "hidden_size": 26, "num_attention_heads": 1, "num_hidden_layers": 1},
    "with many heads": {"vocab_size": 230, "hidden_size": 48, "num_attention_heads": 12, "num_hidden_layers": 4},
}
DISTILBERT_KEYS = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}


def with_sizes(case: Case, sizes: Mapping[str, Any]) -> Case:
    keys = DISTILBERT_KEYS if case.family == "DistilBert" else {}
    return replace(case, config={**case.config, **{keys.get(key, key): size for key, size in sizes.items()}})


SHAPES = {
    f"{name} {title}": with_sizes(FAMILIES[name], sizes)
    for name in (
        "bert", "roberta", "xlm-roberta", "camembert", "electra", "mpnet", "distilbert", "albert", "modernbert",
        "deberta-v2",
    )
    for title, sizes in SIZES.items()
}  # fmt: skip


@torch.no_grad()
def make_model(case: Case, task: str, scale: float = 0.3, **options: Any) -> Any:
    """Return a model with random weights; by default its values are of order 1 if it is small."""
    config = case.make_config(**{**TASKS.get(task, {}), **options})
    config.architectures = [f"{case.family}{task}"]
    torch.manual_seed(0)
    model = getattr(transformers, f"{case.family}{task}")._from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        has_offset = case.family.startswith("Gemma")  # it normalizes with 1 + weight
        centre = 1.0 if "norm" in name.lower() and name.endswith("weight") and not has_offset else 0.0
        parameter.copy_(centre + scale * torch.randn_like(parameter))
    return model


@dataclass(frozen=True)
class Imported:
    """A checkpoint as a graph and as NumPy."""

    model: Description
    session: ort.InferenceSession
    reference: Reference
    weights_bytes: int
    prediction: ort.InferenceSession | None  # of tokens

    def run(self, rows: list[list[int]]) -> dict[str, NDArray[Any]]:
        """Run rows as one batch with an even number of columns, up to the limit of the model."""
        longest = max(map(len, rows))
        columns = min(longest + longest % 2, self.model.max_positions)
        ids = np.full((len(rows), columns), 7, np.int64)  # any token, because padding has no effect
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
        lengths = np.array([len(tokens) for tokens in rows], np.int32)
        names = [output.name for output in self.session.get_outputs()]
        results = self.session.run(names, {"source_ids": ids, "source_lengths": lengths})
        return dict(zip(names, results, strict=True))

    def row(self, results: Mapping[str, NDArray[Any]], row: int, length: int) -> dict[str, NDArray[Any]]:
        """Return the hidden states, attention maps and labels of one row without padding."""
        maps = [results[f"encoder_attention.{layer}"][row, :, :length, :length] for layer in range(self.num_layers)]
        found = {"hidden": results["hidden"][row, :length], "maps": np.stack(maps)}
        if self.model.head is not None:
            labels = results[LABEL_OUTPUTS[self.model.head.label_kind]][row]
            part = "spans" if self.model.head.label_kind == "span" else "labels"
            found[part] = labels[:length] if self.model.head.pooling == "tokens" else labels
        if self.prediction is not None:
            (found["predictions"],) = self.prediction.run(None, {"hidden": found["hidden"]})
        return found

    @property
    def num_layers(self) -> int:
        return self.model.encoder_stack.layers


def import_folder(
    folder: Path,
    out: Path,
    tokenizer: Mapping[str, Any] = TOKENIZER,
    max_tokens: int | None = None,
    answers: tuple[int, int | None] | None = None,
) -> Imported:
    """Import a folder as a graph, and check that all its keys and tensors are known."""
    with open_folder(folder) as checkpoint:
        family = find_family(checkpoint.config)
        stored = checkpoint.tensors
        # The reference reads weights after the folder is closed. Numbers of positions are integers,
        # which no graph reads.
        tensors = Tensors.of_arrays(
            {name: np.zeros(0, np.float32) if name.endswith("_ids") else stored.read(name) for name in stored.names}
        )
        model, weights = describe(family, checkpoint.config, tensors, tokenizer, max_tokens=max_tokens, answers=answers)
        checkpoint.config.check_all_read()
    with WeightFile(out / "weights.bin") as file:
        graph = encoder_graph(model, weights, file)
        prediction = predict_graph(model, weights, file)
    tensors.check_all_read()
    onnx.save_model(graph, out / "encoder.onnx")
    options = ort.SessionOptions()
    options.enable_mem_pattern = False
    options.log_severity_level = 3  # it warns that attention maps are larger than it inferred
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    sessions = [ort.InferenceSession(out / "encoder.onnx", options, ["CPUExecutionProvider"])]
    if prediction is not None:
        onnx.save_model(prediction, out / "predict.onnx")
        sessions.append(ort.InferenceSession(out / "predict.onnx", options, ["CPUExecutionProvider"]))
    size = (out / "weights.bin").stat().st_size
    return Imported(model, sessions[0], Reference(model, weights), size, sessions[1] if prediction else None)


def token_types(ids: list[int]) -> list[int]:
    """Return the token types of BERT: 1 after the first separator."""
    first = ids.index(SEP) if SEP in ids else len(ids)
    return [int(index > first) for index in range(len(ids))]


@torch.no_grad()
def compute(model: Any, ids: list[int], num_types: int) -> dict[str, NDArray[Any]]:
    """Return what transformers computes for one sequence; labels as logits."""
    options = {"token_type_ids": torch.tensor([token_types(ids)])} if num_types == 2 else {}
    encoded: list[Any] = []
    hook = model.base_model.register_forward_hook(lambda module, inputs, output: encoded.append(output))
    output = model(input_ids=torch.tensor([ids]), output_attentions=True, **options)
    hook.remove()
    found = {"hidden": encoded[0].last_hidden_state[0], "maps": torch.stack(output.attentions)[:, 0]}
    if "start_logits" in output:
        found["spans"] = torch.stack([output.start_logits[0], output.end_logits[0]], dim=-1)
    elif type(model).__name__.endswith("ForMaskedLM"):
        if model.config.model_type in predictions.FAMILIES:
            found["predictions"] = output.logits[0]
    elif "logits" in output:
        found["labels"] = output.logits[0]
    return {name: array.numpy() for name, array in found.items()}


def random_rows(vocabulary: int, lengths: list[int]) -> list[list[int]]:
    """Return sequences of ordinary tokens; all with at least four are text pairs."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(110, vocabulary, length).tolist() for length in lengths]
    for row in rows:
        row[0] = CLS
        if len(row) >= 4:
            row[len(row) // 2], row[-1] = SEP, SEP
    return rows


def check_rows(
    imported: Imported,
    model: Any,
    rows: list[list[int]],
    compute: Callable[[Any, list[int]], dict[str, NDArray[Any]]],
    twin_share: float,
) -> None:
    """Compare graph and NumPy with a model, and each row of a batch with the row alone.

    Args:
        imported: graph and NumPy reference.
        model: model in PyTorch.
        rows: token ids.
        compute: runs the model over one row; returns arrays by the names of the reference.
        twin_share: share of the limit of rounding that the reference may differ by.
    """
    batch, models = imported.run(rows), reference(model, pairs=1)
    for index, ids in enumerate(rows):

        def run(model: Any, ids: list[int] = ids) -> dict[str, NDArray[Any]]:
            return compute(model, ids)

        expected, limits = models.limits(run)
        given, twin = imported.row(batch, index, len(ids)), imported.reference.encode(ids)
        for part, array in expected.items():
            assert limits[part] < 1e-4
            assert_allclose(given[part], array, rtol=0, atol=limits[part], err_msg=part)
            assert_allclose(getattr(twin, part), array, rtol=0, atol=limits[part] * twin_share, err_msg=part)
        alone = imported.row(imported.run([ids]), 0, len(ids))
        for part, array in given.items():
            assert_array_equal(alone[part], array, err_msg=f"{part} of {len(ids)} tokens")

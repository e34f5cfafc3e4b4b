"""Checkpoints in the layout of Hugging Face: configuration, tokenizer and text files.

Supported are encoders like BERT, which are trained for classification or embeddings, and decoders
like Llama, which are trained as language models. Weights are read by
`sightline.model.training.start`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.model.config import Pooling, PretrainedConfig, PretrainedTask
from sightline.model.data.tokenizer_training import read_tokenizer

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
CHAT_TEMPLATE, MODULES, SENTENCES = "chat_template.jinja", "modules.json", "sentence_bert_config.json"
# Text files that a trained model takes over.
_COPIED: Mapping[PretrainedTask, tuple[str, ...]] = {
    "classification": (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP),
    "encoder": (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, SENTENCES),
    "language-model": (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION, CHAT_TEMPLATE),
}
_POOLING_KEYS: Mapping[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}
_POOLING_MODES: Mapping[str, Pooling] = {"mean": "mean", "cls": "first", "lasttoken": "last", "max": "max"}
MAX_SIZE = 1 << 20  # as that of our own models, see `sightline.model.config_fields.Size`
MAX_LAYERS = 1000
_UNLIMITED = 10**9  # tokenizers without a limit have a larger model_max_length
_ENDS: Mapping[PretrainedTask, str] = {
    "classification": "ForSequenceClassification",
    "encoder": "Model",
    "language-model": "ForCausalLM",
}


@dataclass(frozen=True)
class TrainableFamily:
    """A family of checkpoints, by `model_type` of config.json."""

    classes: str  # start of the names of its classes
    prefix: str  # of the names of tensors in classes with a head
    kind: Literal["encoder", "decoder"] = "encoder"
    dropout: str = "hidden_dropout_prob"  # key of the probability that `PretrainedConfig.dropout` replaces
    default_dropout: float = 0.1
    skipped_positions: int | None = 0  # rows of the table that no token uses; None: the padding id and one more
    # Supported values of keys that change the outputs; a missing key is always supported.
    supported: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    has_pooler: bool = True  # its class without a head has a pooler


_COMMON: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_OF_ENCODERS = {**_COMMON, "is_decoder": (False, None), "position_embedding_type": ("absolute", None)}
_OF_DECODERS = {**_COMMON, "partial_rotary_factor": (1.0, None), "rope_interleaved": (False, None)}


def _decoder(classes: str, **supported: tuple[object, ...]) -> TrainableFamily:
    return TrainableFamily(
        classes,
        "model.",
        "decoder",
        "attention_dropout",
        0.0,
        supported={**_OF_DECODERS, **supported},
        has_pooler=False,
    )


FAMILIES: Mapping[str, TrainableFamily] = {
    "bert": TrainableFamily("Bert", "bert.", supported=_OF_ENCODERS),
    "roberta": TrainableFamily("Roberta", "roberta.", skipped_positions=None, supported=_OF_ENCODERS),
    "xlm-roberta": TrainableFamily("XLMRoberta", "roberta.", skipped_positions=None, supported=_OF_ENCODERS),
    "camembert": TrainableFamily("Camembert", "roberta.", skipped_positions=None, supported=_OF_ENCODERS),
    "distilbert": TrainableFamily(
        "DistilBert", "distilbert.", dropout="dropout", supported=_OF_ENCODERS, has_pooler=False
    ),
    "mpnet": TrainableFamily(
        "MPNet",
        "mpnet.",
        skipped_positions=2,
        supported={**_OF_ENCODERS, "relative_attention_num_buckets": (32,)},
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", layer_types=(None,)),
    "qwen2": _decoder("Qwen2", use_mrope=(False, None)),
    "qwen3": _decoder("Qwen3"),
    "smollm3": _decoder("SmolLM3"),
}
ROPE_TYPES = ("default", "linear", "llama3")
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")


def is_pretrained(folder: Path) -> bool:
    """Return True for a folder in the layout of Hugging Face."""
    try:
        return "model_type" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read_pretrained(
    folder: Path,
    task: PretrainedTask | None = None,
    labels: Sequence[str] | None = None,
    *,
    multi_label: bool | None = None,
) -> tuple[PretrainedConfig, Tokenizer]:
    """Read the configuration and the tokenizer of a checkpoint, by default for the task, labels and
    `multi_label` that it was trained for. Raises `UsageError`, which names the file.
    """
    fields = _read_object(folder / CONFIG)
    family = _find_family(folder, fields)
    names = _architectures(fields)
    task = task or _task_of(names, is_embedding=family.kind == "encoder")
    if (family.kind == "decoder") != (task == "language-model"):
        kinds = {"encoder": "an encoder", "decoder": "a decoder"}
        kind = "decoder" if task == "language-model" else "encoder"
        raise UsageError(
            f"{folder / CONFIG}: model_type {fields['model_type']} is {kinds[family.kind]}, but the task {task} needs "
            f"{kinds[kind]}; supported are {', '.join(name for name, known in FAMILIES.items() if known.kind == kind)}"
        )
    tokenizer = _read_tokenizer(folder)
    files = {name: text for name in _COPIED[task] if (text := _read_text(folder / name)) is not None}
    start, end = _text_ids(tokenizer)
    pad = fields.get("pad_token_id")
    if task == "language-model":
        bos, eos = _first_id(fields, "bos_token_id"), _first_id(fields, "eos_token_id")
        eos = end if eos is None else eos
        bos = eos if bos is None else bos
        vocab_size = _integer(folder, fields, "vocab_size")
        pad = _padding(tokenizer, vocab_size, pad, {bos, eos, *_ids(fields.get("eos_token_id"))})
    else:
        bos, eos = start, end
        pad = pad if isinstance(pad, int) else eos
    config = _build(
        folder / CONFIG,
        vocab_size=_integer(folder, fields, "vocab_size"),
        dropout=float(_value(fields, family.dropout, family.default_dropout)),
        max_positions=_positions(folder, fields, family, files, task),
        pad_id=pad,
        bos_id=bos,
        eos_id=eos,
        task=task,
        fields=fields,
        files=files,
        labels=_labels(folder, fields, labels) if task == "classification" else (),
        multi_label=task == "classification" and (_is_multi_label(fields) if multi_label is None else multi_label),
        pooling=_pooling(folder) if task == "encoder" else "mean",
        has_pooler=family.has_pooler and task == "encoder" and names == (f"{family.classes}Model",),
    )
    _check_sizes(folder / CONFIG, config)
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise UsageError(
            f"{folder / TOKENIZER} has {tokenizer.get_vocab_size()} tokens, but vocab_size in {CONFIG} is "
            f"{config.vocab_size}; the files belong to different checkpoints"
        )
    return config, tokenizer


def _build(path: Path, **fields: Any) -> PretrainedConfig:
    try:
        return PretrainedConfig(**fields)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}; download it again") from None


def _read_object(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        raise UsageError(
            f"{path} is missing; name the folder of a checkpoint in the layout of Hugging Face, with {CONFIG}, "
            f"{WEIGHTS} and {TOKENIZER}, or a run folder"
        )
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} must be a JSON object; download it again")
    return values


def _find_family(folder: Path, fields: Mapping[str, Any]) -> TrainableFamily:
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        kinds = [[key for key, known in FAMILIES.items() if known.kind == kind] for kind in ("encoder", "decoder")]
        raise UsageError(
            f"{folder / CONFIG}: model_type {name!r} cannot be trained; supported are the encoders "
            f"{', '.join(kinds[0])} for classification and encoder, and the decoders {', '.join(kinds[1])} for "
            "language-model"
        )
    family = FAMILIES[name]
    for key, values in family.supported.items():
        if key in fields and fields[key] not in values:
            raise UsageError(
                f"{folder / CONFIG}: {key} {json.dumps(fields[key])[:80]} is not supported in training; use a "
                f"checkpoint without it, or with {' or '.join(json.dumps(value) for value in values)}"
            )
    if family.kind == "decoder":
        _check_rotary(folder, _value(fields, "rope_scaling", _value(fields, "rope_parameters", {})))
    key = "activation" if name == "distilbert" else "hidden_act"
    if _value(fields, key, "gelu") not in ACTIVATIONS:
        raise UsageError(
            f"{folder / CONFIG}: {key} {fields[key]!r} is not supported in training; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return family


def _check_rotary(folder: Path, options: Any) -> None:
    kind = options.get("rope_type", options.get("type", "default")) if isinstance(options, dict) else options
    if kind not in ROPE_TYPES:
        raise UsageError(
            f"{folder / CONFIG}: the rope type {str(kind)[:40]!r} is not supported in training; supported are "
            f"{', '.join(ROPE_TYPES)}"
        )
    for key in {"linear": ("factor",), "llama3": LLAMA3_KEYS}.get(kind, ()):
        if not isinstance(options.get(key), int | float) or options[key] <= 0:
            raise UsageError(f"{folder / CONFIG}: the rope type {kind} needs a positive number {key}")


def _architectures(fields: Mapping[str, Any]) -> tuple[str, ...]:
    names = fields.get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _task_of(architectures: Sequence[str], *, is_embedding: bool) -> PretrainedTask:
    for name in architectures:
        if name.endswith(_ENDS["classification"]):
            return "classification"
    return "encoder" if is_embedding else "language-model"


def _value(fields: Mapping[str, Any], key: str, default: Any) -> Any:
    value = fields.get(key)
    return default if value is None else value


def _integer(
    folder: Path, fields: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE
) -> int:
    value = _value(fields, key, default)
    if type(value) is not int or not 1 <= value <= most:
        raise UsageError(
            f"{folder / CONFIG}: {key} must be a whole number from 1 to {most}, got {json.dumps(value)[:80]}"
        )
    return value


def _ids(value: Any) -> list[int]:
    return [id_ for id_ in (value if isinstance(value, list) else [value]) if type(id_) is int and id_ >= 0]


def _first_id(fields: Mapping[str, Any], key: str) -> int | None:
    return next(iter(_ids(fields.get(key))), None)


def _text_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of the first and the last token of each text, 0 if the tokenizer adds none."""
    around = tokenizer.encode("").ids or [0]
    return around[0], around[-1]


def _padding(tokenizer: Tokenizer, vocab_size: int, pad_id: Any, ends: set[int]) -> int:
    """Return an id for padding that no text of a language model has, if possible `pad_id`, the
    `pad_token_id` of config.json. Tokens `ends` begin or end a text; the embedding has `vocab_size`
    rows.
    """
    special = [id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    candidates = [pad_id] if type(pad_id) is int else []
    candidates += [vocab_size - 1] if vocab_size > max([*tokenizer.get_vocab().values(), *special]) + 1 else []
    for candidate in [*candidates, *sorted(special, reverse=True)]:
        if 0 <= candidate < vocab_size and candidate not in ends:
            return candidate
    raise UsageError(
        f"{TOKENIZER} of the checkpoint has no special token besides those that begin and end a text; training needs "
        "one for padding: add one, or use another checkpoint"
    )


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise UsageError(
            f"{path} is missing; write it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        return read_tokenizer(path)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _labels(folder: Path, fields: Mapping[str, Any], labels: Sequence[str] | None) -> tuple[str, ...]:
    """Return given labels, or those of the checkpoint in the order of their ids."""
    if labels is not None:
        return tuple(labels)
    names = fields.get("id2label")
    if isinstance(names, dict):
        try:
            return tuple(str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0])))
        except ValueError:
            pass
    return tuple(f"LABEL_{index}" for index in range(_integer(folder, fields, "num_labels", 2)))


def _is_multi_label(fields: Mapping[str, Any]) -> bool:
    return fields.get("problem_type") == "multi_label_classification"


def _positions(
    folder: Path, fields: Mapping[str, Any], family: TrainableFamily, files: Mapping[str, str], task: PretrainedTask
) -> int:
    """Return the number of tokens of the longest text."""
    skipped = family.skipped_positions
    if skipped is None:
        skipped = int(_value(fields, "pad_token_id", 1)) + 1
    longest = _integer(folder, fields, "max_position_embeddings", None if family.kind == "decoder" else 512) - skipped
    if family.kind == "encoder":
        # The same limits apply when the model is served.
        limits = [(TOKENIZER_CONFIG, "model_max_length")]
        if task == "encoder" and SENTENCES in files:
            limits = [(SENTENCES, "max_seq_length")]
        for name, key in limits:
            limit = _read_object(folder / name).get(key) if name in files else None
            longest = min(longest, int(limit)) if isinstance(limit, int | float) and 0 < limit < _UNLIMITED else longest
    return longest


def _pooling(folder: Path) -> Pooling:
    """Return the pooling of a folder of sentence-transformers, "mean" for another folder."""
    text = _read_text(folder / MODULES)
    if text is None:
        return "mean"
    try:
        modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in json.loads(text)]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{folder / MODULES} must be a list of objects with type and path; download it again"
        ) from None
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UsageError(
            f"{folder / MODULES}: the modules {', '.join(kinds)} cannot be trained; supported are Transformer, Pooling "
            "and, optionally, Normalize; remove the file to train the model with mean pooling"
        )
    file = folder / modules[1][1] / CONFIG
    values = _read_object(file)
    mode = values.get("pooling_mode")
    selected = [pooling for pooling, key in _POOLING_KEYS.items() if values.get(key) is True]
    if mode is not None:
        selected = [
            _POOLING_MODES[name] for name in (mode if isinstance(mode, list) else [mode]) if name in _POOLING_MODES
        ]
    others = [key for key, on in values.items() if on is True and key.startswith("pooling_mode_")]
    if len(selected) != 1 or len(others) > 1 or (mode is None and others != [_POOLING_KEYS[selected[0]]]):
        raise UsageError(
            f"{file}: the pooling {' + '.join(others) or mode or 'none'} cannot be trained; supported is one of "
            f"{', '.join(_POOLING_KEYS)}"
        )
    return selected[0]


def _check_sizes(path: Path, config: PretrainedConfig) -> None:
    """Check that all sizes are positive integers, and that the heads divide the width."""
    folder, fields = path.parent, config.fields
    is_distilbert = config.family == "distilbert"
    width_key, heads_key = ("dim", "n_heads") if is_distilbert else ("hidden_size", "num_attention_heads")
    layers_key, inner_key = ("n_layers", "hidden_dim") if is_distilbert else ("num_hidden_layers", "intermediate_size")
    _integer(folder, fields, layers_key, most=MAX_LAYERS)
    _integer(folder, fields, inner_key)
    width, heads = _integer(folder, fields, width_key), _integer(folder, fields, heads_key)
    if width % heads and "head_dim" not in fields:
        raise UsageError(f"{path}: {width_key} must be a multiple of {heads_key} ({heads}), got {width}")


def checkpoint_texts(config: PretrainedConfig) -> dict[str, str]:
    """Return the text files of a checkpoint besides the tokenizer, by their relative names.
    transformers, sentence-transformers and the export read them. Weights are stored as float32.
    """
    family = FAMILIES[config.family]
    dropped = ("torch_dtype", "_name_or_path", "num_labels", "_num_labels", "id2label", "label2id", "problem_type")
    fields = {key: value for key, value in config.fields.items() if key not in dropped}
    fields |= {
        "architectures": [f"{family.classes}{_ENDS[config.task]}"],
        "dtype": "float32",
        family.dropout: config.dropout,
    }
    if config.task == "classification":
        kind = "multi_label_classification" if config.multi_label else "single_label_classification"
        fields |= {
            "id2label": {str(index): label for index, label in enumerate(config.labels)},
            "label2id": {label: index for index, label in enumerate(config.labels)},
            "problem_type": kind,
        }
    texts = {CONFIG: _json(fields), **config.files}
    if TOKENIZER_CONFIG not in texts:
        limit = {"model_max_length": config.max_positions}
        texts[TOKENIZER_CONFIG] = _json({"tokenizer_class": "PreTrainedTokenizerFast", **limit})
    if config.task == "encoder":
        width = config.value("hidden_size", config.value("dim", 0))
        pooling = {key: name == config.pooling for name, key in _POOLING_KEYS.items()}
        texts[MODULES] = _json(
            [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for index, (path, kind) in enumerate(
                    [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
                )
            ]
        )
        texts[f"1_Pooling/{CONFIG}"] = _json({"word_embedding_dimension": width, **pooling})
        texts.setdefault(SENTENCES, _json({"max_seq_length": config.max_positions, "do_lower_case": False}))
    return texts


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def with_end_token(config: PretrainedConfig, tokenizer: Tokenizer, end_id: int) -> PretrainedConfig:
    """Return a configuration of a language model whose texts end with another token, which is added
    to those that end a generated text. Raises `UsageError` if no token is left for padding.
    """
    fields, files = dict(config.fields), dict(config.files)
    settings = json.loads(files[GENERATION]) if GENERATION in files else {}
    known = _ids(settings.get("eos_token_id", fields.get("eos_token_id")))
    if end_id not in known:
        fields["eos_token_id"] = [end_id, *known]
        if settings:
            files[GENERATION] = _json({**settings, "eos_token_id": [end_id, *known]})
    pad_id = _padding(tokenizer, config.vocab_size, config.pad_id, {config.bos_id, config.eos_id, *known, end_id})
    return replace(config, fields=fields, files=files, eos_id=end_id, pad_id=pad_id)

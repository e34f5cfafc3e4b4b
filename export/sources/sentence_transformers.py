"""Options of a sentence-transformers folder: pooling, layers after it, normalization, prompts and
the longest text.

A folder lists its modules in `modules.json`. A folder without it gets mean pooling, as
sentence-transformers does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sightline.base.bundle import Dense, SentenceEmbedding, VectorPooling
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config

ReadJson = Callable[[str], Any]  # content of a JSON file of the folder, None if there is none

_POOLING_MODES: Mapping[str, VectorPooling] = {"cls": "first", "mean": "mean", "max": "max", "lasttoken": "last"}
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The name of the file depends on the class of the model that saved it.
_TRANSFORMER_FILES = tuple(
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ACTIVATIONS: Mapping[str, Literal["identity", "tanh"]] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "identity",
}
_UNLIMITED = 10**9  # tokenizers without a limit have a larger model_max_length


@dataclass(frozen=True)
class SentenceOptions:
    """Options of a sentence-transformers folder."""

    embedding: SentenceEmbedding  # without its layers
    max_tokens: int | None  # longest text with special tokens; None: the limit of the model
    dense: tuple[tuple[str, Dense], ...] = ()  # layers after pooling, with the folders of their weights
    is_cross_encoder: bool = False  # the model scores pairs of texts, and computes no embeddings
    # Token ids of yes and no of a reranker that generates text. None in place of the second: the
    # score is the logit of the first.
    answers: tuple[int, int | None] | None = None
    has_template: bool = False  # the chat template formats pairs of texts for a CrossEncoder
    instruction: str = ""  # system message of this template
    is_sparse: bool = False  # the model was trained for sparse vectors


def read_sentence_options(read_json: ReadJson) -> SentenceOptions:
    """Read the options of a folder, whose files `read_json` reads by their relative names."""
    modules = read_json("modules.json")
    if modules is None:
        return SentenceOptions(SentenceEmbedding(pooling="mean", normalize=False), read_tokenizer_limit(read_json, ""))
    steps = _modules(modules)
    kinds = [kind for kind, _ in steps]
    if kinds in (["Transformer"], ["Transformer", "LogitScore"]):
        return _cross_encoder(read_json, steps)
    if kinds in (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"]):
        return _sparse_encoder(read_json, steps)
    normalize = kinds[-1:] == ["Normalize"]
    optional = kinds[2:-1] if normalize else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in optional):
        raise ImportFailedError(
            f"modules.json: the modules {', '.join(kinds)} are not supported; supported are Transformer, Pooling and, "
            "optionally, Dense and Normalize, in this order, those of a CrossEncoder: Transformer and, optionally, "
            "LogitScore, and those of a SparseEncoder: Transformer or MLMTransformer, and SpladePooling"
        )
    folder = steps[0][1]
    folders = [path for kind, path in steps if kind == "Dense"]
    dense = tuple((path, _dense(read_json, path, number)) for number, path in enumerate(folders))
    prompts, default = _prompts(read_json)
    # Normalization removes the length of a vector, unless a layer comes before it.
    is_scaled = normalize and not dense
    pooling = _pooling(read_json, steps[1][1], is_scaled, has_prompts=any(prompts.values()))
    embedding = SentenceEmbedding(
        pooling=pooling,
        normalize=normalize,
        prompts=prompts,
        default_prompt=default,
        matryoshka=_matryoshka(read_json(f"{folder}config.json")),
    )
    return SentenceOptions(embedding, _max_tokens(read_json, folder)[0], dense)


def _matryoshka(config: Any) -> tuple[int, ...] | None:
    """Return the lengths to which vectors can be cut; none if the model was not trained for any."""
    config = config if isinstance(config, dict) else {}
    lengths = config.get("matryoshka_dimensions")
    if isinstance(lengths, list) and lengths and all(type(length) is int and length > 0 for length in lengths):
        return tuple(lengths)
    return () if config.get("is_matryoshka") is True else None


def _cross_encoder(read_json: ReadJson, steps: Sequence[tuple[str, str]]) -> SentenceOptions:
    """Read the options of a CrossEncoder."""
    folder, answers = steps[0][1], None
    prompts, default = _prompts(read_json)
    instruction = "" if default is None else prompts[default]
    if len(steps) > 1:
        config = _module_config(read_json, steps[1][1])
        config.neutral("module_input_name", "causal_logits")
        has_no = "false_token_id" in config
        config.ignore("false_token_id")
        answers = (
            config.integer("true_token_id", least=0),
            config.integer("false_token_id", least=0) if has_no else None,
        )
        config.check_all_read()
    task, output = ("sequence-classification", "scores") if answers is None else ("text-generation", "causal_logits")
    max_tokens, has_template = _max_tokens(read_json, folder, task, output)
    if any(prompts.values()) and not has_template:
        raise ImportFailedError(
            "config_sentence_transformers.json: prompts of a CrossEncoder are supported only if a chat template "
            "formats its pairs of texts"
        )
    return SentenceOptions(
        SentenceEmbedding(pooling="mean", normalize=False),
        max_tokens,
        is_cross_encoder=True,
        answers=answers,
        has_template=has_template,
        instruction=instruction,
    )


def _sparse_encoder(read_json: ReadJson, steps: Sequence[tuple[str, str]]) -> SentenceOptions:
    """Read the options of a SparseEncoder, whose sparse vectors are those of SPLADE."""
    (kind, folder), (_, pooling_folder) = steps
    config = _module_config(read_json, pooling_folder)
    config.neutral("pooling_strategy", "max")
    config.neutral("activation_function", "relu")
    config.ignore("word_embedding_dimension", "embedding_dimension", "chunk_size")
    config.check_all_read()
    options = _config(read_json, f"{folder}{_TRANSFORMER_FILES[0]}")
    if kind == "Transformer" and (options is None or options.get("transformer_task", None) != "fill-mask"):
        raise ImportFailedError(
            f"{folder}{_TRANSFORMER_FILES[0]}: transformer_task must be fill-mask before the module SpladePooling"
        )
    prompts, default = _prompts(read_json)
    embedding = SentenceEmbedding(pooling="mean", normalize=False, prompts=prompts, default_prompt=default)
    return SentenceOptions(embedding, _max_tokens(read_json, folder, "fill-mask")[0], is_sparse=True)


def _modules(modules: Any) -> list[tuple[str, str]]:
    """Return the kind and the folder, with a slash at its end, of each module."""
    try:
        if not isinstance(modules, list):
            raise TypeError
        ordered = sorted(modules, key=lambda module: module["idx"])
        named = [(str(module["type"]), str(module["path"])) for module in ordered]
    except (KeyError, TypeError):
        raise ImportFailedError("modules.json must be a list of objects with idx, path and type") from None
    for kind, _ in named:
        if not kind.startswith("sentence_transformers."):
            raise ImportFailedError(
                f"modules.json: the module {kind!r} has code of its own, which is not run; supported are the modules "
                "Transformer, Pooling, Dense and Normalize of sentence_transformers"
            )
    return [(kind.rpartition(".")[2], f"{path}/" if path else "") for kind, path in named]


def _dense(read_json: ReadJson, folder: str, number: int) -> Dense:
    """Return the options of a module Dense, which is the layer `number` of the bundle."""
    file, config = f"{folder}config.json", _module_config(read_json, folder)
    activation = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise ImportFailedError(
            f"{file}: activation_function {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    for key in ("module_input_name", "module_output_name"):
        config.neutral(key, "sentence_embedding", None)
    layer = Dense(
        file=f"dense.{number}.bin",
        inputs=config.integer("in_features"),
        outputs=config.integer("out_features"),
        has_bias=config.boolean("bias", True),
        activation=_ACTIVATIONS[activation],
    )
    config.check_all_read()
    return layer


def _pooling(read_json: ReadJson, folder: str, is_scaled: bool, has_prompts: bool) -> VectorPooling:
    """Return the pooling of `config.json` in the folder of the module, which ends with a slash.

    With `is_scaled`, the pooled vector gets length 1.
    """
    file, config = f"{folder}config.json", _module_config(read_json, folder)
    config.ignore("word_embedding_dimension", "embedding_dimension")
    if not config.boolean("include_prompt", True) and has_prompts:
        raise ImportFailedError(f"{file}: include_prompt false is not supported, because the model has prompts")
    mode = config.get("pooling_mode", None)
    selected = [name for key, name in _POOLING_KEYS.items() if config.boolean(key, False)]
    if mode is not None:
        selected = mode if isinstance(mode, list) else [mode]
    config.check_all_read()
    if selected == ["mean_sqrt_len_tokens"] and is_scaled:
        return "mean"  # differs from it by a factor, which normalization removes
    if len(selected) != 1 or not isinstance(selected[0], str) or selected[0] not in _POOLING_MODES:
        raise ImportFailedError(
            f"{file}: the pooling {' + '.join(map(str, selected)) or 'none'} is not supported; supported is one of "
            f"{', '.join(_POOLING_MODES)}"
        )
    return _POOLING_MODES[selected[0]]


def _prompts(read_json: ReadJson) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt."""
    file = "config_sentence_transformers.json"
    config = _config(read_json, file)
    if config is None:
        return {}, None
    prompts, default = config.get("prompts", None) or {}, config.get("default_prompt_name", None)
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ImportFailedError(f"{file}: prompts must map names to texts")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ImportFailedError(
            f"{file}: default_prompt_name must be one of the prompts ({', '.join(prompts) or 'there are none'}), got "
            f"{default!r}"
        )
    config.neutral("truncate_dim", None)  # the library reads no other keys
    return prompts, default


def _max_tokens(
    read_json: ReadJson, folder: str, task: str = "feature-extraction", output: str = "token_embeddings"
) -> tuple[int | None, bool]:
    """Return the longest text in tokens, None if it has no limit.

    The second result is True if sentence-transformers puts texts into the chat template. Options of
    the Transformer module precede those of the tokenizer: tokenizer.json of MiniLM truncates at 128
    tokens, but sentence-transformers truncates at 256.
    """
    for name in _TRANSFORMER_FILES:
        config = _config(read_json, f"{folder}{name}")
        if config is None:
            continue
        if config.boolean("do_lower_case", False):
            raise ImportFailedError(
                f"{folder}{name}: do_lower_case true is not supported; use a tokenizer that converts to lower case"
            )
        for key in ("model_args", "tokenizer_args", "config_args", "processing_kwargs"):
            config.neutral(key, {}, None)
        config.neutral("transformer_task", task)
        config.neutral("module_output_name", output)
        has_template = _has_template(config)
        if has_template and output == "token_embeddings":
            raise ImportFailedError(
                f"{folder}{name}: modality_config has 'message', so that sentence-transformers puts each text into the "
                "chat template; this is supported only for pairs of texts"
            )
        limit = config.get("max_seq_length", None)
        if limit is not None:
            limit = config.integer("max_seq_length", least=1)
        config.check_all_read()
        return read_tokenizer_limit(read_json, folder) if limit is None else limit, has_template
    return read_tokenizer_limit(read_json, folder), False


def _has_template(config: Config) -> bool:
    """Return True if the Transformer module reads texts as messages of a dialogue.

    A module that reads something else, or runs another method of the model, is refused.
    """
    modalities = config.section("modality_config")
    if modalities is None:
        return False
    kinds = [kind for kind in ("text", "message") if kind in modalities]
    for options in filter(None, map(modalities.section, kinds)):
        options.neutral("method", "forward")
        options.neutral("method_output_name", "last_hidden_state", "logits")
        options.neutral("format", "flat", "auto")
    modalities.check_all_read()
    return "message" in kinds


def read_tokenizer_limit(read_json: ReadJson, folder: str = "") -> int | None:
    """Return `model_max_length` of the tokenizer, None if it has no limit."""
    config = read_json(f"{folder}tokenizer_config.json")
    limit = config.get("model_max_length") if isinstance(config, dict) else None
    return int(limit) if isinstance(limit, int | float) and 0 < limit < _UNLIMITED else None


def _module_config(read_json: ReadJson, folder: str) -> Config:
    """Return the options in the folder of a module."""
    file = f"{folder}config.json"
    config = _config(read_json, file)
    if config is None:
        raise ImportFailedError(f"{file} is missing, but modules.json names its folder; download it")
    return config


def _config(read_json: ReadJson, file: str) -> Config | None:
    values = read_json(file)
    if values is not None and not isinstance(values, dict):
        raise ImportFailedError(f"{file} must be a JSON object")
    return None if values is None else Config(values, file)

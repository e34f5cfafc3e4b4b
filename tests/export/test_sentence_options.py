"""Folders of sentence-transformers: pooling, normalization, prompts and the longest text."""

from typing import Any

import pytest

from sightline.base.bundle import Dense, SentenceEmbedding
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.sentence_transformers import read_sentence_options
from tests.support.tables import read_table

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
TANH: dict[str, Any] = {
    "in_features": 384,
    "out_features": 96,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
MEAN = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
MINILM: dict[str, Any] = {
    "modules.json": [TRANSFORMER, POOLING, NORMALIZE],
    "1_Pooling/config.json": MEAN,
    "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
    "tokenizer_config.json": {"model_max_length": 512},
    "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0"}},
}


def test_minilm() -> None:
    options = read_sentence_options(MINILM.get)
    assert options.embedding == SentenceEmbedding(pooling="mean", normalize=True)
    assert options.max_tokens == 256


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"matryoshka_dimensions": [64, 128, 384]}, (64, 128, 384)),
        ({"matryoshka_dimensions": [64], "is_matryoshka": True}, (64,)),
        ({"is_matryoshka": True}, ()),
        ({"is_matryoshka": False}, None),
        ({"matryoshka_dimensions": None}, None),
        ({}, None),
    ],
)
def test_lengths_that_the_model_was_trained_for(config: dict[str, Any], expected: tuple[int, ...] | None) -> None:
    assert read_sentence_options((MINILM | {"config.json": config}).get).embedding.matryoshka == expected


def test_folder_without_modules_has_mean_pooling() -> None:
    limits: dict[float | None, int | None] = {512: 512, 1e30: None, None: None}
    for given, expected in limits.items():
        files: dict[str, Any] = {"tokenizer_config.json": {"model_max_length": given}}
        options = read_sentence_options(files.get)
        assert options.embedding == SentenceEmbedding(pooling="mean", normalize=False)
        assert options.max_tokens == expected
    no_files: dict[str, Any] = {}
    assert read_sentence_options(no_files.get).max_tokens is None


def test_layers_after_pooling() -> None:
    identity = TANH | {"in_features": 96, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    files = MINILM | {
        "modules.json": [TRANSFORMER, POOLING, DENSE, DENSE | {"idx": 3, "path": "3_Dense"}, NORMALIZE | {"idx": 4}],
        "2_Dense/config.json": TANH,
        "3_Dense/config.json": identity,
    }
    options = read_sentence_options(files.get)
    assert options.embedding == SentenceEmbedding(pooling="mean", normalize=True)
    assert options.dense == (
        ("2_Dense/", Dense(file="dense.0.bin", inputs=384, outputs=96, has_bias=True, activation="tanh")),
        ("3_Dense/", Dense(file="dense.1.bin", inputs=96, outputs=96, has_bias=False, activation="identity")),
    )
    files["1_Pooling/config.json"] = {"pooling_mode_mean_sqrt_len_tokens": True}  # its length matters here
    with pytest.raises(ImportFailedError, match="the pooling mean_sqrt_len_tokens is not supported"):
        read_sentence_options(files.get)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),  # normalized: only the direction counts
        ({"embedding_dimension": 8, "pooling_mode": "cls"}, "first"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_pooling(config: dict[str, Any], pooling: str) -> None:
    assert read_sentence_options({**MINILM, "1_Pooling/config.json": config}.get).embedding.pooling == pooling


def test_prompts_and_transformer_in_a_folder() -> None:
    files: dict[str, Any] = {
        "modules.json": [TRANSFORMER | {"path": "0_Transformer"}, POOLING],
        "1_Pooling/config.json": MEAN,
        "0_Transformer/sentence_xlm-roberta_config.json": {"max_seq_length": None},
        "0_Transformer/tokenizer_config.json": {"model_max_length": 510},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: ", "passage": "passage: "},
            "default_prompt_name": "passage",
            "similarity_fn_name": "cosine",
            "my_note": "fine-tuned 2026",
        },
    }
    options = read_sentence_options(files.get)
    prompts = {"query": "query: ", "passage": "passage: "}
    assert options.embedding == SentenceEmbedding(
        pooling="mean", normalize=False, prompts=prompts, default_prompt="passage"
    )
    assert options.max_tokens == 510


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *read_table(__file__),
        ({"modules.json": [TRANSFORMER, POOLING, NORMALIZE | {"type": "custom.Layer"}]}, "code of its own"),
        (
            {"modules.json": [TRANSFORMER, POOLING, NORMALIZE | {"type": "sentence_transformers.models.LSTM"}]},
            "Transformer, Pooling, LSTM are not supported; supported are Transformer, Pooling and, optionally, Dense",
        ),
        (
            {"modules.json": [TRANSFORMER, POOLING, NORMALIZE, DENSE | {"idx": 3}]},
            "Transformer, Pooling, Normalize, Dense are not supported",
        ),
        ({"modules.json": [TRANSFORMER, POOLING, DENSE]}, "2_Dense/config.json is missing"),
        *(
            ({"modules.json": [TRANSFORMER, POOLING, DENSE], "2_Dense/config.json": TANH | change}, message)
            for change, message in (
                (
                    {"activation_function": "torch.nn.modules.activation.GELU"},
                    "activation_function .*GELU' is not supp",
                ),
                ({"module_output_name": "tokens"}, "module_output_name is"),
                ({"scale": 2}, "2_Dense/config.json has 1 keys .* scale"),
            )
        ),
    ],
)
def test_unsupported_folder_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        read_sentence_options({**MINILM, **changes}.get)


def test_mean_of_square_roots_needs_normalization() -> None:
    files = {**MINILM, "modules.json": [TRANSFORMER, POOLING]}
    files["1_Pooling/config.json"] = {"pooling_mode_mean_sqrt_len_tokens": True}
    with pytest.raises(ImportFailedError, match="mean_sqrt_len_tokens is not supported"):
        read_sentence_options(files.get)

"""Imported models of all families compute what Transformers computes, in two steps.

The reference of verification is compared with Transformers for each class of a model, and the
graphs with that reference, as each import does. `test_family_options` varies the options.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from sightline.export.check.sessions import zero_states
from sightline.export.check.verify import GraphRunner, verify
from tests.zoo.comparing import (
    MAP_TOLERANCE,
    TOLERANCE,
    Imported,
    assert_equals_transformers,
    import_folder,
    random_texts,
)
from tests.zoo.models import LLAMA3, MODELS, SEQ2SEQ

NEW_TOKENS = 3
CLASSES = [(name, architecture) for name, model in MODELS.items() for architecture in model.architectures]
# One graph of each model, and all heads of two families, which differ in their layers.
ALL_HEADS = ("bert", "modernbert with biases")
GRAPHS = [
    (name, architecture)
    for name, model in MODELS.items()
    for architecture in (model.architectures if name in ALL_HEADS else model.architectures[:2][-1:])
]
SLOW = [
    case for case in GRAPHS if case[0].endswith(" as encoder") and not case[0].startswith(("llama", "t5", "gemma3"))
]


@pytest.mark.parametrize(
    ("name", "architecture", "has_graph"),
    [(*case, case in GRAPHS and case not in SLOW) for case in CLASSES]
    + [pytest.param(*case, True, marks=pytest.mark.slow) for case in SLOW],
)
def test_the_reference_equals_transformers_and_graphs_equal_the_reference(
    name: str, architecture: str, has_graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = MODELS[name].save(tmp_path, architecture)
    imported = import_folder(tmp_path)
    longest = min(imported.model.max_positions, 40)
    texts = random_texts(hf, [longest, 12, 1], [5, longest, 1] if name in SEQ2SEQ else ())
    assert_equals_transformers(imported, hf, texts)
    if has_graph:
        assert_graphs_equal_the_reference_in_any_batch(hf, imported, tmp_path, monkeypatch)


def assert_graphs_equal_the_reference_in_any_batch(
    hf: Any, imported: Imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, manifest = imported.model, imported.write_bundle()
    longest = manifest.limits.max_source_tokens
    has_types = model.first_stack.embedding.types > 1
    pairs = random_texts(hf, [longest, 9]).sources if has_types else ()
    record = verify(tmp_path, manifest, model, imported.weights, pairs)
    assert 0 < record.tolerance < 0.05 and record.different_generations == 0

    if model.is_decoder_only:  # positions that no token has written have no effect

        def undefined(*arguments: Any) -> dict[str, Any]:
            return {name: np.full_like(state, np.nan) for name, state in zero_states(*arguments).items()}

        monkeypatch.setattr("sightline.export.check.verify.zero_states", undefined)
    texts = random_texts(hf, [longest - NEW_TOKENS, 7, 2, 1], [12, 7, 9, 1])
    prompts = texts.sources if model.is_decoder_only else texts.targets
    runner = GraphRunner(tmp_path, manifest, model)
    _, together = runner.run(texts.sources, prompts, NEW_TOKENS)
    for row, (source, prompt) in enumerate(zip(texts.sources, prompts, strict=True)):
        for key, array in runner.run([source], [prompt], NEW_TOKENS)[1].items():
            assert_array_equal(together[f"{key.partition('.')[0]}.{row}"], array, err_msg=f"{key} of row {row}")


# Widths, heads and layers of published models, with fewer layers and smaller vocabularies.
BASE = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 520}
BART = {
    "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
    "d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "max_position_embeddings": 512,
    "vocab_size": 5003,
}  # fmt: skip
LLAMA = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "max_position_embeddings": 4096,
    "vocab_size": 20011,
}  # fmt: skip
REALISTIC: dict[str, dict[str, Any]] = {
    "bert": BASE | {"vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536},
    "xlm-roberta": BASE | {"vocab_size": 25001, "intermediate_size": 3072},
    "mpnet": BASE | {"vocab_size": 30527, "intermediate_size": 3072},
    "albert": BASE | {"vocab_size": 30000, "intermediate_size": 3072},
    "modernbert": BASE | {"vocab_size": 50368, "intermediate_size": 1152, "local_attention": 128},
    "gpt2": {"vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None, "n_positions": 1024},
    "llama": LLAMA
    | {"vocab_size": 32003, "intermediate_size": 2816, "num_key_value_heads": 4, "head_dim": 64}
    | {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 1024}},
    "qwen3": LLAMA
    | {"intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "mistral": LLAMA
    | {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048, "num_key_value_heads": 4}
    | {"head_dim": 64, "sliding_window": 128},
    "marian": BART
    | {"d_model": 512, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    | {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048},
    "bart": BART,
    "m2m100": BART,
    "pegasus": BART,
    "t5": {
        "d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 3072, "num_layers": 3, "num_decoder_layers": 3,
        "n_positions": 512, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "vocab_size": 5003,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REALISTIC)
def test_graphs_of_realistic_sizes_equal_the_reference(name: str, tmp_path: Path) -> None:
    """Weights have the scale of initialised ones, so that sums keep their usual size."""
    MODELS[name].save(tmp_path, scale=0.02, **REALISTIC[name])
    imported = import_folder(tmp_path)
    manifest = imported.write_bundle(1024)
    record = verify(tmp_path, manifest, imported.model, imported.weights)
    assert record.longest is not None and record.longest >= 500
    assert record.max_logit_difference <= TOLERANCE and record.max_attention_difference <= MAP_TOLERANCE

"""Encoder-decoders of Transformers, saved and imported, compute what Transformers computes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, processors

from sightline.export.check.reference_decoder import ReferenceDecoder
from sightline.export.check.reference_encoder import Reference
from sightline.export.check.sessions import onnx_steps
from sightline.export.errors import ImportFailedError
from sightline.export.families import Family
from sightline.export.families.description import RelativeBias
from sightline.export.families.seq2seq import BART, FAMILIES, M2M100, MARIAN, MBART, MT5, PEGASUS, T5
from sightline.export.families.weights import Weights
from sightline.export.graphs.relative import bias_of_distances, buckets
from sightline.export.options import BundleMetadata
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.checkpoint import open_folder
from sightline.model.decoding.processors import LogitsProcessors
from sightline.model.decoding.reference import Hypothesis, NextLogits, beam, greedy
from tests.export.imported import MAP_TOLERANCE, TOLERANCE, Imported, Run, import_folder, run_rows, transformers_run

POSITIONS = 24

# Odd sizes: one layer, other numbers of heads and layers in the decoder, and head sizes that are
# not multiples of 8.
SMALL: dict[str, Any] = {
    "d_model": 36, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 23, "decoder_ffn_dim": 29, "vocab_size": 97,
    "max_position_embeddings": POSITIONS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
SMALL_MARIAN = SMALL | {"pad_token_id": 96, "decoder_start_token_id": 96, "eos_token_id": 0}
# Heads times their size is not the width, and longest inputs exceed the largest distance.
SMALL_T5: dict[str, Any] = {
    "d_model": 36, "d_kv": 10, "num_heads": 3, "d_ff": 23, "num_layers": 1, "num_decoder_layers": 2,
    "vocab_size": 97, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0, "n_positions": POSITIONS,
}  # fmt: skip
OLD_KEYS = {"add_bias_logits": False, "num_hidden_layers": 1, "classif_dropout": 0.0, "_num_labels": 3, "id2label": {}}


@dataclass(frozen=True)
class Case:
    """One randomly initialised checkpoint."""

    name: str
    family: Family
    architecture: str  # class of Transformers
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)  # settings of generation_config.json
    old_keys: Mapping[str, Any] = field(default_factory=dict)  # of config.json, without effect on Transformers


BEAMS = {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True, "max_length": 12}
CASES = (
    Case(
        "marian",
        MARIAN,
        "MarianMTModel",
        SMALL_MARIAN | {"scale_embedding": True, "activation_function": "swish"},
        {"bad_words_ids": [[96]], "num_beams": 4, "max_length": 12, "forced_eos_token_id": 0, "pad_token_id": 96},
        OLD_KEYS | {"static_position_embeddings": True, "normalize_before": False, "normalize_embedding": False},
    ),
    Case(
        "marian with two vocabularies",
        MARIAN,
        "MarianMTModel",
        SMALL_MARIAN
        | {"decoder_vocab_size": 83, "share_encoder_decoder_embeddings": False, "activation_function": "relu"}
        | {"pad_token_id": 82, "decoder_start_token_id": 82},
        {"suppress_tokens": [82, 5], "max_length": 10},
    ),
    Case(
        "bart",
        BART,
        "BartForConditionalGeneration",
        SMALL,
        BEAMS | {"forced_bos_token_id": 0, "forced_eos_token_id": 2, "no_repeat_ngram_size": 2, "min_length": 6},
        OLD_KEYS | {"add_final_layer_norm": False, "normalize_embedding": True, "static_position_embeddings": False},
    ),
    Case("bart without its head", BART, "BartModel", SMALL | {"encoder_layers": 2}, old_keys={"max_length": 9}),
    Case(
        "mbart",
        MBART,
        "MBartForConditionalGeneration",
        SMALL | {"scale_embedding": True},
        BEAMS | {"forced_bos_token_id": 61, "early_stopping": "never"},
        OLD_KEYS | {"normalize_before": True, "add_final_layer_norm": True},
    ),
    Case("m2m100", M2M100, "M2M100ForConditionalGeneration", SMALL, BEAMS | {"forced_bos_token_id": 71}),
    Case(
        "pegasus",
        PEGASUS,
        "PegasusForConditionalGeneration",
        SMALL | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "scale_embedding": True},
        {"num_beams": 8, "length_penalty": 0.8, "max_length": 9, "forced_eos_token_id": 1},
        {"extra_pos_embeddings": 1, "static_position_embeddings": True},
    ),
    Case(
        "t5",
        T5,
        "T5ForConditionalGeneration",
        SMALL_T5,
        # The second tokens would follow the first ones.
        {"max_length": 12, "bad_words_ids": [[67, 67], [46, 2]]},
        {"output_past": True},
    ),
    Case(
        "flan-t5",
        T5,
        "T5ForConditionalGeneration",
        SMALL_T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"max_length": 12, "num_beams": 2, "repetition_penalty": 1.3},
    ),
    Case("mt5", MT5, "MT5ForConditionalGeneration", SMALL_T5 | {"num_layers": 2}, {"max_length": 12, "min_length": 11}),
)
# Further shapes of the families that have fewer than three above.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "with one layer": {
        "d_model": 26, "vocab_size": 61, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 1,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 41, "decoder_ffn_dim": 11, "d_kv": 7, "num_heads": 5,
        "d_ff": 41, "num_layers": 2, "num_decoder_layers": 1,
    },
    "with many heads": {
        "d_model": 48, "vocab_size": 131, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 12,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 17, "decoder_ffn_dim": 53, "d_kv": 4, "num_heads": 11,
        "d_ff": 17, "num_layers": 3, "num_decoder_layers": 3,
    },
}  # fmt: skip


def with_sizes(case: Case, title: str) -> Case:
    """Return a case of other sizes, without the token ids of a larger vocabulary."""
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0} if case.family is MARIAN else {}
    sizes = {key: size for key, size in SIZES[title].items() if key in case.config}
    return replace(case, name=f"{case.name} {title}", config={**case.config, **sizes, **ids}, generation={})


SHAPES = [
    with_sizes(case, title)
    for case in CASES
    if case.name in ("marian", "bart", "mbart", "m2m100", "pegasus", "t5", "mt5")
    for title in SIZES
]
UNTIED = {"flan-t5": "lm_head.weight", "mt5": "lm_head.weight"}
SOURCES, TARGETS = (POSITIONS, 1, 7, 12), (5, POSITIONS, 1, 12)  # lengths: longest, shortest, two others


@dataclass(frozen=True)
class Pair:
    """A model of Transformers, and the graphs of its checkpoint."""

    case: Case
    folder: Path
    expected: Any
    imported: Imported
    sources: list[list[int]]
    targets: list[list[int]]
    runs: list[Run]  # all rows in one batch
    expected_runs: list[Run]


def save(case: Case, folder: Path) -> Any:
    """Save a random model as `save_pretrained` does, and return it."""
    import transformers

    cls = getattr(transformers, case.architecture)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = cls._from_config(cls.config_class(**case.config), attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name or case.family not in (MARIAN, PEGASUS):
                parameter.normal_(0.0, 0.4)
        if case.name in UNTIED:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_()
    for key, value in case.generation.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | case.old_keys))
    return model


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return find_pair(request.param, pairs, tmp_path_factory)


def find_pair(case: Case, pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return the pair of a case; it is made once."""
    if case.name not in pairs:
        folder = tmp_path_factory.mktemp("checkpoint")
        model = save(case, folder)
        pairs[case.name] = make_pair(case, folder, with_head(model), import_folder(folder, case.family))
    return pairs[case.name]


def make_pair(case: Case, folder: Path, model: Any, imported: Imported) -> Pair:
    sources, targets = inputs(model)
    runs, _ = run_rows(imported.sessions, sources, targets)
    expected = [transformers_run(model, source, target) for source, target in zip(sources, targets, strict=True)]
    return Pair(case, folder, model, imported, sources, targets, runs, expected)


def with_head(model: Any) -> Any:
    """Return a model that generates; a checkpoint without a head is tied to the embedding."""
    import transformers

    if type(model) is not transformers.BartModel:
        return model
    generating = transformers.BartForConditionalGeneration(model.config).eval()
    generating.model = model
    generating.lm_head.weight = model.shared.weight
    generating.generation_config.max_length = 9
    return generating


def inputs(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    rng, config = np.random.default_rng(0), model.config
    vocabulary = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    special = 3
    sources = [rng.integers(special, config.vocab_size - 1, size).tolist() for size in SOURCES]
    start = config.decoder_start_token_id
    return sources, [[start, *rng.integers(special, vocabulary - 1, size - 1).tolist()] for size in TARGETS]


def assert_close(given: Run, expected: Run) -> None:
    np.testing.assert_allclose(given.hidden, expected.hidden, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(given.logits, expected.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(given.encoder, expected.encoder, rtol=0, atol=MAP_TOLERANCE)
    np.testing.assert_allclose(given.cross, expected.cross, rtol=0, atol=MAP_TOLERANCE)
    assert given.decoder is not None
    assert expected.decoder is not None
    np.testing.assert_allclose(given.decoder, expected.decoder, rtol=0, atol=MAP_TOLERANCE)


def test_outputs_equal_those_of_transformers(pair: Pair) -> None:
    """Rows of different ages in one batch have the outputs of Transformers for each alone."""
    for run, expected in zip(pair.runs, pair.expected_runs, strict=True):
        assert_close(run, expected)


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_outputs_of_other_shapes_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    pair = make_pair(case, tmp_path, model, import_folder(tmp_path, case.family))
    for run, expected in zip(pair.runs, pair.expected_runs, strict=True):
        assert_close(run, expected)


def test_rows_alone_have_the_same_bits(pair: Pair) -> None:
    for run, source, target in zip(pair.runs, pair.sources, pair.targets, strict=True):
        (alone,), _ = run_rows(pair.imported.sessions, [source], [target])
        for name, values in vars(run).items():
            np.testing.assert_array_equal(values, getattr(alone, name), err_msg=name)


def test_the_reference_of_verification_agrees(pair: Pair) -> None:
    with open_folder(pair.folder) as folder:
        model, family = pair.imported.model, pair.case.family
        weights = Weights(folder.tensors, family.modules(model, folder.tensors))
        for row in (1, 3):
            encoded = Reference(model, weights).encode(pair.sources[row])
            decoded = ReferenceDecoder(model, weights).decode(pair.targets[row], encoded.hidden)
            assert decoded.cross_maps is not None
            given = Run(encoded.hidden, decoded.logits, encoded.maps, decoded.cross_maps, decoded.maps)
            assert_close(given, pair.expected_runs[row])


def searched(imported: Imported, source: Sequence[int], max_new_tokens: int, **settings: Any) -> Hypothesis:
    """Decode by the reference search, with the defaults of the checkpoint changed by `settings`."""
    generation = imported.generation
    defaults, end_id = generation.defaults.model_copy(update=settings), generation.end_ids[0]
    processors = LogitsProcessors(
        repetition_penalty=defaults.repetition_penalty or 1.0,
        no_repeat_ngram_size=defaults.no_repeat_ngram_size or 0,
        min_new_tokens=defaults.min_new_tokens or 0,
        suppress_tokens=defaults.suppress_tokens,
    )
    start, *prefix = generation.start_ids
    steps = onnx_steps(imported.sessions, source)
    if defaults.force_end:
        steps = forcing_end(steps, len(generation.start_ids) + max_new_tokens - 1, end_id)
    steps = forbidding(steps, defaults.bad_words)
    if (defaults.num_beams or 1) == 1:
        return greedy(steps, start, end_id, max_new_tokens, prefix=prefix, processors=processors)
    found = beam(
        steps,
        start,
        end_id,
        max_new_tokens,
        defaults.num_beams or 1,
        1.0 if defaults.length_penalty is None else defaults.length_penalty,
        defaults.early_stopping or False,
        prefix=prefix,
        num_forced=len(prefix),
        processors=processors,
    )
    return found[0]


def forcing_end(steps: NextLogits, last: int, end_id: int) -> NextLogits:
    """Allow only the end token after `last` inputs."""

    def next_logits(prefixes: Sequence[Sequence[int]]) -> Any:
        logits = steps(prefixes)
        if len(prefixes[0]) == last:
            logits = np.full_like(logits, -np.inf)
            logits[:, end_id] = 0.0
        return logits

    return next_logits


def forbidding(steps: NextLogits, words: Sequence[Sequence[int]]) -> NextLogits:
    """Forbid the last token of each word after the others."""

    def next_logits(prefixes: Sequence[Sequence[int]]) -> Any:
        logits = steps(prefixes)
        for row, prefix in zip(logits, prefixes, strict=True):
            for *first, last in words:
                if list(prefix[-len(first) :]) == first:
                    row[last] = -np.inf
        return logits

    return next_logits


def test_generation_defaults_give_the_tokens_of_transformers(pair: Pair) -> None:
    generation = pair.imported.generation
    most = generation.defaults.max_new_tokens
    assert most is not None
    for source in pair.sources[1:3]:
        assert searched(pair.imported, source, most).ids == transformers_search(pair, source)[0]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("name", ["mbart", "m2m100"])
def test_a_forced_first_token_counts_in_the_length_penalty(
    name: str, early_stopping: bool | str, pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = find_pair(case_named(name), pairs, tmp_path_factory)
    most = pair.imported.generation.defaults.max_new_tokens
    assert most is not None and len(pair.imported.generation.start_ids) == 2
    for length_penalty in (-1.0, 0.0, 0.8, 1.2, 1.4, 2.0):
        settings: dict[str, Any] = {
            "num_beams": 4,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
        }
        # With few tokens, hypotheses of different lengths have similar scores.
        settings["suppress_tokens"] = sorted({0, 1, *range(3, 92)} - {pair.imported.generation.start_ids[1]})
        for source in pair.sources[1:3]:
            found = searched(pair.imported, source, most, **settings)
            ids, score = transformers_search(pair, source, **settings)
            assert found.ids == ids
            # Each of ten log-probabilities may differ by the tolerance. Counting changes a score
            # by at least 5 % unless the penalty is 0.
            assert found.penalised_total(length_penalty, num_forced=1) == pytest.approx(score, rel=10 * TOLERANCE)


def transformers_search(pair: Pair, source: Sequence[int], **settings: Any) -> tuple[tuple[int, ...], float]:
    """Return what Transformers generates after the first inputs of the decoder.

    Returns:
        The tokens, and the score of beam search, 0 for greedy decoding.
    """
    generation = pair.imported.generation
    output = pair.expected.generate(
        torch.tensor([source]),
        attention_mask=torch.ones(1, len(source), dtype=torch.long),
        use_cache=False,  # Transformers fails for T5 with more layers in the decoder
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    start, (end_id, *_) = generation.start_ids, generation.end_ids
    found: list[int] = output.sequences[0].tolist()
    assert tuple(found[: len(start)]) == start
    found = found[len(start) :]
    ids = tuple(found[: found.index(end_id) + 1] if end_id in found else found)
    return ids, float(output.sequences_scores[0]) if "sequences_scores" in output else 0.0


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def edit(folder: Path, file: str, **changes: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    path = folder / file
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def t5_folder(tmp_path: Path) -> Path:
    save(case_named("t5"), tmp_path)
    return tmp_path


@pytest.fixture
def marian_folder(tmp_path: Path) -> Path:
    save(case_named("marian"), tmp_path)
    return tmp_path


def rewrite_tensors(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Add tensors to a checkpoint, and return those that it had."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    added = {name: change(tensors) if callable(change) else change for name, change in changes.items()}
    save_file(tensors | added, folder / "model.safetensors")
    return tensors


def test_repeated_tables_are_stored_once(marian_folder: Path) -> None:
    """Older checkpoints have the same table under four names."""
    import_folder(marian_folder, MARIAN)
    size = (marian_folder / "weights.bin").stat().st_size
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    rewrite_tensors(marian_folder, {name: lambda tensors: tensors["model.shared.weight"].clone() for name in names})
    import_folder(marian_folder, MARIAN)
    assert (marian_folder / "weights.bin").stat().st_size == size


def test_position_tables_of_a_checkpoint_are_used(marian_folder: Path) -> None:
    import transformers

    names = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    rewrite_tensors(marian_folder, {name: torch.randn(POSITIONS, 36) for name in names})
    model = transformers.MarianMTModel.from_pretrained(marian_folder, attn_implementation="eager").eval()
    runs, _ = run_rows(import_folder(marian_folder, MARIAN).sessions, [[5, 6, 7]], [[96, 8, 9]])
    assert_close(runs[0], transformers_run(model, [5, 6, 7], [96, 8, 9]))


def test_a_t5_generates_beyond_the_positions_of_its_training(tmp_path: Path) -> None:
    """Relative positions have no limit; those beyond the largest distance share a bucket."""
    case, longest = case_named("t5"), 3 * POSITIONS
    model = save(case, tmp_path)
    imported = import_folder(tmp_path, case.family, max_tokens=longest)
    assert imported.model.max_positions == longest
    source = [3 + 7 * index % 90 for index in range(longest)]
    runs, _ = run_rows(imported.sessions, [source], [[0, *source[1:]]])
    assert_close(runs[0], transformers_run(model, source, [0, *source[1:]]))
    pair = Pair(case, tmp_path, model, imported, [], [], [], [])
    found, _ = transformers_search(pair, source, max_new_tokens=longest - 1, min_new_tokens=longest - 1)
    assert len(found) == longest - 1
    assert searched(imported, source, longest - 1, min_new_tokens=longest - 1).ids == found


def test_the_activation_gelu_10_has_the_limits_of_transformers(tmp_path: Path) -> None:
    import transformers

    bart = case_named("bart")
    save(replace(bart, config={**bart.config, "activation_function": "gelu_10"}), tmp_path)
    name = "model.encoder.layers.0.fc1.weight"  # large enough for outputs beyond the limit
    rewrite_tensors(tmp_path, {name: lambda tensors: 30 * tensors[name]})
    source, target, outputs = [5, 6, 7], [2, 8, 9], []
    for function in ("gelu_10", "gelu"):
        edit(tmp_path, "config.json", activation_function=function)
        model = transformers.BartForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager").eval()
        runs, _ = run_rows(import_folder(tmp_path, BART).sessions, [source], [target])
        assert_close(runs[0], transformers_run(model, source, target))
        outputs.append(runs[0].hidden)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1


def test_unknown_tensors_are_rejected(marian_folder: Path) -> None:
    rewrite_tensors(marian_folder, {"model.encoder.adapter.weight": torch.ones(1)})
    with pytest.raises(ImportFailedError, match=r"model\.encoder\.adapter\.weight"):
        import_folder(marian_folder, MARIAN)


def test_padding_token_in_a_source_takes_no_position(
    pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = next(case for case in CASES if case.family is M2M100)
    pair = find_pair(case, pairs, tmp_path_factory)
    source = [5, 1, 6, 1, 1, 7, 8]
    runs, _ = run_rows(pair.imported.sessions, [source], [[2, 9, 10]])
    assert_close(runs[0], transformers_run(pair.expected, source, [2, 9, 10]))
    with open_folder(pair.folder) as folder:
        weights = Weights(folder.tensors, M2M100.modules(pair.imported.model, folder.tensors))
        hidden = Reference(pair.imported.model, weights).encode(source).hidden
    np.testing.assert_allclose(hidden, runs[0].hidden, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary": True}, "rotary"),
        ({"normalize_before": True}, "normalize_before is true, which is not supported"),
        ({"normalize_embedding": True}, "normalize_embedding is true, which is not supported"),
        ({"static_position_embeddings": False}, "static_position_embeddings is false, which is not supported"),
    ],
)
def test_unknown_variants_are_rejected(changes: dict[str, Any], message: str, marian_folder: Path) -> None:
    edit(marian_folder, "config.json", **changes)
    with pytest.raises(ImportFailedError, match=message):
        import_folder(marian_folder, MARIAN)


def test_unknown_feed_forward_of_t5_is_rejected(t5_folder: Path) -> None:
    edit(t5_folder, "config.json", feed_forward_proj="double-gelu")
    with pytest.raises(ValueError, match="feed_forward_proj must be 'gated-NAME' or the name of an activation"):
        import_folder(t5_folder, T5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("d_model", 10**9, r"'shared.weight' has the shape \[97, 36\], but config.json implies \[97, 1000000000\]"),
        ("d_kv", 9, r"SelfAttention.q.weight' has the shape \[30, 36\], but config.json implies \[27, 36\]"),
        ("d_ff", 24, r"wi.weight' has the shape \[23, 36\], but config.json implies \[24, 36\]"),
        ("num_heads", 2, r"relative_attention_bias.weight' has the shape \[8, 3\], but config.json implies \[8, 2\]"),
        ("num_heads", 10**9, "num_heads must be from 1 to 1000, got 1000000000"),
        ("num_layers", 10**9, "num_layers must be from 1 to 1000, got 1000000000"),
        ("num_layers", 2, r"no tensor 'encoder.block.1.layer.0.SelfAttention.q.weight'"),
        ("num_decoder_layers", 1, r"13 tensors that its architecture does not use: decoder.block.1"),
        ("vocab_size", 98, r"'shared.weight' has the shape \[97, 36\], but config.json implies \[98, 36\]"),
        ("relative_attention_num_buckets", 6, r"has the shape \[8, 3\], but config.json implies \[6, 3\]"),
        ("relative_attention_max_distance", 4, "relative_attention_max_distance must be at least 5, got 4"),
        ("layer_norm_epsilon", 0, "layer_norm_epsilon must be greater than 0, got 0"),
        ("n_positions", 10**9, "the model 1,000,000,000 positions; supported are 1 to 1,048,576: correct config.json"),
        ("feed_forward_proj", "gated-gelu", r"no tensor 'encoder.block.0.layer.1.DenseReluDense.wi_0.weight'"),
    ],
)
def test_other_sizes_of_t5_are_rejected(key: str, value: Any, message: str, t5_folder: Path) -> None:
    edit(t5_folder, "config.json", **{key: value})
    with pytest.raises(ImportFailedError, match=message):
        import_folder(t5_folder, T5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("d_model", 10**9, "encoder_attention_heads must be a divisor of the width 1000000000, got 3"),
        ("d_model", 33, "decoder_attention_heads must be a divisor of the width 33, got 6"),
        ("d_model", 72, r"'model.shared.weight' has the shape \[97, 36\], but config.json implies \[97, 72\]"),
        ("encoder_ffn_dim", 24, r"encoder.layers.0.fc1.weight' has the shape \[23, 36\], but config.json implies \[24"),
        ("decoder_ffn_dim", 30, r"decoder.layers.0.fc1.weight' has the shape \[29, 36\], but config.json implies \[30"),
        ("decoder_layers", 3, "no tensor 'model.decoder.layers.2.self_attn.q_proj.weight'"),
        ("decoder_layers", 1, "26 tensors that its architecture does not use: model.decoder.layers.1"),
        ("vocab_size", 96, r"'model.shared.weight' has the shape \[97, 36\], but config.json implies \[96, 36\]"),
        (
            "decoder_vocab_size",
            96,
            r"'model.shared.weight' has the shape \[97, 36\], but config.json implies \[96, 36\]",
        ),
        ("max_position_embeddings", 10**9, "the model 1,000,000,000 positions; supported are 1 to 1,048,576"),
    ],
)
def test_other_sizes_of_marian_are_rejected(key: str, value: Any, message: str, marian_folder: Path) -> None:
    edit(marian_folder, "config.json", **{key: value})
    with pytest.raises(ImportFailedError, match=message):
        import_folder(marian_folder, MARIAN)


def test_a_bias_that_the_architecture_excludes_is_rejected(t5_folder: Path) -> None:
    rewrite_tensors(t5_folder, {"encoder.block.0.layer.0.SelfAttention.q.bias": torch.ones(30)})
    with pytest.raises(ImportFailedError, match=r"SelfAttention.q.bias', but its architecture and config.json exclude"):
        import_folder(t5_folder, T5)


@pytest.mark.parametrize("is_tied", [True, False, None])
def test_t5_scales_hidden_states_as_older_configurations_say(is_tied: bool | None, t5_folder: Path) -> None:
    """Without the key of later versions of Transformers, `tie_word_embeddings` decides."""
    edit(t5_folder, "config.json", scale_decoder_outputs=None, tie_word_embeddings=is_tied)
    with open_folder(t5_folder) as folder:
        scale = T5.describe(folder.config, folder.tensors).logits_scale
    assert scale == pytest.approx(1.0 if is_tied is False else 36**-0.5)


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (8, 12), (10, 20), (4, 50)])
def test_buckets_equal_those_of_transformers(is_bidirectional: bool, count: int, most: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-600, 601)
    bucket = T5Attention._relative_position_bucket
    expected = bucket(torch.tensor(distances), is_bidirectional, count, most)
    options = RelativeBias(count, most, is_bidirectional)
    np.testing.assert_array_equal(buckets(options, distances), expected.numpy())
    table = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    np.testing.assert_array_equal(bias_of_distances(options, table, 601), table[expected.numpy()].T)


# Widths, heads and feed-forward layers of opus-mt, bart-large, NLLB-600M, pegasus and t5-base, with
# fewer layers and a smaller vocabulary.
REALISTIC: dict[str, tuple[Family, str, dict[str, Any]]] = {
    "marian": (MARIAN, "MarianMTModel", {"d_model": 512, "ffn": 2048, "heads": 8, "scale_embedding": True}),
    "bart": (BART, "BartForConditionalGeneration", {"d_model": 1024, "ffn": 4096, "heads": 16}),
    "nllb": (M2M100, "M2M100ForConditionalGeneration", {"d_model": 1024, "ffn": 4096, "heads": 16}),
    "pegasus": (PEGASUS, "PegasusForConditionalGeneration", {"d_model": 1024, "ffn": 4096, "heads": 16}),
    "t5": (T5, "T5ForConditionalGeneration", {"d_model": 768, "ffn": 3072, "heads": 12}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_sizes_equal_transformers(name: str, tmp_path: Path) -> None:
    """Inputs have up to 512 tokens; weights are as initialised, so that sums keep their
    usual size.
    """
    import transformers

    family, architecture, sizes = REALISTIC[name]
    ffn, heads = sizes.pop("ffn"), sizes.pop("heads")
    if family is T5:
        config: dict[str, Any] = SMALL_T5 | {
            "d_kv": 64, "num_heads": heads, "d_ff": ffn, "num_layers": 3, "num_decoder_layers": 3, "n_positions": 512,
            "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        }  # fmt: skip
    else:
        config = SMALL | {
            "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": heads,
            "decoder_attention_heads": heads, "encoder_ffn_dim": ffn, "decoder_ffn_dim": ffn,
            "max_position_embeddings": 512,
        }  # fmt: skip
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    values = config | sizes | {"vocab_size": 5003}
    model = cls._from_config(cls.config_class(**values), attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    if family in (MARIAN, PEGASUS):
        edit(tmp_path, "generation_config.json", forced_eos_token_id=None)
    imported = import_folder(tmp_path, family)
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, 5000, size).tolist() for size in (512, 1, 130)]
    targets = [rng.integers(3, 5000, size).tolist() for size in (3, 260, 40)]
    runs, _ = run_rows(imported.sessions, sources, targets)
    for run, source, target in zip(runs, sources, targets, strict=True):
        assert_close(run, transformers_run(model, source, target))


def write_tokenizer(folder: Path, case: Case) -> None:
    """Write a tokenizer with a word for each token, an end token and three languages."""
    words = [f"word{index}" for index in range(case.config["vocab_size"])]
    end_id = case.config.get("eos_token_id", 1)
    words[end_id], words[3] = "</s>", "<unk>"
    languages = {"m2m_100": ("deu_Latn", "eng_Latn", "fra_Latn"), "mbart": ("de_DE", "en_XX", "fr_XX")}
    special = languages.get(case.family.name, ())
    first = case.generation.get("forced_bos_token_id", 0)
    words[first : first + len(special)] = special
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>", "<unk>", *special])
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", end_id)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if case.family is MBART:  # mBART-50
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MBart50Tokenizer"}))


def test_mbart_with_unknown_positions_of_languages_is_an_error(tmp_path: Path) -> None:
    save(case_named("mbart"), tmp_path)
    write_tokenizer(tmp_path, case_named("mbart"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ImportFailedError, match=r"for mBART-25, decoder_start_token_id .* such as 62 for en, without"):
        export_checkpoint(Export(tmp_path, tmp_path / "bundle", BundleMetadata("imported")))


def test_families_of_translation_models_are_trained_on_sentences() -> None:
    found = {family.name for family in FAMILIES if family.training_unit == "sentence"}
    assert found == {"marian", "mbart", "m2m_100"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.family is not MARIAN], ids=lambda case: case.name)
def test_folders_are_imported_and_verified(case: Case, tmp_path: Path) -> None:
    """Each import starts a process for its verification."""
    save(case, tmp_path / "folder")
    write_tokenizer(tmp_path / "folder", case)
    manifest = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("imported"))).manifest
    assert manifest.verification is not None
    assert manifest.verification.max_logit_difference < TOLERANCE
    assert {attention.kind for attention in manifest.attention} == {"encoder", "cross", "decoder"}
    expected = {"de", "en", "fr"} if case.family in (M2M100, MBART) else set()
    assert set(manifest.languages.targets if manifest.languages else ()) == expected
    assert manifest.training_unit == ("sentence" if expected else "text")

"""Encoder-decoders generate what Transformers generates; forms that are imported or refused.

See also `test_families`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, processors

from sightline.export.check.sessions import onnx_steps
from sightline.export.check.verify import ComparedTexts
from sightline.export.families.description import RelativeBias
from sightline.export.families.seq2seq import FAMILIES, T5
from sightline.export.graphs.relative import bias_of_distances, buckets
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.opened_checkpoint import Folder
from tests.export.imported import Imported
from tests.export.imported import import_folder as load_folder
from tests.support.reference_decoding import LogitsProcessors, NextLogits, ReferenceHypothesis, beam, greedy
from tests.support.tables import read_table
from tests.zoo.comparing import (
    TOLERANCE,
    assert_equals_transformers,
    assert_graphs_equal_the_reference,
    import_folder,
    random_texts,
)
from tests.zoo.models import SEQ2SEQ, edit_config

POSITIONS = 24
GENERATING = [name for name, model in SEQ2SEQ.items() if model.generation or model.old_keys]


@dataclass(frozen=True)
class Pair:
    """A model of Transformers, and the graphs of its checkpoint."""

    expected: Any
    imported: Imported
    sources: Sequence[Sequence[int]] = ()


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return a function that makes the pair of a model once."""
    pairs: dict[str, Pair] = {}

    def find(name: str) -> Pair:
        if name not in pairs:
            folder = tmp_path_factory.mktemp("checkpoint")
            hf = with_head(SEQ2SEQ[name].save(folder, scale=0.4))
            pairs[name] = Pair(hf, load_folder(folder), random_texts(hf, [1, 7]).sources)
        return pairs[name]

    return find


def with_head(model: Any) -> Any:
    """Return a model that generates; a checkpoint without a head is tied to the embedding."""
    if type(model) is not transformers.BartModel:
        return model
    generating = transformers.BartForConditionalGeneration(model.config).eval()
    generating.model = model
    generating.lm_head.weight = model.shared.weight
    generating.generation_config.max_length = 9
    return generating


def check(folder: Path, model: Any, texts: ComparedTexts, **options: Any) -> None:
    """Compare a checkpoint with a model of Transformers."""
    imported = import_folder(folder, **options)
    assert_equals_transformers(imported, model, texts)
    assert_graphs_equal_the_reference(imported, texts)


def searched(imported: Imported, source: Sequence[int], max_new_tokens: int, **settings: Any) -> ReferenceHypothesis:
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


@pytest.mark.parametrize("name", GENERATING)
def test_generation_defaults_give_the_tokens_of_transformers(name: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(name)
    generation = pair.imported.generation
    most = generation.defaults.max_new_tokens
    assert most is not None
    for source in pair.sources:
        assert searched(pair.imported, source, most).ids == transformers_search(pair, source)[0]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("name", ["mbart", pytest.param("m2m100", marks=pytest.mark.slow)])
def test_a_forced_first_token_counts_in_the_length_penalty(
    name: str, early_stopping: bool | str, pair_of: Callable[[str], Pair]
) -> None:
    pair = pair_of(name)
    most = pair.imported.generation.defaults.max_new_tokens
    assert most is not None and len(pair.imported.generation.start_ids) == 2
    for length_penalty in (-1.0, 0.0, 0.8, 1.2, 1.4, 2.0):
        settings: dict[str, Any] = {"num_beams": 4, "length_penalty": length_penalty, "early_stopping": early_stopping}
        # With few tokens, hypotheses of different lengths have similar scores.
        settings["suppress_tokens"] = sorted({0, 1, *range(3, 92)} - {pair.imported.generation.start_ids[1]})
        for source in pair.sources:
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


@pytest.fixture
def t5_folder(tmp_path: Path) -> Path:
    SEQ2SEQ["t5"].save(tmp_path)
    return tmp_path


@pytest.fixture
def marian_folder(tmp_path: Path) -> Path:
    SEQ2SEQ["marian"].save(tmp_path)
    return tmp_path


def rewrite_tensors(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Add tensors to a checkpoint, and return those that it had."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    added = {name: change(tensors) if callable(change) else change for name, change in changes.items()}
    save_file(tensors | added, folder / "model.safetensors")
    return tensors


def test_repeated_tables_are_stored_once(marian_folder: Path) -> None:
    """Older checkpoints have the same table under four names."""
    import_folder(marian_folder).write_bundle()
    size = (marian_folder / "weights.bin").stat().st_size
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    rewrite_tensors(marian_folder, {name: lambda tensors: tensors["model.shared.weight"].clone() for name in names})
    import_folder(marian_folder).write_bundle()
    assert (marian_folder / "weights.bin").stat().st_size == size


# Tables of tokens that a checkpoint has, all with other values.
OWN_TABLES: dict[str, tuple[str, ...]] = {
    "decoder": ("shared", "decoder.embed_tokens"),
    "encoder": ("shared", "encoder.embed_tokens"),
    "both": ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
    "all": ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"),
    "projection": ("shared", "lm_head"),
    "only projection": ("lm_head",),
    "none shared": ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"),
}


@pytest.mark.parametrize("tables", OWN_TABLES)
@pytest.mark.parametrize(
    "name",
    [
        "t5",
        "marian",
        "m2m100",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mt5", "bart", "mbart", "pegasus")),
    ],
)
def test_tables_that_differ_are_those_of_transformers(name: str, tables: str, tmp_path: Path) -> None:
    """Without a projection, it is `shared`, even if the decoder has another table."""
    SEQ2SEQ[name].save(tmp_path)
    write_tables(tmp_path, "" if name.endswith("t5") else "model.", OWN_TABLES[tables])
    model = type(SEQ2SEQ[name].make()).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_equals_transformers(import_folder(tmp_path), model, ComparedTexts(((5, 6, 7),), ((0, 8, 9),)))


def write_tables(folder: Path, start: str, tables: Sequence[str]) -> None:
    """Replace the tables of tokens by random ones."""
    tensors = load_file(folder / "model.safetensors")
    shape = tensors[f"{start}shared.weight"].shape
    ends = ("shared.weight", "embed_tokens.weight", "lm_head.weight")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    names = [name if name == "lm_head" else f"{start}{name}" for name in tables]
    save_file(kept | {f"{name}.weight": 0.3 * torch.randn(shape) for name in names}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "tables", [("encoder.embed_tokens", "decoder.embed_tokens"), ("encoder.embed_tokens", "lm_head")]
)
def test_tables_that_differ_without_a_shared_one_are_rejected(tables: tuple[str, ...], t5_folder: Path) -> None:
    write_tables(t5_folder, "", tables)
    with pytest.raises(ImportFailedError, match=f"'{tables[0]}.weight' and '{tables[1]}.weight' differ, and 'shared'"):
        import_folder(t5_folder)


def test_position_tables_of_a_checkpoint_are_used(marian_folder: Path) -> None:
    names = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    rewrite_tensors(marian_folder, {name: torch.randn(POSITIONS, 36) for name in names})
    model = transformers.MarianMTModel.from_pretrained(marian_folder, attn_implementation="eager").eval()
    check(marian_folder, model, ComparedTexts(((5, 6, 7),), ((96, 8, 9),)))


def test_a_t5_generates_beyond_the_positions_of_its_training(tmp_path: Path) -> None:
    """Relative positions have no limit; those beyond the largest distance share a bucket."""
    longest = 3 * POSITIONS
    model = SEQ2SEQ["t5"].save(tmp_path)
    source = [3 + 7 * index % 90 for index in range(longest)]
    check(tmp_path, model, ComparedTexts((tuple(source),), ((0, *source[1:]),)), max_tokens=longest)
    imported = load_folder(tmp_path, max_tokens=longest)
    assert imported.model.max_positions == longest
    limits = {"max_new_tokens": longest - 1, "min_new_tokens": longest - 1}
    found, _ = transformers_search(Pair(model, imported), source, **limits)
    assert len(found) == longest - 1
    assert searched(imported, source, longest - 1, min_new_tokens=longest - 1).ids == found


def test_the_activation_gelu_10_has_the_limits_of_transformers(tmp_path: Path) -> None:
    SEQ2SEQ["bart"].save(tmp_path, activation_function="gelu_10")
    name = "model.encoder.layers.0.fc1.weight"  # large enough for outputs beyond the limit
    rewrite_tensors(tmp_path, {name: lambda tensors: 30 * tensors[name]})
    texts, outputs = ComparedTexts(((5, 6, 7),), ((2, 8, 9),)), []
    for function in ("gelu_10", "gelu"):
        edit_config(tmp_path, activation_function=function)
        model = transformers.BartForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager").eval()
        check(tmp_path, model, texts)
        outputs.append(import_folder(tmp_path).outputs(texts)["hidden.0"])
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1


def test_unknown_tensors_are_rejected(marian_folder: Path) -> None:
    rewrite_tensors(marian_folder, {"model.encoder.adapter.weight": torch.ones(1)})
    with pytest.raises(ImportFailedError, match=r"model\.encoder\.adapter\.weight"):
        import_folder(marian_folder)


def test_padding_token_in_a_source_takes_no_position(tmp_path: Path) -> None:
    model = SEQ2SEQ["m2m100"].save(tmp_path)
    check(tmp_path, model, ComparedTexts(((5, 1, 6, 1, 1, 7, 8),), ((2, 9, 10),)))


# Values of keys of the configuration that the model does not have, and the messages about them.
REJECTED: dict[str, list[tuple[str, Any, str]]] = read_table(__file__)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"), [(name, *case) for name, cases in REJECTED.items() for case in cases]
)
def test_other_configurations_are_rejected(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    SEQ2SEQ[name].save(tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(ValueError, match=message) as caught:
        import_folder(tmp_path)
    assert isinstance(caught.value, ImportFailedError) or value == "double-gelu"


def test_a_bias_that_the_architecture_excludes_is_rejected(t5_folder: Path) -> None:
    rewrite_tensors(t5_folder, {"encoder.block.0.layer.0.SelfAttention.q.bias": torch.ones(30)})
    with pytest.raises(ImportFailedError, match=r"SelfAttention.q.bias', but its architecture and config.json exclude"):
        import_folder(t5_folder)


@pytest.mark.parametrize("is_tied", [True, False, None])
def test_t5_scales_hidden_states_as_older_configurations_say(is_tied: bool | None, t5_folder: Path) -> None:
    """Without the key of later versions of Transformers, `tie_word_embeddings` decides."""
    edit_config(t5_folder, scale_decoder_outputs=None, tie_word_embeddings=is_tied)
    folder = Folder(t5_folder)
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


def write_tokenizer(folder: Path, name: str) -> None:
    """Write a tokenizer with a word for each token, an end token and three languages."""
    model = SEQ2SEQ[name]
    words = [f"word{index}" for index in range(model.values["vocab_size"])]
    end_id = model.values.get("eos_token_id", 1)
    words[end_id], words[3] = "</s>", "<unk>"
    languages = {"m2m100": ("deu_Latn", "eng_Latn", "fra_Latn"), "mbart": ("de_DE", "en_XX", "fr_XX")}
    special = languages.get(name, ())
    first = model.generation.get("forced_bos_token_id", 0)
    words[first : first + len(special)] = special
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>", "<unk>", *special])
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", end_id)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if name == "mbart":  # mBART-50
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MBart50Tokenizer"}))


def test_mbart_with_unknown_positions_of_languages_is_an_error(tmp_path: Path) -> None:
    SEQ2SEQ["mbart"].save(tmp_path)
    write_tokenizer(tmp_path, "mbart")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ImportFailedError, match=r"for mBART-25, decoder_start_token_id .* such as 62 for en, without"):
        export_checkpoint(Export(tmp_path, tmp_path / "bundle", BundleMetadata("imported")))


def test_families_of_translation_models_are_trained_on_sentences() -> None:
    found = {family.name for family in FAMILIES if family.training_unit == "sentence"}
    assert found == {"marian", "mbart", "m2m_100"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GENERATING if not name.startswith("marian")])
def test_folders_are_imported_and_verified(name: str, tmp_path: Path) -> None:
    """Each import starts a process for its verification."""
    SEQ2SEQ[name].save(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder", name)
    manifest = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("imported"))).manifest
    assert manifest.verification is not None
    assert manifest.verification.max_logit_difference < 10 * TOLERANCE
    assert {attention.kind for attention in manifest.attention} == {"encoder", "cross", "decoder"}
    expected = {"de", "en", "fr"} if name in ("m2m100", "mbart") else set()
    assert set(manifest.languages.targets if manifest.languages else ()) == expected
    assert manifest.training_unit == ("sentence" if expected else "text")

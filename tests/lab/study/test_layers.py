import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.bench.record import Result
from lab.bench.weights import read_model
from lab.study import layers
from lab.study.bleu import SEED
from lab.study.layers import Damage, damage_weights, damages, measure, tables, translations
from lab.zoo.systems import MULTI30K
from sightline.base.bundle import read_manifest
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_checkpoint
from sightline.model.evaluation.bleu import moses_lines, translate

SHIPPED = Path("bundles", MULTI30K.name)
SENTENCES = ("A dog runs in the grass.", "A man sleeps over there.", "Two girls play today.")
REFERENCES = ("Ein Hund rennt im Gras.", "Ein Mann schläft dort.", "Zwei Mädchen spielen heute.")


@torch.no_grad()
def damage_model(model: Transformer, damage: Damage) -> None:
    """Damage the same linear maps as a bundle's."""
    stack = model.encoder if damage.part.startswith("encoder") else model.decoder
    for number in damage.layers:
        layer = stack[number]
        maps = {
            "encoder self-attention": ["self_attention.output"],
            "decoder self-attention": ["self_attention.output"],
            "cross-attention": ["cross_attention.output"],
            "encoder layer": ["self_attention.output", "feed_forward.outer"],
            "decoder layer": ["self_attention.output", "cross_attention.output", "feed_forward.outer"],
        }[damage.part]
        for name in maps:
            linear = layer.get_submodule(name)
            assert isinstance(linear, torch.nn.Linear)
            order = torch.from_numpy(np.random.default_rng(SEED).permutation(model.config.d_model))
            for parameter in (linear.weight, linear.bias):
                parameter.copy_(torch.zeros_like(parameter) if damage.fault == "zero" else parameter[order])


@pytest.mark.parametrize(
    "damage",
    [None, Damage("encoder layer", [0], "zero"), Damage("cross-attention", [1], "shuffled")],
    ids=["whole", "zero", "shuffled"],
)
def test_a_damaged_bundle_translates_like_the_damaged_model_in_pytorch(
    damage: Damage | None, checkpoint: Path, bundle: Path, toy_sentences: list[str]
) -> None:
    model, tokenizer = load_checkpoint(checkpoint)
    assert isinstance(model, Transformer)
    whole = translate(model, tokenizer, toy_sentences, 1, 1.0)
    if damage:
        damage_model(model, damage)
    expected = translate(model, tokenizer, toy_sentences, 1, 1.0)
    assert (expected == whole) == (damage is None)
    assert translations(bundle, damage, toy_sentences) == expected


@pytest.mark.parametrize(
    "damage", [Damage("decoder layer", [1, 3], "zero"), Damage("encoder self-attention", [2], "shuffled")], ids=str
)
def test_of_a_quantized_bundle_only_the_damaged_linear_maps_change(damage: Damage, tmp_path: Path) -> None:
    expected, copy = read_model(SHIPPED), tmp_path / "copy"
    shutil.copytree(SHIPPED, copy)
    assert damage_weights(copy, read_manifest(copy), damage) == {"weights.bin"}
    damage_model(expected, damage)
    for name, tensor in read_model(copy).state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=0, atol=0)


def test_weights_that_a_bundle_lacks_are_an_error(bundle: Path) -> None:
    with pytest.raises(ValueError, match=r"toy has no weights of cross-attention \[9\]"):
        damage_weights(bundle, read_manifest(bundle), Damage("cross-attention", [9], "zero"))


def test_every_damage_is_compared_with_the_whole_model(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / MULTI30K.folder
    folder.mkdir()
    files = {"en": SENTENCES, "de": REFERENCES, "lc.norm.tok.de": moses_lines(list(REFERENCES), "de")}
    for ending, lines in files.items():
        (folder / f"test_2016_flickr.{ending}").write_text("".join(f"{one}\n" for one in lines), encoding="utf-8")

    def translated(found: Path, damage: Damage | None, sources: list[str]) -> list[str]:
        assert (found, tuple(sources)) == (bundle, SENTENCES)
        is_wrong = damage is not None and damage.fault == "zero"
        return ["Ein Hund rennt.", *REFERENCES[1:]] if is_wrong else list(REFERENCES)

    monkeypatch.setattr(layers, "MODELS", (bundle.name,))
    monkeypatch.setattr(layers, "translations", translated)
    result = measure(Namespace(bundles=bundle.parent, data=tmp_path, sentences=None))
    whole, *damaged = result.rows
    assert whole["bleu"] == [100, 100, 100] and whole["difference"] == [0, 0, 0]
    assert [(row["part"], row["layers"], row["fault"]) for row in damaged] == [
        (one.part, one.layers, one.fault) for one in damages(read_manifest(bundle))
    ]
    for row in damaged:
        value, low, high = row["difference"]
        assert low <= value <= high and (value < 0) == (row["fault"] == "zero")
    (part,) = tables(result).values()
    lines = part.splitlines()
    assert lines[0] == "| output of | layer 0 | layer 1 | all layers |"
    assert len(lines) == 2 + 5 + 3 + 2  # parts with a zero output, and kinds of attention with a shuffled one
    assert lines[3] == "| encoder self-attention: shuffled | 0.0 ± 0.0 | 0.0 ± 0.0 |  |"
    assert lines[-1] == "BLEU of the whole: `toy` 100.0 ± 0.0."
    others = [{**row, "model": model} for model in ("multi30k-en-de-small-depth-1", "other") for row in result.rows]
    head = tables(Result(rows=[*result.rows, *others]))["layers-small"].splitlines()[0]
    assert head.startswith("| output of | `small-depth-1`, layer 0 | `small-depth-1`, layer 1 | `small-depth-1`, all")

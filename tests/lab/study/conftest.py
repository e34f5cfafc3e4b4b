"""Fixtures that several tests of the study share."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.study.chats import LINES
from lab.zoo.data import corpus_folder, read_data
from lab.zoo.dialogues import draw_dialogues
from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.base.bundle_files import read_manifest, write_manifest
from sightline.export.options import BundleMetadata
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.factory import build_model
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import CausalConfig, RecurrentConfig, TransformerConfig
from sightline.model.data.text import read_lines
from sightline.model.data.tokenizer_training import read_tokenizer, train_tokenizer
from sightline.model.evaluation.bleu import moses_lines
from sightline.model.training.options import TrainConfig
from sightline.model.training.trainer import Trainer
from sightline.model.training.translation import TRANSLATION
from tests.support.scored_runs import TEST, write_scores
from tests.support.training_runs import export_bundle

ALIGNED = "A man sleeps.\tA dog sleeps.\t0-0 2-2 3-3\t0-0 1p1 2-2 3-3\t0-0 1p1 2-2 3-3\n"


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `checkpoint/`, a causal model with random weights, and `bundles/` with it under the
    names of all chat models.
    """
    import torch

    folder = tmp_path_factory.mktemp("chats")
    texts = [one.text_and_answers()[0] for one in draw_dialogues(1, 200, True)]
    trained = train_tokenizer(texts, vocab_size=400)
    trained.save(str(folder / "tokenizer.json"))
    config = CausalConfig(trained.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=2, max_positions=512)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        model = CausalModel(config)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.embedding.weight *= 0.5
    save_checkpoint(folder / "checkpoint", config, model.state_dict(), folder / "tokenizer.json", {})
    first, *others = (folder / "bundles" / bundle_name(name) for name in LINES)
    export_bundle(folder / "checkpoint", first, BundleMetadata(first.name), texts[:2], check=False)
    for copy in others:
        _copy_bundle(first, copy)
    return folder


def _copy_bundle(bundle: Path, copy: Path) -> None:
    """Copy a bundle, with the name of the new folder."""
    shutil.copytree(bundle, copy)
    write_manifest(copy, read_manifest(copy).model_copy(update={"name": copy.name}))


@pytest.fixture(scope="session")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    bundle: Path,
    classifier_bundle: Path,
    chats: Path,
    checkpoint: Path,
    toy_sentences: list[str],
) -> Path:
    """Create what the steps read: small `bundles/`, `data/` and `runs/` with the names of systems.

    `trained/` has a run that can be resumed, `timed/` its bundle, and `shipped/` the shipped one.
    """
    folder = tmp_path_factory.mktemp("world")
    for name, one in (("multi30k-en-de", bundle), (bundle_name("sentiment"), classifier_bundle)):
        _copy_bundle(one, folder / "bundles" / name)
    for path in (chats / "bundles").iterdir():
        (folder / "bundles" / path.name).symlink_to(path)
    _copy_bundle(bundle, folder / "timed" / bundle_name("transformer"))
    (folder / "shipped").mkdir()
    (folder / "shipped/multi30k-en-de").symlink_to(Path("bundles/multi30k-en-de").absolute())
    (folder / "pairs.tsv").write_text("English\tGerman\tfirst\tsecond\tlinks\n" + 3 * ALIGNED, encoding="utf-8")
    captions, reviews = folder / "data/multi30k", folder / "data/sst2"
    for path in (captions, reviews):
        path.mkdir(parents=True)
    lines = 4 * toy_sentences
    files = {"en": lines, "de": lines[::-1], "lc.norm.tok.de": moses_lines(lines[::-1], "de")}
    for split in ("train", TEST):
        for ending, texts in files.items():
            (captions / f"{split}.{ending}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    for ending, texts in files.items():  # dev must not have all texts of train
        few = texts[: len(toy_sentences) - 1]
        (captions / f"val.{ending}").write_text("".join(f"{text}\n" for text in few), encoding="utf-8")
    for split in ("dev", "test"):
        rows = [f"{number % 3}\t{text}\n" for number, text in enumerate(toy_sentences)]
        (reviews / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    _write_runs(folder, checkpoint)
    return folder


def _write_runs(folder: Path, checkpoint: Path) -> None:
    import torch

    runs, tokenizer = folder / "runs", checkpoint / "tokenizer.json"
    for system in ("bahdanau", "small-bahdanau", "joined-bahdanau"):
        run, data = runs / f"{system}-1", corpus_folder(SYSTEMS[system].corpus, folder / "data", runs)
        write_scores(run, data, read_lines(data / f"{TEST}.de"))
        shutil.copytree(checkpoint, run / "averaged")
        row = {"gradients": {"encoder.0": 3.0, "decoder.0": 1.5}, "scores": {"encoder.0": {"spread": 0.5}}}
        diagnostics = [json.dumps({"epoch": epoch, **row}) for epoch in range(3)]
        (run / "diagnostics.jsonl").write_text("\n".join(diagnostics), encoding="utf-8")
    vocab_size = read_tokenizer(tokenizer).get_vocab_size()
    for system, attention in (("small-bahdanau", True), ("small-fixed-context", False), ("small-initial-state", False)):
        config = RecurrentConfig(
            vocab_size, attention="additive" if attention else "none", embedding_size=8, encoder_size=6,
            decoder_size=10, attention_size=6, feeds_context=system != "small-initial-state",
        )  # fmt: skip
        shutil.rmtree(runs / f"{system}-1/averaged", ignore_errors=True)
        save_checkpoint(runs / f"{system}-1/averaged", config, build_model(config).state_dict(), tokenizer, {})
    chat = {"turns": {"unseen values": {"20": {"all": {"kept": 9, "total": 50, "interval_95": [0.0977, 0.308]}}}}}
    (runs / "chat-gatt-1").mkdir()
    (runs / "chat-gatt-1/scores.json").write_text(json.dumps(chat), encoding="utf-8")
    trained, options = folder / "trained/transformer-1", TrainConfig(batch_tokens=128)
    prepared = read_data(SYSTEMS["transformer"], folder / "data/multi30k", trained, options, 300)
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}
    small = TransformerConfig(prepared.tokenizer.get_vocab_size(), **sizes)
    Trainer(trained, options, TRANSLATION, prepared, small, torch.device("cpu"))
    shutil.copy(runs / "bahdanau-1/log.jsonl", trained)
    (trained / "scores.json").write_text("{}", encoding="utf-8")

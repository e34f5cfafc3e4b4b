"""The shipped model, saved as a model of Transformers and imported, gives the same outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import Sessions, onnx_steps, open_sessions
from sightline.model.architectures.transformer import Transformer
from tests.export.imported import Imported, import_folder, run_rows
from tests.support.reference_decoding import greedy
from tests.zoo.comparing import MAP_TOLERANCE, TOLERANCE


@pytest.fixture(scope="module")
def imported(marian: Any, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp("marian")
    marian.save_pretrained(folder)
    # `save_pretrained` leaves the tables of positions out, although ours are not Marian's.
    state = {name: table for name, table in marian.state_dict().items() if "embed_positions" in name}
    save_file(load_file(folder / "model.safetensors") | state, folder / "model.safetensors")
    return import_folder(folder)


@pytest.fixture(scope="module")
def exported(float_bundle: Path) -> Sessions:
    return open_sessions(float_bundle, read_bundle(float_bundle))


def test_outputs_equal_those_of_the_exported_bundle(
    imported: Imported, exported: Sessions, model: Transformer, sources: list[tuple[int, ...]]
) -> None:
    """Sources have different lengths, and the targets are the beginnings of other sources."""
    rows = sources[:6]
    targets = [[model.config.bos_id, *ids[:8]] for ids in sources[6:12]]
    given, _ = run_rows(imported.sessions, rows, targets)
    expected, _ = run_rows(exported, rows, targets)
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_allclose(one.hidden, other.hidden, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=TOLERANCE)
        for name in ("encoder", "cross", "decoder"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=MAP_TOLERANCE)


def test_translations_equal_those_of_the_exported_bundle(
    imported: Imported, exported: Sessions, model: Transformer, sources: list[tuple[int, ...]]
) -> None:
    config = model.config
    for source in sources[:5]:
        found = [
            greedy(onnx_steps(sessions, source), config.bos_id, config.eos_id, 40).ids
            for sessions in (imported.sessions, exported)
        ]
        assert found[0] == found[1]
        assert found[0][-1] == config.eos_id

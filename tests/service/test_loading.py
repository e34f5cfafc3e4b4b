"""Loading of real bundles. These tests need PyTorch to export them."""

import base64
import contextlib
import dataclasses
import gc
import json
import logging
import os
import re
import secrets
import shutil
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sightline.base.bundle import MANIFEST, MAX_BEAMS, BundleError, Manifest
from sightline.base.bundle_files import check_files, read_manifest, record_files, write_manifest
from sightline.base.threads import run_in_threads
from sightline.export.convert.conversions import half_bundle
from sightline.service import loading
from sightline.service.discovery import find_bundles
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.request import Event, Generated, GenerateRequest
from sightline.service.inference.changes import new_service
from sightline.service.inference.service import Backend
from sightline.service.loading import _prefix_cache_share, load_backend
from sightline.service.metrics import Metrics
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.state_memory import row_bytes
from sightline.service.settings import Settings
from tests.equality.serving import write_bundles
from tests.equality.systems import random_models, small
from tests.support.fake_runner import fake_manifest


@pytest.fixture
def folder(bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "toy")
    return tmp_path


def observer_of(model: str) -> EngineObserver:
    return EngineObserver()


def load(folder: Path, **settings: Any) -> Backend:
    return load_backend(Settings(**{"bundles": folder, "threads": 1, "max_rows": 2, **settings}), observer_of)


def add_another(folder: Path, name: str, **changes: Any) -> Path:
    """Copy the bundle `toy` under another name of its model."""
    added = Path(shutil.copytree(folder / "toy", folder / name))
    write_manifest(added, read_manifest(added).model_copy(update={"name": name, **changes}))
    return added


@pytest.mark.parametrize(
    ("setting", "memory", "share"),
    [({}, 8000, 500), ({}, 1 << 40, 1 << 29), ({"prefix_cache": False}, 8000, 0), ({"memory_bytes": 80}, 8000, 5)],
)
def test_models_that_can_have_a_prefix_cache_share_its_memory(
    setting: dict[str, Any], memory: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.service.settings.usable_memory", lambda: memory)
    causal = fake_manifest(decoder_start="source")
    manifests = [causal, fake_manifest(), causal]
    assert _prefix_cache_share(Settings(**setting), manifests) == share


def test_every_bundle_of_the_folder_is_served_by_its_name(folder: Path) -> None:
    (folder / "README.md").write_text("not a bundle")
    (folder / "empty").mkdir()
    backend = load(folder)
    assert list(backend.loaded) == ["toy"]
    model = backend.loaded["toy"].model
    assert model.provider == "cpu"
    assert model.source_tokenizer is model.target_tokenizer


def test_rows_follow_from_the_memory_for_states_unless_they_are_set(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = read_manifest(folder / "toy")
    add_another(folder, "other")
    enough_for_10 = 2 * 10 * row_bytes(manifest)
    for settings, rows in (
        (Settings(bundles=folder, threads=1, max_state_bytes=enough_for_10), 10),
        (Settings(bundles=folder, threads=1, max_state_bytes=enough_for_10, max_rows=3), 3),
        (Settings(bundles=folder, threads=1, max_state_bytes=MAX_BEAMS * row_bytes(manifest)), MAX_BEAMS),
        (Settings(bundles=folder, threads=1, max_state_bytes=3 * row_bytes(manifest)), 3),
        (Settings(bundles=folder, threads=1, max_state_bytes=1, max_rows=1), 1),
    ):
        backend = load_backend(settings, observer_of)
        assert [one.model.max_rows for one in backend.loaded.values()] == [rows, rows]
        again = backend.repository.load("toy", reserved_bytes=10**9).model.max_rows
        assert again == min(rows, settings.max_rows or MAX_BEAMS), "no other number than at start"
        warnings = [text for text in caplog.messages if f"toy decodes at most {rows} sequences or beams" in text]
        assert len(warnings) == (2 if rows == 3 and not settings.max_rows else 0)
        caplog.clear()


def test_a_model_with_long_sequences_leaves_the_rows_of_the_others(folder: Path) -> None:
    """Regression: a chat model of 8,192 tokens was not served in 2 GB, because it needed 8."""
    manifest = read_manifest(folder / "toy")
    limits = manifest.limits.model_copy(update={"max_source_tokens": 16, "max_target_tokens": 16})
    row = row_bytes(manifest)
    add_another(folder, "short", limits=limits)
    loaded = load_backend(Settings(bundles=folder, threads=1, max_state_bytes=2 * row), observer_of).loaded
    assert {name: one.model.max_rows for name, one in loaded.items()} == {"toy": 2, "short": MAX_BEAMS}


def test_a_model_whose_states_exceed_the_memory_is_an_error_with_the_numbers(folder: Path) -> None:
    row = row_bytes(read_manifest(folder / "toy"))
    message = (
        f"{folder}/toy needs {row:,} bytes of decoder state for a sequence of 256 tokens, but 1,000 bytes are "
        "allowed; import the model again with a lower --max-tokens, or allow more memory (SIGHTLINE_MEMORY_BYTES)"
    )
    with pytest.raises(BundleError, match=re.escape(message)):
        load_backend(Settings(bundles=folder, threads=1, max_state_bytes=1000), observer_of)


def test_threads_are_measured_unless_they_are_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.service.loading.usable_threads", lambda: 2)
    monkeypatch.setattr("sightline.service.runtime.thread_counts.MIN_SECONDS", 0.0)
    monkeypatch.setattr(
        "sightline.service.runtime.thread_counts.MIN_SPEEDUP", 0.0
    )  # so that every measurement chooses more threads
    for threads, chosen in ((0, 2), (1, 1)):
        models = load(folder, threads=threads).loaded
        assert models["toy"].model.threads == {"encoder": chosen, "decoder": chosen}


def test_bundles_with_equal_tokenizers_share_one(folder: Path) -> None:
    add_another(folder, "other")
    models = load(folder).loaded
    assert models["toy"].model.source_tokenizer is models["other"].model.source_tokenizer


def test_bundles_with_different_tokenizers_each_have_their_own(folder: Path) -> None:
    added = add_another(folder, "other")
    manifest = read_manifest(added)
    path = added / manifest.source_tokenizer
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    files = manifest.files | record_files(added, [path.name])
    write_manifest(added, manifest.model_copy(update={"files": files}))
    models = load(folder).loaded
    assert models["toy"].model.source_tokenizer is not models["other"].model.source_tokenizer


def generate(backend: Backend, name: str) -> list[int]:
    results: list[Event] = []
    request = GenerateRequest("r", (11, 52, 90, 2), 1e9, GenerateParameters(max_new_tokens=8))
    backend.loaded[name].engine.submit(request, results.append)
    while backend.loaded[name].engine.has_work:
        backend.loaded[name].engine.step()
    (result,) = results
    assert isinstance(result, Generated)
    return [token.id for token in result.targets[0].tokens]


def test_the_service_never_uses_the_name_of_an_architecture(folder: Path) -> None:
    name = secrets.token_hex()
    add_another(folder, "other", architecture=name)
    backend = load(folder)
    assert backend.loaded["other"].model.manifest.architecture == name
    assert backend.loaded["toy"].model.manifest.architecture != name
    assert generate(backend, "other") == generate(backend, "toy")


def test_a_float16_bundle_is_served_on_the_cpu(bundle: Path, tmp_path: Path) -> None:
    half_bundle(bundle, tmp_path / "half", None)
    backend = load(tmp_path)
    assert (backend.loaded["half"].model.provider, backend.loaded["half"].model.manifest.dtype) == ("cpu", "float16")
    requests = [GenerateRequest(name, (11, 52, 90, 2), 1e9, GenerateParameters(max_new_tokens=4)) for name in "abc"]
    results: list[Event] = []
    for request in requests:
        backend.loaded["half"].engine.submit(request, results.append)
    while backend.loaded["half"].engine.has_work:
        backend.loaded["half"].engine.step()
    targets = [result.targets[0].tokens for result in results if isinstance(result, Generated)]
    assert len(targets) == 3 and targets[0] == targets[1] == targets[2]


def test_a_bundle_that_cuda_cannot_run_is_rejected_if_cuda_is_requested(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.service.loading.choose_provider", lambda _: "cuda")
    assert load(folder).loaded["toy"].model.provider == "cpu"
    with pytest.raises(
        BundleError, match=r"toy is float32, but CUDA needs float16; see `sightline quantize --bits 16`"
    ):
        load(folder, provider="cuda")


def remove_manifest(folder: Path) -> None:
    (folder / "toy" / MANIFEST).unlink()


def truncate_weights(folder: Path) -> None:
    manifest = read_manifest(folder / "toy")
    path = folder / "toy" / max(manifest.files, key=lambda name: manifest.files[name].bytes)
    path.write_bytes(path.read_bytes()[:-1])


def add_a_twin(folder: Path) -> None:
    shutil.copytree(folder / "toy", folder / "twin")


def shrink_vocabulary(folder: Path) -> None:
    manifest = read_manifest(folder / "toy")
    limits = manifest.limits.model_copy(update={"vocabulary": 10})
    write_manifest(folder / "toy", manifest.model_copy(update={"limits": limits}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_manifest, "no folder in"),
        (truncate_weights, "SHA-256"),
        (add_a_twin, "two bundles in .* are named toy"),
        (shrink_vocabulary, "tokens, the model knows 10"),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_an_invalid_bundle_is_rejected_with_the_reason(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(BundleError, match=message):
        load(folder, strict_loading=True)


def test_a_bundle_of_standard_operators_is_not_supported(folder: Path) -> None:
    path = folder / "toy" / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"contrib"', '"standard"'), encoding="utf-8")
    message = "Input should be 'contrib'; export the model again"
    with pytest.raises(BundleError, match=f"{re.escape(str(path))}: ops: .*{message}"):
        load(folder, strict_loading=True)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"program": "{% for"}, "toy: the chat template cannot be used: it is not valid Jinja"),
        ({"user": "{}", "reply": ""}, "chat.program: Field required; export the model again"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_named(folder: Path, chat: Any, message: str) -> None:
    path = folder / "toy" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"chat": chat}), encoding="utf-8")
    with pytest.raises(BundleError, match=message):
        load(folder, strict_loading=True)


def test_a_bundle_with_a_lazy_manifest_is_loaded_on_its_first_use_and_takes_no_rows_from_others(folder: Path) -> None:
    added = add_another(folder, "lazy")
    manifest = read_manifest(added)
    settings = Settings(bundles=folder, threads=1, max_state_bytes=16 * row_bytes(manifest))
    assert load_backend(settings, observer_of).max_rows == 8
    write_manifest(added, manifest.model_copy(update={"lazy": True}))
    backend = load_backend(settings, observer_of)
    assert backend.max_rows == 16
    assert (list(backend.loaded), list(backend.lazy)) == (["toy"], ["lazy"])
    backend.repository.load("lazy", 0)


def forget_the_schema(folder: Path) -> None:
    (folder / "toy" / MANIFEST).write_text("{}")


def write_no_graph(folder: Path) -> None:
    (folder / "toy" / "step.onnx").write_text("no graph")
    record_again(folder / "toy")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            truncate_weights,
            "toy/weights.bin does not match the SHA-256 in the manifest; copy or export the bundle again",
        ),
        (forget_the_schema, "toy/manifest.json has schema_version None, this service needs 5; export the bundle again"),
        (write_no_graph, "toy/step.onnx cannot be used: "),
    ],
)
def test_a_bundle_that_fails_to_load_is_logged_with_its_reason_and_the_others_are_served(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    add_another(folder, "other")
    damage(folder)
    backend = load(folder)
    assert list(backend.loaded) == ["other"]
    assert list(backend.failed) == ["toy"]
    assert backend.failed["toy"].startswith(f"{folder}/{reason}")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [f"a bundle is not served: {backend.failed['toy']}"]
    assert generate(backend, "other")
    with pytest.raises(BundleError, match=f"^{re.escape(backend.failed['toy'])}$"):
        load(folder, strict_loading=True)


def test_a_default_model_that_fails_to_load_is_an_error_though_others_would_load(folder: Path) -> None:
    add_another(folder, "other")
    truncate_weights(folder)
    assert list(load(folder, default_model="other").loaded) == ["other"]
    with pytest.raises(
        BundleError, match=r"^the default model toy failed to load: .*toy/weights\.bin does not match the SHA-256"
    ):
        load(folder, default_model="toy")
    forget_the_schema(folder)
    with pytest.raises(
        BundleError, match=r"^the default model toy is not in .*, which has other; .*schema_version None"
    ):
        load(folder, default_model="toy")


def test_a_change_of_the_first_model_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_another(folder, "unharmed")
    truncate_weights(folder)
    load(folder)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "requests for generate, encode, attention that name no model use unharmed, because others failed to load"
    ]


def test_tasks_that_only_a_failed_model_can_do_are_logged(
    folder: Path, classifier_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(classifier_bundle, folder / "other")
    truncate_weights(folder)
    load(folder)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(warnings) == [
        "requests for encode, attention that name no model use toy-classifier, because others failed to load",
        "requests for generate that name no model fail, because toy failed to load",
    ]


def test_if_no_bundle_loads_the_error_has_every_reason(folder: Path) -> None:
    truncate_weights(folder)
    (add_another(folder, "other") / MANIFEST).write_text("{}")
    with pytest.raises(
        BundleError, match=r"other/manifest\.json has schema_version None.*; .*toy/weights\.bin does not match"
    ):
        load(folder)
    forget_the_schema(folder)
    with pytest.raises(BundleError, match=r"other/manifest\.json has .*; .*toy/manifest\.json has schema_version"):
        load(folder)


def test_a_folder_whose_name_is_not_utf_8_is_named_in_ascii(folder: Path) -> None:
    shutil.copytree(folder / "toy", folder / os.fsdecode(b"bad\xff"))  # fails as the second bundle of this name
    shutil.move(folder / "toy", folder / "a")
    assert list(load(folder).failed) == ["bad\\udcff"]


def test_the_first_of_two_bundles_with_one_name_is_served(folder: Path) -> None:
    add_a_twin(folder)
    backend = load(folder)
    assert list(backend.loaded) == ["toy"]
    assert backend.failed == {
        "twin": f"two bundles in {folder} are named toy: toy and twin; remove one of them, because requests choose "
        "models by name"
    }


@pytest.mark.parametrize("copy", ["a copy", "z copy"])
def test_a_damaged_copy_is_reported_and_the_good_bundle_of_the_same_name_is_served(folder: Path, copy: str) -> None:
    shutil.copytree(folder / "toy", folder / copy)
    weights = folder / copy / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    backend = load(folder)
    assert list(backend.loaded) == ["toy"] and list(backend.failed) == [copy]
    reason = "does not match the SHA-256" if copy == "a copy" else "two bundles in .* are named toy: toy and z copy"
    assert re.search(reason, backend.failed[copy])


def test_an_unknown_default_model_is_rejected_before_anything_is_loaded(folder: Path) -> None:
    truncate_weights(folder)
    with pytest.raises(BundleError, match="the default model other is not in"):
        find_bundles(folder, ["other"])


@pytest.fixture(scope="module")
def recurrent_bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = checkpoint / "tokenizer.json"
    models = random_models({"recurrent": small("luong-general")}, tokenizer, noise=0.2)
    written = write_bundles(tmp_path_factory.mktemp("recurrent"), models, tokenizer)
    return written / "bundles" / "recurrent"


@pytest.fixture
def copy_of(
    bundle: Path, classifier_bundle: Path, recurrent_bundle: Path, tmp_path: Path
) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that copies a bundle; it returns the folder of bundles and the copy."""
    kinds = {"transformer": bundle, "classifier": classifier_bundle, "recurrent": recurrent_bundle}
    return lambda kind: (tmp_path, Path(shutil.copytree(kinds[kind], tmp_path / "spoilt")))


def record_again(bundle: Path) -> None:
    """Write the hashes of the present files into the manifest."""
    manifest = read_manifest(bundle)
    write_manifest(bundle, manifest.model_copy(update={"files": record_files(bundle, manifest.files)}))


def spoil(bundle: Path, tensor: str, value: float) -> None:
    """Set all elements of a tensor to a value, and record the new hashes."""
    weights = np.fromfile(bundle / "weights.bin", np.uint8)
    is_found = False
    for graph in read_manifest(bundle).graphs:
        for initializer in onnx.load_model(bundle / graph.file, load_external_data=False).graph.initializer:
            if initializer.name == tensor:
                location = {entry.key: entry.value for entry in initializer.external_data}
                first = int(location["offset"])
                weights[first : first + int(location["length"])].view(np.float32)[:] = value
                is_found = True
    assert is_found
    weights.tofile(bundle / "weights.bin")
    record_again(bundle)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("classifier", "encoder.1.feed_forward.inner.weight"),
        ("transformer", "decoder.0.cross_attention.query.bias"),
        ("recurrent", "encoder.weight_hh"),  # the encoder turns it into finite numbers
        ("recurrent", "readout.weight"),
    ],
)
def test_weights_that_are_not_finite_are_rejected_although_their_hashes_match(
    copy_of: Callable[[str], tuple[Path, Path]], kind: str, tensor: str
) -> None:
    folder, bundle = copy_of(kind)
    load(folder)
    spoil(bundle, tensor, np.nan)
    with pytest.raises(BundleError, match=r"spoilt/weights\.bin has weights that are not finite numbers"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "tensor", "task"),
    [
        ("classifier", "head.output.weight", "encode"),
        ("transformer", "encoder.1.feed_forward_norm.weight", "encode"),
        ("transformer", "decoder.1.feed_forward_norm.weight", "generate"),
    ],
)
def test_a_bundle_that_overflows_on_the_known_input_is_rejected(
    copy_of: Callable[[str], tuple[Path, Path]], kind: str, tensor: str, task: str
) -> None:
    folder, bundle = copy_of(kind)
    spoil(bundle, tensor, 3e38)
    with pytest.raises(BundleError, match=f"spoilt cannot be served: a known input of the task {task} fails or gives"):
        load(folder)


def use_an_unknown_operator(bundle: Path) -> None:
    model = onnx.load_model(bundle / "encoder.onnx", load_external_data=False)
    model.graph.node[0].op_type = "Unheard"
    onnx.save_model(model, bundle / "encoder.onnx")


def swap_graphs(bundle: Path) -> None:
    shutil.copyfile(bundle / "encoder.onnx", bundle / "step.onnx")


def write_text_as_a_graph(bundle: Path) -> None:
    (bundle / "step.onnx").write_text("no graph")


def name_a_missing_output(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    encoder = manifest.encoder_graph.model_copy(update={"outputs": (*manifest.encoder_graph.outputs, "more")})
    write_manifest(bundle, manifest.model_copy(update={"encoder": encoder}))


def write_text_as_a_tokenizer(bundle: Path) -> None:
    (bundle / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    "damage",
    [use_an_unknown_operator, swap_graphs, write_text_as_a_graph, name_a_missing_output, write_text_as_a_tokenizer],
)
def test_every_error_of_loading_names_the_bundle(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "toy")
    record_again(folder / "toy")
    with pytest.raises(BundleError, match=f"{folder}/toy"):
        load(folder)


def panic_in_the_tokenizer(bundle: Path) -> None:
    """Name a table of characters that is too short, as a damaged SentencePiece model does."""
    table = base64.b64encode(struct.pack("<I", 4) + bytes(4)).decode()
    set_normalizer(bundle, {"type": "Precompiled", "precompiled_charsmap": table})


def double_texts_forty_times(bundle: Path) -> None:
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    set_normalizer(bundle, {"type": "Sequence", "normalizers": [doubling] * 40})


def set_normalizer(bundle: Path, normalizer: dict[str, Any]) -> None:
    path = bundle / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": normalizer}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (panic_in_the_tokenizer, "cannot be used: index out of bounds"),
        (
            double_texts_forty_times,
            r"cannot be used: its normalizer can make a text 1.1e\+12 times longer; at most 1000 is allowed",
        ),
    ],
)
@pytest.mark.parametrize("is_lazy", [False, True], ids=["at start", "lazy"])
def test_a_tokenizer_that_panics_or_explodes_is_the_failure_of_its_bundle_only(
    folder: Path, damage: Callable[[Path], None], reason: str, is_lazy: bool
) -> None:
    damage(add_another(folder, "damaged"))
    record_again(folder / "damaged")
    backend = load(folder, lazy_models="damaged" if is_lazy else "")
    assert list(backend.loaded) == ["toy"]
    assert set(backend.failed) == (set() if is_lazy else {"damaged"})
    with pytest.raises(BundleError, match=f"{folder}/damaged/tokenizer.json {reason}"):
        backend.repository.load("damaged", 0)


def test_a_bundle_that_does_not_load_in_time_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_another(folder, "endless")
    release = threading.Event()
    check = loading._check_known_inputs

    def check_known_inputs(folder: Path, runner: Any) -> None:
        if folder.name == "endless":
            release.wait()
        check(folder, runner)

    monkeypatch.setattr(loading, "_check_known_inputs", check_known_inputs)
    try:
        backend = load(folder, load_timeout_s=1.0)
    finally:
        release.set()
    assert list(backend.loaded) == ["toy"]
    assert backend.failed == {
        "endless": f"{folder}/endless did not load within 1 seconds; remove it, or put it on a faster disk"
    }


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Run the block as another user if this one is root, who may enter every folder."""
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            os.seteuid(65534)
            stack.callback(os.seteuid, 0)
        yield


@pytest.fixture
def entered_by_all(bundle: Path) -> Iterator[Path]:
    """Yield a folder with the bundle `toy` that every user can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as path:
        os.chmod(path, 0o755)
        shutil.copytree(bundle, Path(path, "toy"))
        yield Path(path)


@pytest.mark.parametrize("has_another", [True, False])
def test_a_bundle_folder_that_cannot_be_entered_is_rejected_by_name(entered_by_all: Path, has_another: bool) -> None:
    closed = entered_by_all / "closed"
    shutil.copytree(entered_by_all / "toy", closed)
    write_manifest(closed, read_manifest(closed).model_copy(update={"name": "closed"}))
    if not has_another:
        shutil.rmtree(entered_by_all / "toy")
    with not_root():
        assert closed in find_bundles(entered_by_all)
    closed.chmod(0o600)
    with (
        not_root(),
        pytest.raises(BundleError, match=rf"{closed} cannot be entered: Permission denied; give user \d+,"),
    ):
        find_bundles(entered_by_all)
    closed.chmod(0o755)


def test_a_folder_of_bundles_that_cannot_be_listed_is_rejected_by_name(entered_by_all: Path) -> None:
    entered_by_all.chmod(0o300)
    with not_root(), pytest.raises(BundleError, match=rf"{entered_by_all} cannot be listed: Permission denied; give"):
        find_bundles(entered_by_all)
    entered_by_all.chmod(0o755)


def test_files_of_an_interrupted_export_are_logged_and_not_served(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".toy.old", ".toy.new"):
        shutil.copytree(folder / "toy", folder / name)
    (folder / ".cache").mkdir()
    with caplog.at_level(logging.WARNING):
        assert list(find_bundles(folder)) == [folder / "toy"]
    assert [record.getMessage().split(" is hidden")[0] for record in caplog.records] == [
        f"{folder}/.toy.new",
        f"{folder}/.toy.old",
    ]
    shutil.rmtree(folder / "toy")
    with pytest.raises(BundleError, match=f"no folder in {folder} has a {MANIFEST}; `sightline models get`"):
        find_bundles(folder)


def test_bundles_are_opened_at_the_same_time_and_run_one_after_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "toy"]
    for name in names[:2]:
        add_another(folder, name)
    both_open = threading.Barrier(2)
    num_running = 0

    def check_files(folder: Path, manifest: Manifest) -> None:
        if folder.name != "toy":  # the first two threads wait for each other
            both_open.wait(timeout=10)

    def check_known_inputs(folder: Path, runner: Any) -> None:
        nonlocal num_running
        num_running += 1
        assert num_running == 1 and not any(re.fullmatch(r"load-\d+", one.name) for one in threading.enumerate())
        num_running -= 1

    monkeypatch.setattr("sightline.service.loading.usable_threads", lambda: 2)
    monkeypatch.setattr("sightline.service.loading.check_files", check_files)
    monkeypatch.setattr("sightline.service.loading._check_known_inputs", check_known_inputs)
    assert list(load(folder).loaded) == names


def test_failures_are_reported_in_the_order_of_the_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        add_another(folder, name)
    last_failed = threading.Event()

    def check_files(folder: Path, manifest: Manifest) -> None:
        if folder.name == "a":  # fails after the others
            assert last_failed.wait(timeout=10)
        if folder.name == "c":
            last_failed.set()
        if folder.name != "b":
            raise BundleError(f"{folder.name} is damaged")

    monkeypatch.setattr("sightline.service.loading.usable_threads", lambda: 3)
    monkeypatch.setattr("sightline.service.loading.check_files", check_files)
    backend = load(folder)
    assert list(backend.loaded) == ["b"]
    assert list(backend.failed.items()) == [(name, f"{name} is damaged") for name in ("a", "c", "toy")]
    with pytest.raises(BundleError, match=r"^a is damaged$"):
        load(folder, strict_loading=True)


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_functions_in_threads_return_their_results_in_order_or_raise_the_first_error(num_threads: int) -> None:
    assert run_in_threads([], num_threads) == []
    assert run_in_threads([lambda number=number: number**2 for number in range(5)], num_threads) == [0, 1, 4, 9, 16]  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        run_in_threads([lambda: 1, lambda: 1 // 0, lambda: [][0]], num_threads)


def test_a_later_load_gets_the_rows_that_fit_in_the_remaining_memory(folder: Path) -> None:
    row = row_bytes(read_manifest(folder / "toy"))
    add_another(folder, "other")
    settings = Settings(bundles=folder, threads=1, max_state_bytes=30 * row)
    repository = load_backend(settings, observer_of).repository
    for reserved, rows in ((0, 30), (10 * row, 20), (30 * row, MAX_BEAMS), (100 * row, MAX_BEAMS)):
        assert repository.load("toy", reserved).model.max_rows == rows
    repository = load_backend(settings.model_copy(update={"max_rows": 3}), observer_of).repository
    assert repository.load("toy", 0).model.max_rows == 3


def test_a_later_load_checks_the_bundle_as_the_start_does(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    added = add_another(folder, "other")
    backend = load(folder)
    repository = backend.repository
    shutil.move(added, folder / "elsewhere")  # the name is in the manifest, not that of the folder
    assert list(repository.find()) == ["other", "toy"]
    loaded = repository.load("other", 0)
    assert loaded.model.source_tokenizer is backend.loaded["toy"].model.source_tokenizer
    again = dataclasses.replace(backend, loaded={"again": loaded})
    assert generate(again, "again") == generate(backend, "toy")
    with pytest.raises(BundleError, match=r"no bundle in .* is named elsewhere"):
        repository.load("elsewhere", 0)
    truncate_weights(folder)
    with pytest.raises(BundleError, match=r"toy/weights\.bin does not match the SHA-256"):
        repository.load("toy", 0)
    forget_the_schema(folder)
    assert list(repository.find()) == ["other"]
    shutil.rmtree(folder)
    assert repository.find() == {}
    assert caplog.records[-1].getMessage().startswith(f"the bundles folder cannot be used: there is no folder {folder}")


def test_a_load_that_fails_midway_leaves_no_memory_allocated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load(folder)
    runners: list[weakref.ref[Any]] = []

    def fail(folder: Path, runner: Any) -> None:
        runners.append(weakref.ref(runner))
        raise MemoryError("half-way")

    monkeypatch.setattr("sightline.service.loading._check_known_inputs", fail)
    with pytest.raises(BundleError, match="toy cannot be served: MemoryError: half-way"):
        backend.repository.load("toy", 0)
    gc.collect()
    assert runners[0]() is None


def test_a_lazy_bundle_is_not_opened_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_another(folder, "other")
    truncate_weights(folder)
    opened: list[str] = []

    def check(path: Path, manifest: Manifest) -> None:
        opened.append(manifest.name)
        check_files(path, manifest)

    monkeypatch.setattr("sightline.service.loading.check_files", check)
    backend = load(folder, lazy_models="toy", strict_loading=True)
    assert (list(backend.loaded), list(backend.lazy), backend.failed, opened) == (["other"], ["toy"], {}, ["other"])
    assert backend.lazy["toy"] == read_manifest(folder / "toy")
    with pytest.raises(BundleError, match=r"toy/weights\.bin does not match the SHA-256"):
        backend.repository.load("toy", 0)
    assert list(load(folder, lazy_models=" toy , other").lazy) == ["other", "toy"]
    backend = load(folder, lazy_models="*", default_model="toy")
    assert (list(backend.loaded), list(backend.lazy)) == ([], ["other", "toy"])


def test_memory_for_states_is_reserved_for_lazy_models(folder: Path) -> None:
    row = row_bytes(read_manifest(folder / "toy"))
    for name in ("a", "b"):
        add_another(folder, name)
    settings = Settings(bundles=folder, threads=1, max_state_bytes=3 * 10 * row, lazy_models="a,b")
    backend = load_backend(settings, observer_of)
    assert [backend.loaded["toy"].model.max_rows, backend.max_rows] == [10, 10]
    service = new_service(settings, Metrics("0"))
    service.attach(backend)
    for name in ("a", "b"):
        assert service.reserved_bytes(name) == 2 * 10 * row
        loaded = backend.repository.load(name, service.reserved_bytes(name))
        assert loaded.model.max_rows == 10
        service.list_model(loaded.model.manifest, loaded.model.max_rows, loaded)
    assert service.reserved_bytes("new") == 3 * 10 * row


def test_a_lazy_model_whose_states_exceed_the_memory_is_not_served(folder: Path) -> None:
    with pytest.raises(BundleError, match="but 1,000 bytes are allowed"):
        load_backend(Settings(bundles=folder, threads=1, max_state_bytes=1000, lazy_models="*"), observer_of)


def test_an_unknown_lazy_model_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(folder, lazy_models="toy,toi")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["SIGHTLINE_LAZY_MODELS names toi, but no bundle with this name is served"]


def test_a_load_reports_its_duration(folder: Path) -> None:
    add_another(folder, "other")
    started = time.perf_counter()
    backend = load(folder, lazy_models="other")
    assert 0 < backend.loaded["toy"].model.load_seconds < time.perf_counter() - started
    assert backend.repository.load("other", 0).model.load_seconds > 0


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("toy", " (did you mean bundles/toy?)"),
        ("bundles/tay", " (did you mean bundles/toy?)"),
        ("something", "; bundles are bundles/toy"),
    ],
)
def test_an_unknown_bundle_is_answered_with_those_that_exist(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    shutil.copytree(bundle, tmp_path / "bundles" / "toy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match=re.escape(f"{name} is not a bundle: it has no {MANIFEST}{end}") + "$"):
        read_manifest(Path(name))

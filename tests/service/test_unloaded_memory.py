"""The memory of a real bundle: none before its first use, and none after it is unloaded."""

import gc
import math
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sightline.base.bundle import Graph, Manifest
from sightline.base.bundle_files import read_manifest, record_files, write_manifest
from sightline.base.machine import resident_bytes
from sightline.service.compat.open_inference.models import LoadBody, UnloadBody, repository_load, repository_unload
from sightline.service.engine.engine import Engine
from sightline.service.engine.observer import EngineObserver
from sightline.service.inference.call import Call
from sightline.service.inference.changes import new_service, reload
from sightline.service.inference.service import Service
from sightline.service.loading import load_backend
from sightline.service.metrics import Metrics
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.settings import Settings

WIDTH = 5000
WEIGHT_BYTES = 4 * WIDTH * WIDTH  # 100 MB: other changes of the process's memory are small beside it
# Growth of the memory of the process with and without the weights. The allocator reuses and keeps
# some 15 MB from other tests.
LOADED, UNLOADED = 0.75 * WEIGHT_BYTES, 0.25 * WEIGHT_BYTES
STATE_ROWS = 400  # some fifty megabytes


def write_large_bundle(toy: Path, folder: Path, layers: int = 1) -> Manifest:
    """Write an encoder and the tokenizer of the toy bundle.

    The matrices of the layers have `WEIGHT_BYTES` together; `layers` must be a square number.
    """
    width = WIDTH // math.isqrt(layers)
    folder.mkdir()
    manifest = read_manifest(toy)
    shutil.copy(toy / manifest.source_tokenizer, folder)
    vocabulary = manifest.limits.vocabulary
    arrays = {
        "embedding": np.full((vocabulary, width), 0.01, np.float32),
        # Different matrices, because ONNX Runtime keeps equal ones once.
        **{f"matrix.{layer}": np.full((width, width), 1e-3 + 1e-6 * layer, np.float32) for layer in range(layers)},
    }
    values = ["embedded", *(f"hidden.{layer}" for layer in range(1, layers)), "hidden"]
    initializers, offset = [], 0
    with (folder / "weights.bin").open("wb") as file:
        for name, array in arrays.items():
            file.write(array.tobytes())
            initializer = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=array.shape)
            initializer.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", "weights.bin"), ("offset", offset), ("length", array.nbytes)):
                initializer.external_data.add(key=key, value=str(value))
            initializers.append(initializer)
            offset += array.nbytes
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Gather", ["embedding", "source_ids"], ["embedded"]),
            *(
                onnx.helper.make_node("MatMul", [values[layer], f"matrix.{layer}"], [values[layer + 1]])
                for layer in range(layers)
            ),
        ],
        "encoder",
        [
            onnx.helper.make_tensor_value_info("source_ids", onnx.TensorProto.INT64, ["batch", "source"]),
            onnx.helper.make_tensor_value_info("source_lengths", onnx.TensorProto.INT32, ["batch"]),
        ],
        [onnx.helper.make_tensor_value_info("hidden", onnx.TensorProto.FLOAT, ["batch", "source", width])],
        initializers,
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    (folder / "encoder.onnx").write_bytes(model.SerializeToString())
    files = record_files(folder, ["encoder.onnx", "weights.bin", manifest.source_tokenizer])
    changes = {
        "name": "large",
        "tasks": ("encode",),
        "encoder": Graph(file="encoder.onnx", inputs=("source_ids", "source_lengths"), outputs=("hidden",)),
        "decoder": None,
        "states": (),
        "attention": (),
        "alignment": None,
        "coverage": None,
        "languages": None,
        "training_unit": "text",
        "target_tokenizer": manifest.source_tokenizer,
        "verification": None,
        "files": files,
    }
    large = manifest.model_copy(update=changes)
    write_manifest(folder, large)
    return large


@pytest.fixture(scope="module")
def bundles(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    shutil.copytree(bundle, folder / "toy")
    write_large_bundle(bundle, folder / "large")
    return folder


@pytest.fixture
async def service(bundles: Path) -> Service:
    """A service that has loaded no bundle yet."""
    settings = Settings(
        bundles=bundles,
        default_model="toy",
        lazy_models="*",
        model_control="explicit",
        threads=1,
        max_rows=STATE_ROWS,
        max_batch_tokens=16,  # larger runs would take long
    )
    backend = load_backend(settings, lambda model: EngineObserver())
    service = new_service(settings, Metrics("0"))
    backend.worker.start()
    service.attach(backend)
    return service


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which the service must not depend on to release memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def bytes_with_toy(call: Call) -> int:
    """Return the memory of the process when libraries are in use, and none is kept from before."""
    await call.model("toy")
    await call.service.worker.release_memory()
    return resident_bytes()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_garbage_collection")
async def test_weights_use_memory_from_the_first_use_until_the_unload(service: Service) -> None:
    call = Call(service, "r")
    before = await bytes_with_toy(call)
    await call.model("large")
    assert resident_bytes() - before > LOADED
    runner = weakref.ref(runner_of(service, "large"))
    await repository_unload(call, "large", UnloadBody())
    assert runner() is None
    assert resident_bytes() - before < UNLOADED
    await repository_load(call, "large", LoadBody())
    assert resident_bytes() - before > LOADED
    await service.stop()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_garbage_collection")
async def test_one_reference_to_an_unloaded_engine_keeps_its_weights(service: Service) -> None:
    """The test above detects a remaining reference."""
    call = Call(service, "r")
    before = await bytes_with_toy(call)
    await call.model("large")
    kept = engine_of(service, "large")
    await repository_unload(call, "large", UnloadBody())
    assert resident_bytes() - before > LOADED
    del kept
    assert resident_bytes() - before < UNLOADED
    await service.stop()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_model_that_is_loaded_again_is_unloaded_before(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner_before_load: list[OnnxRunner | None] = []
    call = service.peers.call

    async def load(name: str, *arguments: Any) -> Any:
        runner_before_load.append(runner())
        return await call(name, *arguments)

    await Call(service, "r").model("toy")
    runner = weakref.ref(runner_of(service, "toy"))
    monkeypatch.setattr(service.peers, "call", load)
    assert await reload(service, "toy")
    assert runner_before_load == [None]
    await service.stop()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_garbage_collection")
async def test_states_use_no_memory_after_the_unload(service: Service) -> None:
    call = Call(service, "r")
    await call.model("toy")
    groups = runner_of(service, "toy")._groups
    num_bytes = sum(group._rows.nbytes for group in groups)  # type: ignore[attr-defined]
    for group in groups:
        group._rows[:] = 1  # type: ignore[attr-defined] # memory is allocated when it is written
    arrays = [weakref.ref(group) for group in groups]
    del groups, group
    before = resident_bytes()
    await repository_unload(call, "toy", UnloadBody())
    assert [array() for array in arrays] == [None] * len(arrays)
    assert before - resident_bytes() > 0.9 * num_bytes
    await service.stop()


def engine_of(service: Service, name: str) -> Engine:
    loaded = service.models[name].loaded
    assert loaded is not None
    return loaded.engine


def runner_of(service: Service, name: str) -> OnnxRunner:
    runner = engine_of(service, name)._runner
    assert isinstance(runner, OnnxRunner)
    return runner

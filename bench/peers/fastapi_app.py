"""CTranslate2 behind a plain FastAPI endpoint; run it as `python -m bench.peers.fastapi_app`."""

from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from bench.peers.translation import PATH, Translation, peer_parser


class Body(BaseModel):
    inputs: str


def make_app(translation: Translation) -> FastAPI:
    app = FastAPI()

    @app.post(PATH)
    def generate(body: Body) -> dict[str, Any]:
        (response,) = translation.translate([translation.tokenize(body.inputs)])
        return response

    @app.get("/health")
    def health() -> str:
        return "ok"

    return app


if __name__ == "__main__":
    arguments = peer_parser(__doc__).parse_args()
    app = make_app(Translation(arguments))
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)

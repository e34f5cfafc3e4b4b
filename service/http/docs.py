"""GET /openapi.json and GET /docs: the API as JSON, and as a page by Swagger UI.

The files of Swagger UI come from the package `fastapi-offline`, so the page loads nothing from
other hosts. A content security policy forbids that, too.
"""

import asyncio
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI

from sightline.service.api.endpoint import HTML, JSON, Call, Endpoint, Headers, Raw, described, to_json
from sightline.service.api_errors import ApiError
from sightline.service.http.http_call import HttpCall
from sightline.service.http.static import MEDIA_TYPES, StaticContent, read_files

Made = TypeVar("Made")
FILE_TYPES = (MEDIA_TYPES["css"], HTML, MEDIA_TYPES["js"])
OWN_FILES, SWAGGER_FILES = ("docs.html", "docs.js"), ("swagger-ui-bundle.js", "swagger-ui.css")


def make_document(app: FastAPI) -> StaticContent:
    return StaticContent(to_json(app.openapi()), JSON)


def make_page(app: FastAPI) -> Mapping[str, StaticContent]:
    """Return the files of the page by name."""
    own, swagger = files("sightline.service.http"), files("fastapi_offline") / "static"
    paths = [*(own / name for name in OWN_FILES), *(swagger / name for name in SWAGGER_FILES)]
    return read_files(paths, app.state.service.settings.allowed_frames)


async def _made(call: Call, make: Callable[[FastAPI], Made]) -> Made:
    """Return what is made of the app at the first call, as it takes some tenths of a second."""
    assert isinstance(call, HttpCall)
    app: FastAPI = call.scope["app"]
    made: dict[Any, asyncio.Future[Made]] = app.state.made
    if make not in made:  # in a thread, so that other calls continue
        made[make] = asyncio.ensure_future(asyncio.to_thread(make, app))
    return await asyncio.shield(made[make])  # a caller that is cancelled must not cancel it for the others


async def openapi(call: Call, headers: Headers) -> Raw:
    """Describe this API for machines."""
    return (await _made(call, make_document)).response(headers)


async def docs(call: Call, headers: Headers) -> Raw:
    """Show this API as a page that can call it."""
    return (await _made(call, make_page))["docs.html"].response(headers)


async def docs_file(
    call: Call, file: Annotated[str, described("Name of a file of the page.")], headers: Headers
) -> Raw:
    """Return a file of the page that shows this API: a script or its styles."""
    page = await _made(call, make_page)
    if file not in page:
        raise ApiError("not_found", f"The page has no file of this name; its files are {', '.join(page)}.")
    return page[file].response(headers)


ENDPOINTS = (
    Endpoint("GET", "/openapi.json", openapi, dict[str, Any], ignores_query=True),
    Endpoint("GET", "/docs", docs, media_types=(HTML,), ignores_query=True),
    Endpoint("GET", "/docs/{file}", docs_file, errors=("not_found",), media_types=FILE_TYPES, ignores_query=True),
)

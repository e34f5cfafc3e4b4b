"""GET / and GET /page/{file}: the page that translates, and shows the attention of models.

The page is static: HTML, CSS and ES modules in `service/page`, without a build step. Its script
uses the public API only. A content security policy forbids content from other hosts.
"""

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Annotated

from sightline.service.api.endpoint import HTML, JSON, Call, Endpoint, Headers, Raw, described, prefers, to_json
from sightline.service.api.root import Root, root_of
from sightline.service.api_errors import ApiError
from sightline.service.http.static import MEDIA_TYPES, read_files


@functools.cache
def endpoints(frame_ancestors: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints of the page, with its files as they are at the first call.

    `frame_ancestors` are the origins of pages that may show this page in a frame.
    """
    folder = sorted(files("sightline.service.page").iterdir(), key=lambda file: file.name)
    own_files = read_files(folder, frame_ancestors, vary="Accept, Accept-Encoding")

    async def show_root(call: Call, headers: Headers) -> Raw:
        """Show the name of the service, its version, its documentation and its models.

        Clients that accept `text/html`, as browsers do, get the page.
        """
        if prefers(HTML, headers):
            return own_files["index.html"].response(headers)
        return Raw(to_json(root_of(call.service)), JSON, 200, {"vary": "Accept, Accept-Encoding"})

    async def page_file(
        call: Call, file: Annotated[str, described("Name of a file of the page.")], headers: Headers
    ) -> Raw:
        """Return a file of the page: a script, its styles or its icon."""
        if file not in own_files:
            raise ApiError("not_found", f"The page has no file of this name; its files are {', '.join(own_files)}.")
        return own_files[file].response(headers)

    kinds = tuple(sorted(MEDIA_TYPES.values()))
    return [
        Endpoint("GET", "/", show_root, Root, media_types=(JSON, HTML), ignores_query=True),
        Endpoint("GET", "/page/{file}", page_file, errors=("not_found",), media_types=kinds, ignores_query=True),
    ]

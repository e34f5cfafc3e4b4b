"""Let pages of the site link to files of the repository that are not below docs/.

Such a file becomes a part of the site under `repository/`, so links work on the site as they do in
the repository. MkDocs calls these functions (`hooks` in mkdocs.yml).
"""

import os
import re
from pathlib import PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
OUTSIDE = "repository"


def on_files(files: Files, config: Any) -> Files:
    """Add each file outside of docs/ that a page links to, and the files that those link to."""
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.content_string):
            path = _repository_path(page.src_uri, link[1])
            name = _site_path(path)
            if path.startswith("docs/") or files.get_file_from_path(name) or not os.path.isfile(path):
                continue
            added = File.generated(config, name, abs_src_path=os.path.abspath(path))
            files.append(added)
            if added.is_documentation_page():
                waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files of the repository by links to their copies on the site."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        path = _repository_path(page.file.src_uri, match[2])
        if not os.path.isfile(path):
            return match[0]  # MkDocs reports it
        return f"{match[1]}{os.path.relpath(_site_path(path), folder)}{match[3]}"

    return LINK.sub(replace, markdown)


def _repository_path(page: str, link: str) -> str:
    """Return the target of a link on a page as a path from the root of the repository."""
    source = page.removeprefix(f"{OUTSIDE}/") if page.startswith(f"{OUTSIDE}/") else f"docs/{page}"
    return os.path.normpath(PurePosixPath(source).parent / link)


def _site_path(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"

"""The list of what is overridden of uvicorn, Starlette and FastAPI is complete."""

import re
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sightline.service.app import Cors
from sightline.service.http.application import Application
from sightline.service.http.dispatch import EndpointRoute
from sightline.service.http.guarded_protocol import GuardedProtocol
from sightline.service.server import DrainingServer

PAGE = Path("docs/explanation/architecture.md").read_text("utf-8")
LIST = PAGE.partition("## What is overridden")[2].partition("##")[0]
LIBRARIES = r"(?:fastapi|starlette|uvicorn)"
PRIVATE = re.compile(rf"^(?:from|import) ({LIBRARIES}\S*\._\S+|{LIBRARIES}\S* import _\w+)", re.M)


@pytest.mark.parametrize(
    ("own", "base"),
    [
        (GuardedProtocol, HttpToolsProtocol),
        (DrainingServer, uvicorn.Server),
        (Cors, CORSMiddleware),
        (EndpointRoute, APIRoute),
        (Application, FastAPI),
    ],
)
def test_every_overridden_method_is_listed(own: type[Any], base: type[Any]) -> None:
    (row,) = [row for row in LIST.splitlines() if f"`{own.__name__}`" in row]
    overridden = {name for name in vars(own) if not name.startswith("__") and hasattr(base, name)}
    assert overridden == set(re.findall(r"`(\w+)`", row.split("|")[3]))


def test_every_listed_test_exists() -> None:
    files = re.findall(r"`(tests/\S+\.py)`", LIST)
    assert len(files) > 5
    assert [file for file in files if not Path(file).exists()] == []


def test_one_private_name_is_imported() -> None:
    private = {match for file in Path("service").rglob("*.py") for match in PRIVATE.findall(file.read_text("utf-8"))}
    assert private == {"uvicorn.middleware.proxy_headers import _TrustedHosts"}

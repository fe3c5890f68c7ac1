"""The records of tool calling in OpenAI's shape: schemas, calls, and what a tool answers.

Position in the flow: YAML or signature -> **schema** -> chat template; parsed call -> tool -> **ToolResponse** ->
message. Nested JSON schema (``items``, ``properties``, ``anyOf``, bounds, ...) is kept as it was given, so the model
sees it and arguments are checked against it. Nothing here calls a tool.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class OpenAIFunctionPropertySchema(BaseModel):
    """JSON schema of one parameter; every further JSON-schema key is kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """JSON schema of a function's arguments: an object with named properties."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """Name, description and parameters of one function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """One entry of the ``tools`` list that chat templates and OpenAI's API take."""

    type: str = "function"
    function: OpenAIFunctionSchema

    def to_dict(self) -> dict[str, Any]:
        """Return only what was given, as chat templates expect it."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as it was parsed: the arguments are still JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with decoded arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Decode the arguments; returns the call and whether decoding failed (the arguments are then empty)."""
        try:
            arguments = json.loads(parsed.arguments)
        except (ValueError, RecursionError):
            arguments = None
        is_invalid = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed.name, arguments={} if is_invalid else arguments), is_invalid


class OpenAIFunctionToolCall(BaseModel):
    """A call inside an assistant message."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool shows the policy.

    Attributes:
        text: Text of the tool message.
        image: Images, in order; always a list.
        video: Videos, in order; always a list.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_media(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in ("image", "video"):
                if name in values and not isinstance(values[name], list):
                    raise ValueError(
                        f"ToolResponse.{name} is a {type(values[name]).__name__}: it must be a list. "
                        f"Pass [{name}] for one, and leave the argument out for none."
                    )
        return values

    def is_empty(self) -> bool:
        """Whether there is neither text nor media."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Whether there is text and no media."""
        return bool(self.text) and not self.image and not self.video

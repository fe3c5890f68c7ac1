"""A tool that shows the policy a part of the row's image.

The answer holds an image, so the policy must read images, or the agent loop must keep media (`ToolAgentLoop`).
Images come from the row or this machine; nothing is fetched over the network.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

if TYPE_CHECKING:
    from PIL.Image import Image

_MIN_SIDE = 28
"""Pixels; vision models of the Qwen family see patches of this size."""
_MAX_ASPECT = 100


class ImageZoomInTool(BaseTool):
    """``image_zoom_in_tool(bbox_2d, label)``: cuts a box out of the row's image.

    The row needs ``tools_kwargs: {image_zoom_in_tool: {create_kwargs: {image: ...}}}``: a path, a ``data:`` URL,
    encoded bytes, a mapping with ``bytes`` or ``path`` (as Parquet holds images), or a PIL image.
    """

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._images: dict[str, Image] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema: ``image_zoom_in_tool(bbox_2d: array of 4 numbers, label: string)``."""
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "image_zoom_in_tool",
                    "description": "Zoom in on a region of the image.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "bbox_2d": {
                                "type": "array",
                                "items": {"type": "number"},
                                "minItems": 4,
                                "maxItems": 4,
                                "description": "The region as [x1, y1, x2, y2] in pixels, from the top left corner.",
                            },
                            "label": {"type": "string", "description": "Name of the object in the region."},
                        },
                        "required": ["bbox_2d"],
                    },
                },
            }
        )

    async def create(
        self, instance_id: str | None = None, image: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Load the row's image.

        Raises:
            ValueError: If the row gives none, or it is none.
        """
        instance_id, response = await super().create(instance_id)
        if image is None:
            image = kwargs.get("create_kwargs", {}).get("image")
        if image is None:
            raise ValueError(f"tools_kwargs['{self.name}']['create_kwargs'] needs 'image'")
        self._images[instance_id] = await asyncio.to_thread(load_image, image)
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the region as an image; a box that cannot be used is answered with the reason and ``is_error``."""
        image = self._images[instance_id]
        try:
            box = usable_box(parameters["bbox_2d"], image.size)
        except ValueError as error:
            return ToolResponse(text=f"Error: {error}"), 0.0, {"is_error": True}
        label = parameters.get("label")
        text = f"Zoomed in on {box}" + (f" with label {label}." if label else ".")
        return ToolResponse(text=text, image=[image.crop(box)]), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the image."""
        self._images.pop(instance_id, None)


def usable_box(box: list[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the box within the image, enlarged around its middle where a side is under 28 pixels.

    Args:
        box: ``[x1, y1, x2, y2]`` in pixels.
        size: Width and height of the image.

    Raises:
        ValueError: If nothing of the box lies in the image, or it is a hundred times longer than wide.
    """
    spans = []
    for low, high, length in zip(box[:2], box[2:], size, strict=True):
        low, high = max(0.0, low), min(float(length), high)
        if high <= low:
            raise ValueError(f"the box {box} is empty or outside of the image of {size[0]} x {size[1]} pixels")
        missing = min(_MIN_SIDE, length) - (high - low)
        if missing > 0:
            low = min(max(0.0, low - missing / 2), length - min(_MIN_SIDE, length))
            high = low + min(_MIN_SIDE, length)
        spans.append((int(low), int(-(-high // 1))))
    (x1, x2), (y1, y2) = spans
    if max(x2 - x1, y2 - y1) > _MAX_ASPECT * min(x2 - x1, y2 - y1):
        raise ValueError(f"the box {box} is more than {_MAX_ASPECT} times as long as wide")
    return x1, y1, x2, y2


def load_image(source: Any) -> Image:
    """Return an image as RGB; see `ImageZoomInTool` for what may be given.

    Raises:
        ValueError: If it is no image.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    try:
        if isinstance(source, str) and source.startswith("data:"):
            source = base64.b64decode(source.partition(",")[2], validate=True)
        if isinstance(source, bytes):
            source = io.BytesIO(source)
        elif not isinstance(source, str | os.PathLike):
            raise ValueError(f"a {type(source).__name__} is no image: give a path, bytes or a PIL image")
        with Image.open(source) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, binascii.Error, Image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be read: {error}") from error

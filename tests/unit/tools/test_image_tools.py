"""Tools around images and geometry."""

import asyncio
import base64
import io

import pytest
from PIL import Image

from lit_rl.tools import ToolContext, ToolSession
from lit_rl.tools.geo3k_tool import Geo3kTool
from lit_rl.tools.image_zoom_in_tool import ImageZoomInTool, load_image, usable_box


def test_the_geometry_tool_compares_by_meaning():
    async def main():
        tool = Geo3kTool({"type": "native"})
        kwargs = {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": r"\frac{1}{2}"}}}
        async with ToolSession({tool.name: tool}, ToolContext(row_id="1"), kwargs) as session:
            answers = [await session.call(tool.name, {"answer": text}) for text in ("2", r"so \boxed{1/2}")]
            rewards = await session.final_rewards()
        assert [answer.reward for answer in answers] == [-0.05, 0.0]
        assert answers[1].text == "The answer 1/2 is correct."
        assert rewards == {tool.name: 1.0}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([10, 20, 60, 70], (10, 20, 60, 70)),
        ([-5, -5, 200, 50], (0, 0, 100, 50)),
        ([50, 50, 52, 60], (37, 41, 65, 69)),  # 28 pixels around the middle
        ([0, 0, 2, 2], (0, 0, 28, 28)),
        ([98, 78, 100, 80], (72, 52, 100, 80)),
        ([10.5, 10.5, 50.2, 50.2], (10, 10, 51, 51)),
    ],
)
def test_boxes_are_clipped_and_enlarged(box, expected):
    assert usable_box(box, (100, 80)) == expected


@pytest.mark.parametrize("box", [[60, 20, 10, 70], [10, 10, 10, 50], [200, 0, 300, 50]])
def test_boxes_without_a_pixel_are_refused(box):
    with pytest.raises(ValueError, match="empty or outside"):
        usable_box(box, (100, 80))


def striped():
    image = Image.new("RGB", (100, 80), "red")
    image.paste("blue", (50, 0, 100, 80))
    return image


def encoded():
    buffer = io.BytesIO()
    striped().save(buffer, format="PNG")
    return buffer.getvalue()


def test_images_of_every_kind_are_read(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    url = "data:image/png;base64," + base64.b64encode(encoded()).decode()
    for source in (striped(), encoded(), url, str(tmp_path / "a.png"), {"bytes": encoded(), "path": None}):
        assert load_image(source).getpixel((99, 0)) == (0, 0, 255)
    for source in (b"no image", "data:image/png;base64,!!", str(tmp_path / "b.png"), 3, {}):
        with pytest.raises(ValueError, match="image"):
            load_image(source)


def test_zooming_answers_with_the_region():
    async def main():
        tool = ImageZoomInTool({})
        kwargs = {tool.name: {"create_kwargs": {"image": encoded()}}}
        async with ToolSession({tool.name: tool}, ToolContext(row_id="1"), kwargs) as session:
            good = await session.call(tool.name, {"bbox_2d": [50, 0, 90, 40], "label": "sky"})
            empty = await session.call(tool.name, {"bbox_2d": [9, 9, 1, 1]})
            wrong = await session.call(tool.name, {"bbox_2d": [1, 2, 3]})
        assert good.image[0].size == (40, 40)
        assert good.image[0].getpixel((0, 0)) == (0, 0, 255)
        assert good.text == "Zoomed in on (50, 0, 90, 40) with label sky."
        assert empty.text.startswith("Error: the box")
        assert not empty.image
        assert wrong.is_invalid
        assert session.metrics["num_tool_errors"] == 1
        assert tool._images == {}

    asyncio.run(main())

"""A tool with state over a conversation, and the row's own arguments: see examples/own_tools.yaml.

A row gives the arguments of ``create`` in extra_info: {tools_kwargs: {hint: {create_kwargs: {hints: [...]}}}}.
"""

from typing import Any

from lit_rl.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse


class HintTool(BaseTool):
    """Gives the row's hints one by one; each costs ``price`` (config, reward units)."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.price = float(self.config.get("price", 0.1))
        self.hints: dict[str, list[str]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "hint", "description": "Get a hint.", "parameters": {}}}
        )

    async def create(self, instance_id: str | None = None, hints: list[str] | None = None, **kwargs: Any):
        instance_id, response = await super().create(instance_id)
        self.hints[instance_id] = list(hints or ["Add the tens first."])
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        hints = self.hints[instance_id]
        if not hints:
            return ToolResponse(text="No more hints."), 0.0, {}
        return ToolResponse(text=hints.pop(0)), -self.price, {"hints_given": 1}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.hints[instance_id]

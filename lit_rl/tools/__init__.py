"""Tools that a policy can call: base classes, schemas, loading, and the tools shipped with lit_rl."""

from __future__ import annotations

from lit_rl.tools.base_tool import BaseTool, ToolContext
from lit_rl.tools.function_tool import FunctionTool, function_tool, get_function_tool
from lit_rl.tools.registry import (
    initialize_tools_from_config,
    load_all_tools,
    load_function_tools_from_path,
)
from lit_rl.tools.returns import normalize_function_tool_return
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from lit_rl.tools.session import ToolResult, ToolSession

__all__ = [
    "BaseTool",
    "FunctionTool",
    "OpenAIFunctionToolSchema",
    "ToolContext",
    "ToolResponse",
    "ToolResult",
    "ToolSession",
    "function_tool",
    "get_function_tool",
    "initialize_tools_from_config",
    "load_all_tools",
    "load_function_tools_from_path",
    "normalize_function_tool_return",
]

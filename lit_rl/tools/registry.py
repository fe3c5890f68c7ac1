"""Load the tools of a run from a tool YAML and a Python file of function tools.

Position in the flow: agent worker and dataset at start -> **load_all_tools** -> ToolSession and chat template. Both
files run code of the user's choice: class paths are imported and the Python file is executed. Every mistake in them
is a ``ValueError`` that names file and entry.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_rl.data.user_files import load_user_file
from lit_rl.tools.argument_check import check_tool_schema
from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.function_tool import FunctionTool, collect_function_tools, process_function_tools
from lit_rl.tools.rate_limit import rate_limit_of
from lit_rl.tools.schemas import OpenAIFunctionToolSchema

logger = logging.getLogger(__name__)
_loaded_files: dict[str, list[FunctionTool]] = {}


def load_all_tools(
    tool_config_path: str | os.PathLike[str] | None = None, function_tool_path: str | os.PathLike[str] | None = None
) -> dict[str, BaseTool | FunctionTool]:
    """Return the tools of both files by name, those of the YAML first.

    Args:
        tool_config_path: Tool YAML; see `initialize_tools_from_config`.
        function_tool_path: Python file with ``@function_tool`` functions.

    Raises:
        ValueError: For two tools of one name, wherever they come from.
        FileNotFoundError: If a file is missing.
    """
    tools: list[BaseTool | FunctionTool] = []
    if tool_config_path:
        tools.extend(initialize_tools_from_config(tool_config_path))
    if function_tool_path:
        tools.extend(load_function_tools_from_path(function_tool_path))
    return tools_by_name(tools)


def tools_by_name(tools: list[BaseTool | FunctionTool]) -> dict[str, BaseTool | FunctionTool]:
    """Return the tools as a dict.

    Raises:
        ValueError: For two tools of one name, or parameters that are no JSON schema.
    """
    by_name: dict[str, BaseTool | FunctionTool] = {}
    duplicates = []
    for tool in tools:
        if tool.name in by_name:
            duplicates.append(tool.name)
        check_tool_schema(tool)
        _check_options(tool)
        by_name[tool.name] = tool
    if duplicates:
        raise ValueError(
            f"Duplicate tool names: {sorted(set(duplicates))}. Names must be unique over tool YAML and file."
        )
    return by_name


def _check_options(tool: BaseTool | FunctionTool) -> None:
    """Refuse what would fail in the first call, long after the engines have started."""
    for name in ("timeout_s", "max_concurrency"):
        value = getattr(tool, name, None)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"Tool {tool.name!r}: {name}={value!r} must be a number above 0.")
    try:
        rate_limit_of(getattr(tool, "config", {}))
    except ValueError as error:
        raise ValueError(f"Tool {tool.name!r}: {error}") from error


def initialize_tools_from_config(path: str | os.PathLike[str]) -> list[BaseTool]:
    """Return new tool objects for the entries of a tool YAML.

    Each entry has ``class_name`` (dotted path, or ``file.py:ClassName`` with the file relative to the YAML), ``config``
    with ``type: native`` or ``type: mcp``, and optionally ``tool_schema``. An ``mcp`` entry gives one tool per tool of
    its servers.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: For anything wrong inside it, naming the entry.
    """
    import yaml

    if not os.path.isfile(path):
        raise FileNotFoundError(f"Tool YAML not found: {os.path.abspath(path)}")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} must have a top-level key 'tools' with a list of entries.")
    tools: list[BaseTool] = []
    for index, entry in enumerate(entries):
        tools.extend(_build_entry(f"{path}: tools[{index}]", entry, Path(path).resolve().parent))
    return tools


def _build_entry(place: str, entry: Any, folder: Path) -> list[BaseTool]:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError(f"{place} must be a mapping with 'class_name' (a dotted path) and 'config'.")
    config = entry.get("config")
    if not isinstance(config, dict) or "type" not in config:
        raise ValueError(f"{place}.config must be a mapping with 'type: native' or 'type: mcp'.")
    tool_class = _import_class(place, entry["class_name"], folder)
    if config["type"] == "mcp":
        return _build_mcp(place, tool_class, entry)
    if config["type"] != "native":
        raise ValueError(f"{place}.config.type is {config['type']!r}; it must be 'native' or 'mcp'.")
    schema = None
    if entry.get("tool_schema") is not None:
        try:
            schema = OpenAIFunctionToolSchema.model_validate(entry["tool_schema"])
        except ValueError as error:
            raise ValueError(f"{place}.tool_schema is no OpenAI tool schema: {error}") from error
    try:
        return [tool_class(config=dict(config), tool_schema=schema)]
    except Exception as error:  # the constructor is user code; the reader needs to know which entry it was
        raise ValueError(f"{place} ({entry['class_name']}): {type(error).__name__}: {error}") from error


def _build_mcp(place: str, tool_class: Any, entry: dict[str, Any]) -> list[BaseTool]:
    from lit_rl.tools.mcp import load_mcp_tools

    if not isinstance(entry.get("mcp"), dict):
        raise ValueError(f"{place} has type mcp: it needs an 'mcp' block with 'mcp_servers_config_path'.")
    return list(load_mcp_tools(place, tool_class, entry["config"], entry["mcp"]))


def _import_class(place: str, class_name: str, folder: Path) -> Any:
    file, separator, name = class_name.rpartition(".py:")
    try:
        if separator:
            module = load_user_file((folder / f"{file}.py").resolve())
        else:
            module_name, _, name = class_name.rpartition(".")
            module = importlib.import_module(module_name)
        tool_class = getattr(module, name)
    except Exception as error:  # importing runs user code
        raise ValueError(
            f"{place}.class_name={class_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (inspect.isclass(tool_class) and issubclass(tool_class, BaseTool)):
        raise ValueError(f"{place}.class_name={class_name!r} is no subclass of lit_rl.tools.BaseTool.")
    return tool_class


def load_function_tools_from_path(path: str | os.PathLike[str]) -> list[FunctionTool]:
    """Return the ``@function_tool`` functions of a Python file, sorted by name.

    A file is executed once per process: a second call returns the same list object, also through a symbolic link,
    and a file that is already imported under its ordinary name is not executed again.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If two functions in it want one name.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"File of function tools not found: {os.path.abspath(path)}")
    real_path = os.path.realpath(path)
    if real_path not in _loaded_files:
        imported = _imported_module(real_path)
        tools = _tools_of_module(imported) if imported is not None else []
        if not tools:
            with collect_function_tools() as collected:
                _execute(real_path)
            tools = list(collected.values())
        if not tools:
            logger.warning("%s has no @function_tool functions.", path)
        _loaded_files[real_path] = sorted(tools, key=lambda tool: tool.name)
    return _loaded_files[real_path]


def _imported_module(real_path: str) -> ModuleType | None:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # Names first: realpath asks the file system, and there are thousands of modules.
        if not isinstance(file, str) or os.path.basename(file) != os.path.basename(real_path):
            continue
        if os.path.realpath(file) == real_path:
            return module
    return None


def _tools_of_module(module: ModuleType) -> list[FunctionTool]:
    tools = process_function_tools().values()
    return [tool for tool in tools if getattr(tool.function, "__module__", None) == module.__name__]


def _execute(real_path: str) -> None:
    name = f"lit_rl_function_tools_{Path(real_path).stem}_{hashlib.sha256(real_path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, real_path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{real_path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    # In sys.modules before execution: dataclasses and pickling look their module up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise

"""The tools of a run before any conversation: loaded from the configured files, narrowed per row, shown as schemas.

Position in the flow: settings -> **tools of the run** -> overlong filter, worker, tool loop. The filter and the loop
take schemas from here, so that a prompt is measured as it is rolled out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lit_rl.agents.interactions import load_interactions
from lit_rl.agents.loop_classes import check_loops, find_loop_class
from lit_rl.agents.settings import AgentSettings
from lit_rl.types import Prompt

if TYPE_CHECKING:
    from lit_rl.data.chat_template import ChatTemplate
    from lit_rl.tools.session import Tool

logger = logging.getLogger(__name__)

ToolSchemas = list[dict[str, Any]]


def load_run_tools(settings: AgentSettings) -> dict[str, Tool]:
    """Return new tools of the configured files by name; none where no file is configured."""
    if settings.tool_config_path is None and settings.function_tool_path is None:
        return {}
    from lit_rl.tools import load_all_tools

    return load_all_tools(settings.tool_config_path, settings.function_tool_path)


def select_tools(tools: Mapping[str, Tool], prompt: Prompt) -> dict[str, Tool]:
    """Return the tools of one row: those of ``extra_info.tool_selection``, or all where it is empty or missing."""
    selection = prompt.extra_info.get("tool_selection")
    # A column of a parquet file may come as an array, whose truth value is an error.
    if selection is None or len(selection) == 0:
        return dict(tools)
    return {name: tool for name, tool in tools.items() if name in selection}


def tool_schemas(tools: Mapping[str, Tool]) -> ToolSchemas:
    """Return the schemas that the policy sees, in the order of the tools."""
    return [tool.tool_schema.to_dict() for tool in tools.values() if tool.tool_schema is not None]


def row_schemas(settings: AgentSettings, tools: Mapping[str, Tool]) -> Callable[[Prompt], ToolSchemas]:
    """Return what gives each row the schemas that its agent loop will show.

    Args:
        settings: Names the loop of rows without ``agent_name``.
        tools: Tools of the run.

    Returns:
        A function of a row. It raises ``ValueError``, naming the row, where the row's loop does not exist.

    Raises:
        ValueError: If a configured loop does not exist or does not take its options, or a simulated user cannot be
            built.
    """
    check_loops(settings)
    if settings.interaction_config_path is not None:
        load_interactions(
            settings.interaction_config_path
        )  # the workers load their own, after the engines have started

    def schemas_of(prompt: Prompt) -> ToolSchemas:
        try:
            found = find_loop_class(prompt.agent_name, settings)
            return found.cls.shown_schemas(tools, prompt, found.options)
        except ValueError as error:
            raise ValueError(f"Row {prompt.row_id}: {error}") from error

    return schemas_of


def report_template(template: ChatTemplate, tools: Mapping[str, Tool]) -> None:
    """Log what the chat template does with turns, and warn where it leaves out the tools of the run."""
    report = template.self_test()
    # A run without tools has no later turns that a peculiar template could spoil.
    logger.log(logging.WARNING if report.problems and tools else logging.INFO, "%s", report.describe())
    messages = [{"role": "user", "content": "Hi"}]
    if tools and template.render_text(messages, tool_schemas(tools)) == template.render_text(messages, []):
        logger.warning(
            "The chat template shows no tools, so the policy never learns of %s. Set data.agents.chat_template to one "
            "that writes `tools` (examples/chatml_tools.jinja does), or describe them in the rows' system message.",
            ", ".join(tools),
        )

"""The tools of a run: which schemas a row shows, where they are loaded, limited and closed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from agent_fakes import EchoClient, letters, request

from lit_rl.agents import AgentLoopManager, AgentSettings, ToolAgentLoop
from lit_rl.agents.run_tools import load_run_tools, report_template, row_schemas
from lit_rl.agents.settings import AgentLoopSpec
from lit_rl.agents.tool_parsers import get_tool_parser
from lit_rl.agents.worker import AgentLoopWorker
from lit_rl.cluster import Runtime
from lit_rl.data import ChatTemplate
from lit_rl.models.loading import load_tokenizer
from lit_rl.tools import BaseTool, OpenAIFunctionToolSchema
from lit_rl.tools.rate_limit import SharedRateLimit
from lit_rl.types import Prompt, SamplingParams

EXAMPLES = Path(__file__).parents[3] / "examples"
CHATML_TOOLS = EXAMPLES / "chatml_tools.jinja"
OPENAI_LOOP = "lit_rl.agents.openai_agent.OpenAIAgentLoop"
TWO_TOOLS = """
tools:
  - class_name: test_run_tools.Noting
    config: {type: native, tool: first}
  - class_name: test_run_tools.Noting
    config: {type: native, tool: second, rate_limit: 3}
"""


class Noting(BaseTool):
    closed: list[str] = []
    limited: list[str] = []

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": self.config["tool"]}})

    async def close(self):
        if isinstance(self.rate_limiter, SharedRateLimit):
            self.limited.append(self.name)
        self.closed.append(self.name)
        if self.name == "first":
            raise OSError("was closed already")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentSettings:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(Noting, "closed", [])
    monkeypatch.setattr(Noting, "limited", [])
    (tmp_path / "tools.yaml").write_text(TWO_TOOLS.replace("test_run_tools", __name__))
    return AgentSettings(tool_config_path=str(tmp_path / "tools.yaml"), num_workers=2)


def row(**fields: object) -> Prompt:
    return Prompt(row_id="row-7", messages=[{"role": "user", "content": "a"}], data_source="d", **fields)  # type: ignore[arg-type]


def names(schemas: list[dict]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]


def test_only_rows_of_a_tool_loop_show_schemas(settings: AgentSettings) -> None:
    schemas_of = row_schemas(settings, load_run_tools(settings))
    assert schemas_of(row()) == []
    assert names(schemas_of(row(agent_name="tool_agent"))) == ["first", "second"]
    assert names(schemas_of(row(agent_name="tool_agent", extra_info={"tool_selection": ["second"]}))) == ["second"]

    settings.default_agent_loop = "tool_agent"
    assert names(row_schemas(settings, load_run_tools(settings))(row())) == ["first", "second"]


def test_a_loop_of_ones_own_says_what_it_shows(settings: AgentSettings) -> None:
    settings.agent_loops = {"first_only": AgentLoopSpec(loop_class=f"{__name__}.FirstOnly")}
    schemas_of = row_schemas(settings, load_run_tools(settings))
    assert names(schemas_of(row(agent_name="first_only"))) == ["first"]


class FirstOnly(ToolAgentLoop):
    @classmethod
    def shown_schemas(cls, tools, prompt, options):
        return super().shown_schemas({"first": tools["first"]}, prompt, options)


def test_tools_that_an_openai_agent_names_are_measured_with_its_rows(settings: AgentSettings) -> None:
    example = f"{EXAMPLES}/openai_agent.py"
    options = {"agent": f"{example}:agent", "agent_tools": f"{example}:TOOLS"}
    spec = AgentLoopSpec(loop_class=OPENAI_LOOP, options=options)
    settings.agent_loops = {"mine": spec}
    assert names(row_schemas(settings, {})(row(agent_name="mine"))) == ["add"]
    spec.options = {"agent": f"{example}:agent"}
    assert row_schemas(settings, {})(row(agent_name="mine")) == []


@pytest.mark.parametrize(("name", "message"), [("agent", "list of tool schemas"), ("GONE", "cannot be imported")])
def test_tools_of_an_openai_agent_that_are_none_are_refused_with_the_row(
    settings: AgentSettings, name: str, message: str
) -> None:
    file = f"{EXAMPLES}/openai_agent.py"
    options = {"agent": f"{file}:agent", "agent_tools": f"{file}:{name}"}
    settings.agent_loops = {"mine": AgentLoopSpec(loop_class=OPENAI_LOOP, options=options)}
    with pytest.raises(ValueError, match=f"Row row-7: agent_tools='.*:{name}'.*{message}"):
        row_schemas(settings, {})(row(agent_name="mine"))


def test_an_unknown_loop_is_found_with_its_row(settings: AgentSettings) -> None:
    with pytest.raises(ValueError, match="Row row-7: Unknown agent loop 'tool_agnt'"):
        row_schemas(settings, {})(row(agent_name="tool_agnt"))


@pytest.mark.parametrize(
    ("loop", "options", "message"),
    [
        (
            "tool_agent",
            {"max_parallel_call": 2},
            "default_options: ToolAgentLoop does not take 'max_parallel_call'. It",
        ),
        ("tool_agent", {"client": 1}, "default_options: client is given by the worker"),
        ("single_turn_agent", {"rounds": 1}, "SingleTurnAgentLoop does not take 'rounds'. It takes no options"),
        ("openai_agent", {}, "default_options: OpenAIAgentLoop needs 'agent'"),
        ("tool_agnt", {}, "Unknown agent loop 'tool_agnt'"),
    ],
)
def test_options_that_a_loop_does_not_take_are_refused_before_anything_starts(
    loop: str, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        row_schemas(AgentSettings(default_agent_loop=loop, default_options=options), {})
    spec = AgentLoopSpec(loop_class=f"{__name__}.FirstOnly", options={"tool_parser": "hermes", "rounds": 2})
    with pytest.raises(ValueError, match=r"agent_loops\.mine\.options: FirstOnly does not take 'rounds'"):
        row_schemas(AgentSettings(agent_loops={"mine": spec}), {})


def test_values_that_a_loop_refuses_fail_the_start_of_its_workers(settings: AgentSettings) -> None:
    spec = AgentLoopSpec(loop_class=f"{__name__}.FirstOnly", options={"max_parallel_calls": 0})
    settings.agent_loops = {"mine": spec}
    with pytest.raises(ValueError, match=r"data\.agents\.agent_loops\.mine: ValueError: max_parallel_calls=0"):
        AgentLoopWorker(settings, EchoClient(), letters())


def test_a_worker_closes_every_tool_although_one_fails(settings: AgentSettings, caplog) -> None:
    asyncio.run(AgentLoopWorker(settings, EchoClient(), letters()).close())
    assert Noting.closed == ["first", "second"]
    assert "Tool 'first': close failed: OSError('was closed already')" in caplog.text


def test_the_manager_limits_the_tools_of_its_workers_and_closes_them(settings: AgentSettings) -> None:
    async def run(runtime: Runtime) -> None:
        manager = AgentLoopManager(runtime, settings, EchoClient(), letters())
        await manager.start()
        await manager.generate([request("a")], SamplingParams(max_tokens=8))
        await manager.stop()
        await manager.stop()

    with Runtime("inline") as runtime:
        runtime.loop.run(run(runtime), timeout_s=20, what="the rollout")
    assert sorted(Noting.closed) == ["first", "first", "second", "second"]
    assert Noting.limited == ["second", "second"]


def test_a_template_that_hides_the_tools_is_reported(settings: AgentSettings, caplog) -> None:
    tokenizer = load_tokenizer("bundled/tiny-random")
    tools = load_run_tools(settings)
    with caplog.at_level("INFO"):
        report_template(ChatTemplate(tokenizer), tools)
    assert "turns end with '<|im_end|>\\n'" in caplog.text
    assert "never learns of first, second. Set data.agents.chat_template" in caplog.text

    caplog.clear()
    report_template(ChatTemplate(tokenizer, custom_template=str(CHATML_TOOLS)), tools)
    report_template(ChatTemplate(tokenizer), {})
    assert caplog.text == ""


def test_the_example_template_is_exact_and_shows_tools_as_the_hermes_parser_reads_calls() -> None:
    template = ChatTemplate(load_tokenizer("bundled/tiny-random"), custom_template=str(CHATML_TOOLS))
    report = template.self_test()
    assert report.is_exact
    assert report.has_tool_turns
    assert report.merges_tool_messages
    assert report.problems == []
    call = {"type": "function", "id": "call00000", "function": {"name": "first", "arguments": {"x": 1}}}
    text = template.render_text(
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        add_generation_prompt=False,
    )
    (parsed,) = get_tool_parser("hermes").parse(text).calls
    assert (parsed.name, json.loads(parsed.arguments)) == ("first", {"x": 1})


def test_paths_of_the_settings_hold_in_another_working_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = AgentSettings(tool_config_path="tools.yaml", chat_template="own.jinja").with_absolute_paths()
    assert (settings.tool_config_path, settings.chat_template) == (f"{tmp_path}/tools.yaml", f"{tmp_path}/own.jinja")
    assert AgentSettings(chat_template="{{ messages }}").with_absolute_paths().chat_template == "{{ messages }}"
    assert AgentSettings().with_absolute_paths() == AgentSettings()

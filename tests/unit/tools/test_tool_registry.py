"""Loading tools from YAML and Python files."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.tools import BaseTool, load_all_tools, load_function_tools_from_path
from lit_rl.tools.registry import initialize_tools_from_config

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def fixtures_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(FIXTURES))


def test_verl_files_load_with_only_their_imports_changed():
    tools = load_all_tools(FIXTURES / "verl_tool_config.yaml", FIXTURES / "verl_function_tools.py")

    assert list(tools) == ["guess", "convert_temperature", "echo", "lookup_population"]
    assert isinstance(tools["guess"], BaseTool)
    assert tools["guess"].config == {"type": "native", "penalty": 0.25}
    unit = tools["convert_temperature"].tool_schema.to_dict()["function"]["parameters"]["properties"]["unit"]
    assert unit["enum"] == ["celsius", "fahrenheit"]


def test_a_function_file_is_executed_once_per_process(tmp_path):
    file = tmp_path / "once_tools.py"
    file.write_text(
        "import pathlib\nfrom lit_rl.tools import function_tool\n"
        "with open(pathlib.Path(__file__).with_suffix('.count'), 'a') as f: f.write('x')\n"
        "@function_tool(schema={'type': 'function', 'function': {'name': 'once', 'description': ''}})\n"
        "def once():\n    return 1\n"
    )
    link = tmp_path / "link.py"
    os.symlink(file, link)

    first = load_function_tools_from_path(file)
    assert load_function_tools_from_path(str(file)) is first
    assert load_function_tools_from_path(link) is first
    assert file.with_suffix(".count").read_text() == "x"

    # A copy has functions of the same names: another file, no clash.
    copy = tmp_path / "copy_tools.py"
    shutil.copy(file, copy)
    assert [tool.name for tool in load_function_tools_from_path(copy)] == ["once"]


def test_a_file_that_is_already_imported_is_not_executed_again(tmp_path, monkeypatch):
    (tmp_path / "imported_tools.py").write_text(
        "from lit_rl.tools import function_tool\n"
        "@function_tool(schema={'type': 'function', 'function': {'name': 'imported_once', 'description': ''}})\n"
        "def imported_once():\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import imported_tools

    (tool,) = load_function_tools_from_path(tmp_path / "imported_tools.py")
    assert tool.function is imported_tools.imported_once


def test_the_same_name_twice_is_refused(tmp_path):
    entry = yaml.safe_load((FIXTURES / "verl_tool_config.yaml").read_text())["tools"][0]
    twice = tmp_path / "twice.yaml"
    twice.write_text(yaml.safe_dump({"tools": [entry, entry]}))
    with pytest.raises(ValueError, match=r"Duplicate tool names: \['guess'\]"):
        load_all_tools(twice)

    functions = tmp_path / "guess_function.py"
    functions.write_text(
        "from lit_rl.tools import function_tool\n"
        "@function_tool(schema={'type': 'function', 'function': {'name': 'guess', 'description': ''}})\n"
        "def guess():\n    return 1\n"
    )
    with pytest.raises(ValueError, match="guess"):
        load_all_tools(FIXTURES / "verl_tool_config.yaml", functions)


CALCULATOR = "tools: [{class_name: lit_rl.tools.calculator.Calculator, config: {type: native"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tools: {}", "'tools'"),
        ("[1", "no valid YAML"),
        ("tools: [{class_name: verl_class_tools.GuessTool}]", "type: native"),
        ("tools: [{class_name: verl_class_tools.GuessTool, config: {type: remote}}]", "'remote'"),
        ("tools: [{class_name: verl_class_tools.Gone, config: {type: native}}]", "Gone"),
        ("tools: [{class_name: yaml.YAMLObject, config: {type: native}}]", "no subclass"),
        ("tools: [{class_name: verl_class_tools.GuessTool, config: {type: native}}]", "has no schema"),
        ("tools: [{class_name: verl_class_tools.GuessTool, config: {type: native}, tool_schema: 3}]", "tool_schema"),
        (
            "tools: [{class_name: verl_class_tools.GuessTool, config: {type: native}, tool_schema: {function: "
            "{name: g, parameters: {type: object, properties: {x: {type: str}}}}}}]",
            "properties.x.type",
        ),
        (f"{CALCULATOR}, rate_limit: {{per_hour: 3}}}}}}]", "'calculator': rate limit: .*per_hour"),
        (f"{CALCULATOR}, requests_per_minute: fast}}}}]", "'calculator': rate limit: .*fast"),
        (f"{CALCULATOR}, timeout_s: -1}}}}]", "'calculator': timeout_s=-1 must be a number above 0"),
        (f"{CALCULATOR}, max_concurrency: many}}}}]", "'calculator': max_concurrency='many'"),
    ],
)
def test_a_mistake_in_the_yaml_names_file_and_entry(tmp_path, content, message):
    file = tmp_path / "tools.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_all_tools(file)


def test_missing_files_are_named():
    for arguments in (("gone.yaml", None), (None, "gone.py")):
        with pytest.raises(FileNotFoundError, match="gone"):
            load_all_tools(*arguments)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tools", "class_name", "config", "type", "tool_schema", "function", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(content=plain)
def test_no_yaml_makes_anything_but_a_value_error(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("fuzz") / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": content} if not isinstance(content, dict) else content))
    with contextlib.suppress(ValueError):
        initialize_tools_from_config(file)


def mapping(**values):
    """A mapping with any of these keys."""
    return st.fixed_dictionaries({}, optional=values)


schemas = mapping(
    type=st.just("function") | plain,
    function=mapping(
        name=st.sampled_from(["guess", "add"]) | plain,
        description=st.text(max_size=5) | plain,
        parameters=mapping(
            type=st.just("object") | plain,
            properties=st.dictionaries(st.text(max_size=3), mapping(type=st.sampled_from(["string", "int"]) | plain)),
            required=st.lists(st.text(max_size=3), max_size=2) | plain,
        )
        | plain,
        strict=plain,
    )
    | plain,
)
entries = mapping(
    class_name=st.sampled_from(
        ["verl_class_tools.GuessTool", "lit_rl.tools.calculator.Calculator", "lit_rl.tools.sandbox.SandboxTool"]
    )
    | st.text(max_size=8),
    config=mapping(
        type=st.sampled_from(["native", "native", "mcp"]) | plain,
        timeout_s=plain,
        max_concurrency=plain,
        rate_limit=plain,
        burst=plain,
        tokens_per_minute=plain,
    ),
    tool_schema=schemas | plain,
    mcp=mapping(mcp_servers_config_path=plain),
)


@settings(max_examples=150, deadline=None)
@given(content=st.lists(entries, max_size=2))
def test_nothing_in_an_entry_makes_anything_but_a_value_error(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("fuzz") / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": content}))
    with contextlib.suppress(ValueError):
        load_all_tools(file)


def test_loading_tools_does_not_import_torch():
    import subprocess

    code = "import sys, lit_rl.tools; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

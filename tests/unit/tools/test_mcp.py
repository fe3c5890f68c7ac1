"""Tools of MCP servers: found, called, and called again after the server died."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_rl.tools import ToolSession, load_all_tools

pytest.importorskip("mcp")

SERVER = str(Path(__file__).parent / "fixtures" / "mcp_server.py")


@pytest.fixture
def tool_yaml(tmp_path):
    def write(server, selected=None):
        servers = tmp_path / "servers.json"
        servers.write_text(json.dumps({"mcpServers": {"sums": server}}))
        entry = {
            "class_name": "lit_rl.tools.mcp.MCPTool",
            "config": {"type": "mcp", "timeout": 20},
            "mcp": {"mcp_servers_config_path": str(servers), "tool_selected_list": selected},
        }
        path = tmp_path / "tools.yaml"
        path.write_text(json.dumps({"tools": [entry]}))
        return path

    return write


def test_tools_of_a_stdio_server(tool_yaml):
    tools = load_all_tools(tool_yaml({"command": sys.executable, "args": [SERVER]}))
    assert sorted(tools) == ["add", "die", "fail"]
    assert tools["add"].tool_schema.to_dict()["function"]["parameters"]["required"] == ["a", "b"]

    async def main():
        async with ToolSession(tools, timeout_s=30) as session:
            results = [
                await session.call("add", '{"a": 2, "b": 3}'),
                await session.call("add", '{"a": "two", "b": 3}'),
                await session.call("fail", '{"reason": "no"}'),
                await session.call("die", "{}"),
                await session.call("add", '{"a": 1, "b": 1}'),
            ]
        await tools["add"].close()
        return results, session.metrics

    results, metrics = asyncio.run(main())
    assert results[0].text == "5"
    assert results[1].status == "invalid_arguments"
    assert "fail" in results[2].text  # the server keeps the reason to itself
    assert results[3].status in ("error", "timeout")
    assert results[4].text == "2"
    assert metrics["num_tool_errors"] + metrics.get("num_tool_timeouts", 0) == 2


def test_selected_tools_of_a_streamable_http_server(tool_yaml):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}/mcp"
        tools = load_all_tools(tool_yaml({"url": url, "auth_token": "t"}, selected=["add"]))
        assert list(tools) == ["add"]

        async def main():
            async with ToolSession(tools) as session:
                result = await session.call("add", '{"a": 2, "b": 3}')
            await tools["add"].close()
            return result

        assert asyncio.run(main()).text == "5"
    finally:
        process.kill()
        process.wait(10)


def test_wrong_entries_are_named(tool_yaml, monkeypatch):
    monkeypatch.setattr("lit_rl.tools.mcp._DISCOVERY_ATTEMPTS", 1)
    with pytest.raises(ValueError, match=r"mcpServers\['sums'\]"):
        load_all_tools(tool_yaml({}))
    with pytest.raises(RuntimeError, match="sums"):
        load_all_tools(tool_yaml({"command": "/no/such/program"}))

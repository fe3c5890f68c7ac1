"""Tools of MCP servers, over stdio and streamable HTTP, through the official ``mcp`` package (version 2).

Position in the flow: tool YAML (``type: mcp``) -> **load_mcp_tools** -> one MCPTool per remote tool -> server.
Schemas are asked of the servers at load. A worker keeps one connection per server and opens it again after it was
lost. The servers are programs and addresses of the user's choice; they run with the rights of this process.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_DISCOVERY_ATTEMPTS = 10
_DISCOVERY_PAUSE_S = 2.0
_CONNECT_TIMEOUT_S = 30.0


class MCPConnection:
    """A lasting connection to one server, opened on first use.

    Args:
        server_name: Its name in the servers file.
        server: Its entry: ``command``, ``args``, ``env``, ``cwd`` for stdio; ``url``, ``headers``, ``auth_token``
            for HTTP.
        timeout_s: Seconds for one request.
    """

    def __init__(self, server_name: str, server: dict[str, Any], timeout_s: float = 30.0) -> None:
        if not (isinstance(server.get("command"), str) or isinstance(server.get("url"), str)):
            raise ValueError(f"mcpServers['{server_name}'] needs 'command' (stdio) or 'url' (streamable HTTP).")
        self.server_name = server_name
        self.server = server
        self.timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._stop: asyncio.Event | None = None

    async def list_tools(self) -> list[Any]:
        """Return the server's tools, of all pages."""
        client = await self._connected()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools.extend(page.tools)
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the server's result of one call.

        Raises:
            ConnectionError: If the server cannot be reached.
            Exception: What the ``mcp`` package raises for a protocol error.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await self._connected()
        try:
            return await client.call_tool(name, arguments, read_timeout_seconds=self.timeout_s)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            # The call may have run, so it is not repeated; the next one opens a new connection.
            await self.close()
            raise ConnectionError(f"MCP server '{self.server_name}' closed the connection.") from error

    async def close(self) -> None:
        """End the connection and, with stdio, the server."""
        if self._owner is None or self._stop is None or self._loop is not asyncio.get_running_loop():
            return
        self._stop.set()
        await asyncio.wait({self._owner}, timeout=_CONNECT_TIMEOUT_S)
        self._owner = None

    async def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._owner is None or self._owner.done():
            # A connection belongs to the task that opened it (anyio), so one task owns it from beginning to end.
            self._loop, self._stop, self._client = loop, asyncio.Event(), loop.create_future()
            self._owner = asyncio.ensure_future(self._own(self._client, self._stop))
        assert self._client is not None
        try:
            return await asyncio.wait_for(asyncio.shield(self._client), _CONNECT_TIMEOUT_S)
        except TimeoutError as error:
            raise ConnectionError(
                f"MCP server '{self.server_name}' was not ready within {_CONNECT_TIMEOUT_S:g} s."
            ) from error

    async def _own(self, client: asyncio.Future[Any], stop: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                client.set_result(await self._open(stack))
                await stop.wait()
        except Exception as error:  # whatever ends the connection; the next call opens a new one
            if not client.done():
                client.set_exception(ConnectionError(f"MCP server '{self.server_name}': {_reason(error)}"))
                client.exception()  # seen, even if the caller has given up

    async def _open(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters

        target: Any
        if "command" in self.server:
            fields = {key: self.server[key] for key in ("command", "args", "env", "cwd") if key in self.server}
            target = StdioServerParameters(**fields)
        else:
            target = self.server["url"]
            headers = dict(self.server.get("headers") or {})
            if self.server.get("auth_token"):
                headers["Authorization"] = f"Bearer {self.server['auth_token']}"
            if headers:
                import httpx2
                from mcp.client.streamable_http import streamable_http_client

                http_client = await stack.enter_async_context(httpx2.AsyncClient(headers=headers))
                target = streamable_http_client(target, http_client=http_client)
        return await stack.enter_async_context(Client(target, read_timeout_seconds=self.timeout_s))


class MCPTool(BaseTool):
    """One tool of an MCP server.

    Args:
        config: The entry's ``config``.
        tool_schema: As the server describes it.
        connection: To the server.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema, connection: MCPConnection
    ) -> None:
        super().__init__(config, tool_schema)
        self.connection = connection

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the remote tool; its text parts are joined by a space, other parts are named in brackets."""
        result = await self.connection.call_tool(self.name, parameters)
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return ToolResponse(text=" ".join(parts)), 0.0, {"is_error": True} if result.is_error else {}

    async def close(self) -> None:
        """End the connection; the tools of one server share it."""
        await self.connection.close()


def load_mcp_tools(
    place: str, tool_class: type[Any], config: dict[str, Any], mcp_config: dict[str, Any]
) -> list[BaseTool]:
    """Return one tool per tool that the servers offer.

    Args:
        place: Where the entry stands, for error messages.
        tool_class: `MCPTool` or a subclass.
        config: The entry's ``config``: ``timeout`` (seconds per request, 30).
        mcp_config: ``mcp_servers_config_path`` (JSON file with ``mcpServers``) and optionally ``tool_selected_list``.

    Raises:
        ValueError: If the servers file is missing or wrong, or ``tool_class`` is no `MCPTool`.
        RuntimeError: If no server offers a (selected) tool, after ten attempts two seconds apart.
    """
    if not issubclass(tool_class, MCPTool):
        raise ValueError(f"{place}.class_name: a tool of type mcp must be lit_rl.tools.mcp.MCPTool or a subclass.")
    timeout_s = float(config.get("timeout", 30.0))
    servers = _read_servers(place, mcp_config.get("mcp_servers_config_path"))
    connections = [MCPConnection(name, server, timeout_s) for name, server in servers.items()]
    selected = mcp_config.get("tool_selected_list")
    found = _in_thread(_discover(connections))
    tools: list[BaseTool] = [
        tool_class(config=dict(config), tool_schema=_to_schema(remote), connection=connection)
        for connection, remote_tools in zip(connections, found, strict=True)
        for remote in remote_tools
        if not selected or remote.name in selected
    ]
    if not tools:
        raise RuntimeError(f"{place}: the MCP servers {sorted(servers)} offer none of the tools {selected or ''}.")
    return tools


def _read_servers(place: str, path: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(path, str) or not Path(path).is_file():
        raise ValueError(f"{place}.mcp.mcp_servers_config_path={path!r} is no file.")
    try:
        servers = json.loads(Path(path).read_text(encoding="utf-8"))["mcpServers"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a JSON object with 'mcpServers'.") from error
    if not isinstance(servers, dict) or not all(isinstance(server, dict) for server in servers.values()):
        raise ValueError(f"{path}: 'mcpServers' must map names to objects.")
    return servers


async def _discover(connections: list[MCPConnection]) -> list[list[Any]]:
    async def ask(connection: MCPConnection) -> list[Any]:
        for attempt in range(1, _DISCOVERY_ATTEMPTS + 1):
            try:
                return await asyncio.wait_for(connection.list_tools(), connection.timeout_s)
            except Exception as error:  # servers may still be starting, and fail in their own ways until then
                if attempt == _DISCOVERY_ATTEMPTS:
                    raise RuntimeError(f"MCP server '{connection.server_name}': {_reason(error)}") from error
                await asyncio.sleep(_DISCOVERY_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    try:
        return list(await asyncio.gather(*(ask(connection) for connection in connections)))
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


def _in_thread(coroutine: Any) -> Any:
    """Run a coroutine to its end from code that may itself run on an event loop."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = asyncio.run(coroutine)
        except BaseException as error:  # handed to the caller
            outcome["error"] = error

    thread = threading.Thread(target=run, name="lit-rl-mcp-discovery", daemon=True)
    thread.start()
    limit_s = _DISCOVERY_ATTEMPTS * (_CONNECT_TIMEOUT_S + _DISCOVERY_PAUSE_S)
    started = time.monotonic()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"MCP servers did not list their tools within {time.monotonic() - started:.0f} s.")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _to_schema(remote: Any) -> OpenAIFunctionToolSchema:
    parameters = remote.input_schema or {"type": "object", "properties": {}}
    function = {"name": remote.name, "description": remote.description or "", "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _reason(error: BaseException) -> str:
    """The first real error inside the groups that anyio raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]

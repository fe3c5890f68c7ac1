"""Run a policy's code on a SandboxFusion service.

Position in the flow: ToolSession -> **SandboxFusionTool** -> HTTP service. The service isolates the code; for a
sandbox on this machine see `lit_rl.tools.sandbox`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.sandbox import CODE_INTERPRETER_SCHEMA
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_ATTEMPTS = 3
_EXTRA_S = 10.0
"""What the service may take beside compiling and running."""
_NO_OUTPUT = "no stdout here"


class SandboxFusionError(RuntimeError):
    """The service could not be reached or did not run the code."""


class SandboxFusionClient:
    """Client of the service's ``run_code`` endpoint.

    Args:
        url: Address of the endpoint.
        memory_limit_mb: For the program, MiB.
    """

    def __init__(self, url: str, memory_limit_mb: int = 1024) -> None:
        self.url = url
        self.memory_limit_mb = memory_limit_mb
        self._session: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_code(self, code: str, *, language: str, timeout_s: float, stdin: str = "") -> dict[str, Any]:
        """Return the service's reply: ``status``, ``compile_result``, ``run_result``.

        Gateway time-outs (504) are tried again, at most three times in all.

        Raises:
            SandboxFusionError: With a short reason.
        """
        request = {
            "compile_timeout": timeout_s,
            "run_timeout": timeout_s,
            "code": code,
            "stdin": stdin,
            "memory_limit_MB": self.memory_limit_mb,
            "language": language,
            "files": {},
            "fetch_files": [],
        }
        limit_s = 2 * timeout_s + _EXTRA_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with asyncio.timeout(limit_s):
                    status, body = await self._post(request)
            except TimeoutError as error:
                raise SandboxFusionError(f"no answer within {limit_s:g} s") from error
            if status == 504 and attempt < _ATTEMPTS:
                await asyncio.sleep(attempt)
                continue
            return _read_reply(status, body)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    async def _post(self, request: dict[str, Any]) -> tuple[int, bytes]:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._loop, self._session = loop, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(self.url, json=request) as reply:
                return reply.status, await reply.read()
        except aiohttp.ClientError as error:
            raise SandboxFusionError(f"{type(error).__name__}: {error}"[:200]) from error


class SandboxFusionTool(BaseTool):
    """Runs the code that the policy writes on a SandboxFusion service.

    Args:
        config: ``sandbox_fusion_url`` (required); ``default_timeout`` (seconds to compile, and to run, 30);
            ``default_language`` (python); ``memory_limit_mb`` (1024); ``num_workers`` (runs at a time in one worker,
            10).
        tool_schema: Default: ``code_interpreter(code: string)``.

    Raises:
        ValueError: Without ``sandbox_fusion_url``.
    """

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        if not self.config.get("sandbox_fusion_url"):
            raise ValueError("config.sandbox_fusion_url is missing: give the address of the run_code endpoint.")
        self.run_timeout_s = float(self.config.get("default_timeout", 30.0))
        self.language = str(self.config.get("default_language", "python"))
        self.client = SandboxFusionClient(
            self.config["sandbox_fusion_url"], int(self.config.get("memory_limit_mb", 1024))
        )
        if self.max_concurrency is None:
            self.max_concurrency = int(self.config.get("num_workers", 10))
        if self.timeout_s is None:
            self.timeout_s = _ATTEMPTS * (2 * self.run_timeout_s + _EXTRA_S)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema: ``code_interpreter(code: string)``."""
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(CODE_INTERPRETER_SCHEMA)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run ``parameters["code"]`` and return what it printed, errors included; metric ``status``."""
        try:
            reply = await self.client.run_code(
                str(parameters.get("code", "")), language=self.language, timeout_s=self.run_timeout_s
            )
        except SandboxFusionError as error:
            return ToolResponse(text=f"Sandbox error: {error}"), 0.0, {"status": "service_error", "is_error": True}
        compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
        status = str(ran.get("status") or compiled.get("status") or reply.get("status"))
        text = "".join(str(part) for part in (compiled.get("stderr"), ran.get("stdout"), ran.get("stderr")) if part)
        if status == "TimeLimitExceeded":
            text = f"{text}\n[stopped: timeout limit]".lstrip()
        return ToolResponse(text=text or _NO_OUTPUT), 0.0, {"status": status}

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


def _read_reply(status: int, body: bytes) -> dict[str, Any]:
    if status != 200:
        raise SandboxFusionError(f"HTTP {status}")
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SandboxFusionError("the reply is no JSON") from error
    if not isinstance(reply, dict) or reply.get("status") not in ("Success", "Failed"):
        message = reply.get("message", "") if isinstance(reply, dict) else ""
        raise SandboxFusionError(f"the service did not run the code. {message}".strip()[:200])
    return reply

"""An agent written against the ``openai`` client, or any framework on top of it, as an agent loop.

Position in the flow: worker -> **OpenAIAgentLoop** -> the user's agent -> HTTP endpoint of this trajectory ->
`OpenAISession` -> client. The endpoint is open to this machine only, under a secret path, for the life of the
trajectory.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lit_rl.agents.agent_loop import AgentLoop, InfrastructureError
from lit_rl.agents.openai_session import OpenAISequence, OpenAISession, RequestRefused
from lit_rl.agents.tool_parsers import get_tool_parser
from lit_rl.data.user_files import load_user_file
from lit_rl.tools.daemon_threads import DaemonThreads
from lit_rl.types import Prompt, SamplingParams, Trajectory

# Apart from the threads of tools, which an agent may wait for.
_AGENT_THREADS = DaemonThreads(max_threads=256)


class OpenAIAgentLoop(AgentLoop):
    """Runs the user's agent with a base URL that leads to the policy.

    The agent is a function ``agent(prompt, base_url, api_key, model)``, plain or ``async``; ``prompt`` is the row. It
    may return the trajectory's reward (a number); ``None`` leaves it to the scorer. Its last conversation is the
    trajectory; others that it held, or that branched off, become `Trajectory.branches` and are trained with the same
    reward.

    Args:
        agent: ``path/to/file.py:function`` or a dotted path.
        agent_tools: ``path/to/file.py:NAME`` or a dotted path of the list of tool schemas that the agent shows, so
            that ``data.max_prompt_tokens`` counts them. Messages that the agent puts before the row's are not counted.
        tool_parser: Format of the policy's calls; see `get_tool_parser`.
        **kwargs: See `AgentLoop`.

    Raises:
        ValueError: If the agent or the parser is not found.
    """

    def __init__(
        self, *, agent: str, agent_tools: str | None = None, tool_parser: str = "hermes", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.agent = _load_agent(agent)
        self.parser = get_tool_parser(tool_parser)
        self._failure: InfrastructureError | None = None

    @classmethod
    def shown_schemas(
        cls, tools: Mapping[str, Any], prompt: Prompt, options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Schemas of ``agent_tools``; the run's own tools are not shown to such an agent."""
        path = options.get("agent_tools")
        if path is None:
            return []
        schemas = _load(path, "agent_tools")
        if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
            raise ValueError(f"agent_tools={path!r}: must be a list of tool schemas.")
        return schemas

    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        """Run the agent.

        Raises:
            InfrastructureError: If no replica could answer one of its requests.
            ValueError: If it asked for nothing, or returns something else than a number.
            Exception: What the agent raises.
        """
        session = OpenAISession(self, self.parser, sampling)
        async with _Endpoint(session, self._note_failure) as base_url:
            arguments = {"prompt": prompt, "base_url": base_url, "api_key": "none", "model": "policy"}
            try:
                reward = await self._call_agent(arguments)
            except Exception:
                if self._failure is not None:  # what the agent saw of it is only an HTTP status
                    raise self._failure from None
                if not (session.is_exhausted and session.sequences):
                    raise
                # Running out of tokens ends a conversation; it must not lose what was sampled so far.
                reward = None
                self.metrics["ended_by_max_tokens"] = 1.0
                session.sequences[-1].response.stop_reason = "length"
        if self._failure is not None:
            raise self._failure
        if not session.sequences:
            raise ValueError("The agent asked the policy for nothing.")
        trajectory, *branches = [self._trajectory(prompt, sequence) for sequence in reversed(session.sequences)]
        trajectory.branches = branches
        for branch in branches:
            branch.metrics = {}  # times and counts are those of the whole
        if reward is not None:
            if isinstance(reward, bool | int | float):
                trajectory.reward = float(reward)
            else:
                raise ValueError(f"The agent returned {reward!r:.100}: return a number, the reward, or None.")
        return trajectory

    async def _call_agent(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.agent):
            return await self.agent(**arguments)
        return await _AGENT_THREADS.run(functools.partial(self.agent, **arguments))

    def _note_failure(self, error: InfrastructureError) -> None:
        self._failure = error

    def _trajectory(self, prompt: Prompt, sequence: OpenAISequence) -> Trajectory:
        messages = sequence.messages[sequence.num_prompt_messages :]
        return self.build_trajectory(
            prompt, sequence.prompt_ids, sequence.response, num_turns=1 + len(messages), messages=messages
        )


class _Endpoint:
    """The HTTP server of one session; ``async with`` gives its base URL."""

    def __init__(self, session: OpenAISession, on_failure: Callable[[InfrastructureError], None]) -> None:
        self._session = session
        self._on_failure = on_failure

    async def __aenter__(self) -> str:
        from aiohttp import web

        secret = secrets.token_urlsafe(16)
        app = web.Application(client_max_size=2**26)
        app.router.add_post(f"/{secret}/v1/chat/completions", self._complete)
        app.router.add_get(f"/{secret}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}/{secret}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]})

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise RequestRefused("The body must be a JSON object.")
            reply = await self._session.complete(body)
        except InfrastructureError as error:
            self._on_failure(error)
            # The trajectory starts again elsewhere: the agent must not try once more.
            return _error(503, str(error), "server_error")
        except RequestRefused as error:
            return _error(400, str(error), error.code)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # bad JSON, or a prompt the replica refuses
            return _error(400, f"{type(error).__name__}: {error}", "invalid_request_error")
        if not body.get("stream"):
            return web.json_response(reply)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for chunk in _chunks(reply):
            await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream


def _error(status: int, message: str, code: str) -> Any:
    from aiohttp import web

    body = {"error": {"message": message, "type": code, "code": code, "param": None}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})


def _chunks(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The reply as a stream of one chunk with everything and one with the reason it ended."""
    choice = reply["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    return [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]


def _load_agent(agent: str) -> Callable[..., Any]:
    found = _load(agent, "agent")
    if not callable(found):
        raise ValueError(f"agent={agent!r} is no function.")
    return found  # type: ignore[no-any-return]


@functools.cache
def _load(path: str, option: str) -> Any:
    try:
        if ".py:" in path:
            file, _, name = path.rpartition(":")
            return getattr(load_user_file(Path(file).expanduser().resolve()), name)
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, FileNotFoundError) as error:
        raise ValueError(f"{option}={path!r} cannot be imported: {error}") from error

"""An agent written against the ``openai`` client: it only needs another base URL to be trained.

Use: data.agents.default_agent_loop: openai_agent, default_options: {agent: "examples/openai_agent.py:agent",
agent_tools: "examples/openai_agent.py:TOOLS"}
"""

import json

from openai import AsyncOpenAI

from lit_rl.types import Prompt

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]


async def agent(prompt: Prompt, base_url: str, api_key: str, model: str) -> None:
    """Let the policy use a calculator for at most three turns; the row's scorer judges the result."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(prompt.messages)
        for _ in range(3):
            reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                try:
                    arguments = json.loads(call.function.arguments)
                    result = str(arguments["a"] + arguments["b"])
                except (ValueError, KeyError, TypeError) as error:
                    result = f"Error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

"""A tool that checks a GSM8K answer and keeps it as the trajectory's result."""

from __future__ import annotations

import re
from typing import Any

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")


class Gsm8kTool(BaseTool):
    """Takes the policy's answer; the last answer given decides the trajectory's reward.

    The row needs ``tools_kwargs: {calc_gsm8k_reward: {create_kwargs: {ground_truth: ...}}}``. A call that does not
    improve on the best answer so far costs ``penalty`` (config, reward units, default 0.05).
    """

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.penalty = float(self.config.get("penalty", 0.05))
        self._states: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema: ``calc_gsm8k_reward(answer: string)``."""
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "calc_gsm8k_reward",
                    "description": "Check an answer to the math problem.",
                    "parameters": {
                        "type": "object",
                        "properties": {"answer": {"type": "string", "description": "The answer, a number."}},
                        "required": ["answer"],
                    },
                },
            }
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Remember the row's right answer.

        Raises:
            ValueError: If the row gives none.
        """
        instance_id, response = await super().create(instance_id)
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        if ground_truth is None:
            raise ValueError(f"tools_kwargs['{self.name}']['create_kwargs'] needs 'ground_truth'")
        self._states[instance_id] = {"golden": _last_number(str(ground_truth)), "answer": None, "best": 0.0}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Keep the answer and say whether it is right; the reward is minus ``penalty`` without improvement."""
        state = self._states[instance_id]
        state["answer"] = _last_number(str(parameters.get("answer", "")))
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["best"] else -self.penalty
        state["best"] = max(state["best"], reward)
        verdict = "correct" if reward else "wrong"
        return ToolResponse(text=f"The answer {state['answer']} is {verdict}."), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return 1.0 if the last answer is right, else 0.0."""
        state = self._states[instance_id]
        return float(state["answer"] is not None and state["answer"] == state["golden"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the trajectory."""
        self._states.pop(instance_id, None)


def _last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "").replace("$", "").rstrip(".") if numbers else None

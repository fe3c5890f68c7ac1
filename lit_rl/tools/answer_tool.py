"""A tool that takes the policy's answer and says whether it is right; base of the tools of single data sets."""

from __future__ import annotations

from typing import Any

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class AnswerTool(BaseTool):
    """Takes the policy's answer; the last answer given decides the trajectory's reward.

    The row needs ``tools_kwargs: {<tool>: {create_kwargs: {ground_truth: ...}}}``. A call that does not improve on the
    best answer so far costs ``penalty`` (config, reward units, default 0.05). Subclasses give name and rule.
    """

    function_name = ""
    description = ""
    answer_description = "The answer."

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.penalty = float(self.config.get("penalty", 0.05))
        self._states: dict[str, dict[str, Any]] = {}

    def parse(self, text: str) -> str | None:
        """Return the answer that a text holds, ``None`` without one."""
        raise NotImplementedError

    def is_right(self, answer: str, golden: str) -> bool:
        """Whether a parsed answer is the parsed right one."""
        return answer == golden

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema: one argument ``answer`` of type string."""
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": self.function_name,
                    "description": self.description,
                    "parameters": {
                        "type": "object",
                        "properties": {"answer": {"type": "string", "description": self.answer_description}},
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
        golden = str(ground_truth)
        self._states[instance_id] = {"golden": self.parse(golden) or golden, "answer": None, "best": 0.0}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Keep the answer and say whether it is right; the reward is minus ``penalty`` without improvement."""
        state = self._states[instance_id]
        state["answer"] = self.parse(str(parameters.get("answer", "")))
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["best"] else -self.penalty
        state["best"] = max(state["best"], reward)
        verdict = "correct" if reward else "wrong"
        return ToolResponse(text=f"The answer {state['answer']} is {verdict}."), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return 1.0 if the last answer is right, else 0.0."""
        state = self._states[instance_id]
        return float(state["answer"] is not None and self.is_right(state["answer"], state["golden"]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the trajectory."""
        self._states.pop(instance_id, None)

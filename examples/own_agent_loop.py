"""An agent loop of one's own: the policy answers, is asked to check itself, and answers again.

Use: data.agents.default_agent_loop: examples/own_agent_loop.py:SelfCheckAgentLoop
"""

from dataclasses import replace

from lit_rl.agents import AgentLoop
from lit_rl.agents.response import append_masked, append_turn, empty_response, finish_response
from lit_rl.types import Prompt, SamplingParams, Trajectory


class SelfCheckAgentLoop(AgentLoop):
    """Two turns of the policy with a fixed user message in between."""

    def __init__(self, *, question: str = "Are you sure? Give the final answer.", **kwargs):
        super().__init__(**kwargs)
        self.question = question

    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        prompt_ids = self.render_prompt(prompt)
        messages = list(prompt.messages)
        response = empty_response()
        for turn in range(2):
            max_tokens = self.max_response_tokens - len(response.token_ids)
            # Half of the tokens for the first answer, so that there is room for the second.
            limit = max_tokens // 2 if turn == 0 else max_tokens
            # Another seed for each turn, or the second answer would repeat the random numbers of the first.
            seed = None if sampling.seed is None else sampling.seed + turn
            output = await self.generate(
                prompt_ids + response.token_ids, replace(sampling, max_tokens=limit, seed=seed)
            )
            answer = finish_response(output, end_token_ids=self.end_token_ids, max_tokens=limit)
            append_turn(response, answer)
            messages.append({"role": "assistant", "content": self.tokenizer.decode(answer.token_ids)})
            if turn == 0:
                messages.append({"role": "user", "content": self.question})
                # The ids of the new message only: sampled ids stay as they are.
                ids = self.chat_template.continuation_ids(messages, len(messages) - 1, answer.token_ids)
                if len(response.token_ids) + len(ids) >= self.max_response_tokens:
                    messages.pop()
                    break
                append_masked(response, ids)
        return self.build_trajectory(
            prompt, prompt_ids, response, num_turns=1 + len(messages) - len(prompt.messages),
            messages=messages[len(prompt.messages) :],
        )  # fmt: skip

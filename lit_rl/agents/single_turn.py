"""The simplest agent loop: one prompt, one response, no tools."""

from __future__ import annotations

from dataclasses import replace

from lit_rl.agents.agent_loop import AgentLoop
from lit_rl.agents.response import finish_response
from lit_rl.types import Prompt, SamplingParams, Trajectory


class SingleTurnAgentLoop(AgentLoop):
    """Render the prompt, sample once. Its name in a row's ``agent_name`` is ``single_turn_agent``."""

    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        """Sample one response; an empty one gives empty lists and is scored as the empty text."""
        prompt_ids = self.render_prompt(prompt)
        max_tokens = min(sampling.max_tokens, self.max_response_tokens)
        if max_tokens != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        output = await self.generate(prompt_ids, sampling)
        response = finish_response(
            output,
            end_token_ids=self.end_token_ids.union(sampling.stop_token_ids),
            max_tokens=max_tokens,
            ignore_eos=sampling.ignore_eos,
            # Without stop strings, "stop" without an end token means an end token that only the engine knows.
            appended_end_token_id=self.appended_end_token_id if sampling.stop else None,
        )
        return self.build_trajectory(prompt, prompt_ids, response)

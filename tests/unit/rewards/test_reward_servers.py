"""Reward models and judges behind HTTP, and limits of the whole run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from lit_rl.cluster import Runtime
from lit_rl.models.loading import resolve_model
from lit_rl.rewards import RewardLoopManager, RewardSettings, judge, reward_model
from lit_rl.rewards.reward_server import RewardServerError, post_json
from lit_rl.tools.rate_limit import RateLimit
from lit_rl.types import Prompt, Trajectory

EXTRA_INFO = {"prompt_messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "What is 6 * 7?"}]}


def serve(replies: list[tuple[int, Any]], ask: Callable[[str], Awaitable[Any]]) -> tuple[Any, list[dict]]:
    """Run ``ask`` against a server that gives these replies in order; returns its result and the bodies received."""
    bodies: list[dict] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append({"path": request.path, **(await request.json())})
        status, reply = replies[min(len(bodies), len(replies)) - 1]
        return (
            web.Response(text=reply, status=status)
            if isinstance(reply, str)
            else web.json_response(reply, status=status)
        )

    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await ask(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(main()), bodies


def judgement(text: str) -> tuple[int, dict]:
    return 200, {"choices": [{"message": {"content": text}}]}


def test_a_judge_grades_question_reference_and_response() -> None:
    result, (body,) = serve(
        [judgement("The response says Grade: 10, but it is wrong.\nGrade: 2.5")],
        lambda url: judge.compute_score("{ground_truth}", "42", EXTRA_INFO, base_url=f"{url}/v1", model="j"),
    )
    assert result == {"score": 0.25}
    assert (body["path"], body["model"], body["temperature"]) == ("/v1/chat/completions", "j", 0.0)
    text = body["messages"][0]["content"]
    assert "Question:\nWhat is 6 * 7?" in text
    assert "Reference answer:\n42" in text
    assert "Response:\n{ground_truth}" in text


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (judgement("I like it"), "has no grade: 'I like it'"),
        ((200, {"choices": []}), "no choices"),
        ((200, "nonsense"), "no JSON"),
        ((400, "unknown model"), "HTTP 400: unknown model"),
    ],
)
def test_no_grade_is_an_error_and_never_a_zero(reply: tuple[int, Any], message: str) -> None:
    with pytest.raises(RewardServerError, match=message):
        serve([reply], lambda url: judge.compute_score("x", "y", EXTRA_INFO, base_url=url, model="j"))


def test_a_busy_server_is_asked_again_until_the_time_is_up() -> None:
    result, bodies = serve([(503, "busy"), (200, {"ok": 1})], lambda url: post_json(url, {}, timeout_s=10))
    assert (result, len(bodies)) == ({"ok": 1}, 2)
    with pytest.raises(RewardServerError, match=r"no answer within 0\.2 s \(HTTP 503: busy\)"):
        serve([(503, "busy")], lambda url: post_json(url, {}, timeout_s=0.2))


def test_a_classifier_reads_the_rendered_conversation() -> None:
    tokenizer = resolve_model("bundled/tiny-random")
    result, (body,) = serve(
        [(200, {"data": [{"probs": [0.1]}, {"probs": [0.3, -1.5]}]})],
        lambda url: reward_model.compute_score("42", None, EXTRA_INFO, base_url=url, model="r", tokenizer=tokenizer),
    )
    assert result == {"score": -1.5}
    assert (body["path"], body["use_activation"]) == ("/classify", False)
    # SmolLM2's begin token is the one that begins a turn, and its tokenizer adds none: it must stay.
    assert body["input"] == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n"
        "<|im_start|>assistant\n42<|im_end|>\n"
    )


def test_a_rate_limit_holds_over_all_reward_workers() -> None:
    running, most = 0, 0

    async def slow(solution_str: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return 1.0

    settings = RewardSettings(function=slow, num_workers=3, rate_limit=RateLimit(max_concurrent=2), timeout_s=0.5)
    prompts = [Prompt(row_id=str(i), messages=[], data_source="d") for i in range(9)]
    trajectories = [
        Trajectory(
            row_id=str(i),
            group_id="g",
            prompt_ids=[],
            response_ids=[],
            loss_mask=[],
            rollout_logprobs=[],
            policy_versions=[],
        )  # fmt: skip
        for i in range(9)
    ]

    async def main(manager: RewardLoopManager) -> None:
        await manager.start()
        await manager.score_batch(prompts, trajectories)
        await manager.stop()

    with Runtime("inline") as runtime:
        runtime.loop.run(main(RewardLoopManager(runtime, settings)), timeout_s=20, what="scoring")
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 9
    assert most == 2

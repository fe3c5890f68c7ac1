"""The SandboxFusion client against a service on the loopback interface."""

import asyncio

import pytest
from aiohttp import web

from lit_rl.tools.sandbox_fusion_tools import SandboxFusionTool


def ask(*replies, code="print(1)"):
    """Answer the requests in order with these replies; returns the tool's answer and the requests."""

    async def main():
        bodies, answers = [], list(replies)

        async def handle(request):
            bodies.append(await request.json())
            answer = answers.pop(0)
            return answer if isinstance(answer, web.Response) else web.json_response(answer)

        app = web.Application()
        app.router.add_post("/run_code", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        tool = SandboxFusionTool({"sandbox_fusion_url": f"http://127.0.0.1:{port}/run_code", "default_timeout": 3})
        try:
            return await tool.execute("i", {"code": code}), bodies
        finally:
            await tool.close()
            await runner.cleanup()

    return asyncio.run(main())


def ran(status="Finished", **result):
    return {"status": "Success" if status == "Finished" else "Failed", "run_result": {"status": status, **result}}


def test_the_request_and_the_output():
    (response, reward, metrics), bodies = ask(ran(stdout="1\n", stderr="warn"))
    assert (response.text, reward, metrics) == ("1\nwarn", 0.0, {"status": "Finished"})
    assert bodies == [
        {
            "compile_timeout": 3.0,
            "run_timeout": 3.0,
            "code": "print(1)",
            "stdin": "",
            "memory_limit_MB": 1024,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }
    ]


def test_a_gateway_timeout_is_tried_again(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("lit_rl.tools.sandbox_fusion_tools.asyncio.sleep", sleep)
    (response, _, _), bodies = ask(web.Response(status=504), web.Response(status=504), ran(stdout="ok"))
    assert response.text == "ok"
    assert len(bodies) == 3
    assert [seconds for seconds in pauses if seconds] == [1, 2]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (web.Response(status=500), "HTTP 500"),
        (web.Response(text="no"), "no JSON"),
        ({"status": "SandboxError", "message": "full"}, "full"),
        ([1], "did not run"),
    ],
)
def test_a_service_failure_is_a_text_and_an_error(reply, text):
    (response, _, metrics), _ = ask(reply)
    assert text in response.text
    assert metrics["is_error"]


def test_failed_programs_show_why():
    (response, _, _), _ = ask(ran("TimeLimitExceeded", stdout="a"))
    assert response.text == "a\n[stopped: timeout limit]"
    compile_error = {"status": "Failed", "compile_result": {"status": "Error", "stderr": "line 1"}, "run_result": None}
    assert ask(compile_error)[0][0].text == "line 1"
    assert ask(ran())[0][0].text == "no stdout here"
    with pytest.raises(ValueError, match="sandbox_fusion_url"):
        SandboxFusionTool({})

"""The search tool against good and bad retrieval services on the loopback interface (contracts 8, case O47)."""

import asyncio
import json

import pytest
from aiohttp import web

from lit_rl.tools import ToolSession
from lit_rl.tools.search_tool import SearchTool


class Service:
    """Answers with what `reply` returns for the request body; keeps the bodies."""

    def __init__(self, reply):
        self.reply, self.bodies = reply, []

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/retrieve", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/retrieve"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _handle(self, request):
        body = await request.json()
        self.bodies.append(body)
        answer = self.reply(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


def documents(body):
    return {
        "result": [
            [{"document": {"contents": f'"{query}"\nAbout {query} {i}.'}, "score": 1.0} for i in range(body["topk"])]
            for query in body["queries"]
        ]
    }


def ask(reply, *query_lists, **config):
    """Call the tool for each list in order, within one session."""

    async def main():
        async with Service(reply) as service:
            tool = SearchTool({"retrieval_service_url": service.url, "deadline_s": 0.3, "max_attempts": 3, **config})
            try:
                async with ToolSession({"search": tool}) as session:
                    results = [await session.call("search", {"query_list": queries}) for queries in query_lists]
                return results, service.bodies, session.metrics
            finally:
                await tool.close()

    return asyncio.run(main())


def test_documents_are_numbered_and_queries_separated():
    (result,), bodies, metrics = ask(documents, ["café", "b"], topk=2)

    assert result.text == (
        'Doc 1 (Title: "café")\nAbout café 0.\n\nDoc 2 (Title: "café")\nAbout café 1.\n---\n'
        'Doc 1 (Title: "b")\nAbout b 0.\n\nDoc 2 (Title: "b")\nAbout b 1.'
    )
    assert bodies == [{"queries": ["café", "b"], "topk": 2, "return_scores": True}]
    assert result.metrics["status"] == "success"
    assert (metrics["tool/search/total_results"], metrics["tool/search/query_count"]) == (4, 2)


def test_json_results_and_replies_without_scores():
    (result,), _, _ = ask(lambda body: {"result": [[{"contents": "T\nbody"}]]}, ["q"], result_format="json")
    assert json.loads(result.text) == {"result": "Doc 1 (Title: T)\nbody"}


def test_known_and_duplicate_queries_are_asked_once():
    results, bodies, _ = ask(documents, ["a", "a"], ["a", "b"], ["b"])
    assert [body["queries"] for body in bodies] == [["a"], ["b"]]
    assert results[0].text.count("Doc 1") == 2


def test_equal_queries_in_flight_are_asked_once_also_when_the_first_asker_gives_up():
    async def main():
        async def slow(body):
            await asyncio.sleep(0.1)
            return documents(body)

        async with Service(slow) as service:
            tool = SearchTool({"retrieval_service_url": service.url})
            calls = [asyncio.ensure_future(tool.execute("i", {"query_list": ["q"]})) for _ in range(3)]
            await asyncio.sleep(0.02)
            calls[0].cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            await tool.close()
            assert len(service.bodies) == 1
            assert isinstance(answers[0], asyncio.CancelledError)
            assert answers[1][0].text == answers[2][0].text != ""

    asyncio.run(main())


def error_500(body):
    return web.Response(status=500)


def error_404(body):
    return web.Response(status=404)


async def never(body):
    await asyncio.sleep(5)


@pytest.mark.parametrize(  # O47
    ("reply", "reason"),
    [
        (error_500, "no answer within 0.3 s"),
        (error_404, "HTTP 404"),
        (never, "no answer within 0.3 s"),
        (lambda body: web.Response(text="<html>"), "no JSON object"),
        (lambda body: [1], "no JSON object"),
        (lambda body: {"result": "none"}, "one list per query"),
        (lambda body: {"result": [3]}, "one list of documents"),
    ],
)
def test_a_bad_service_gives_a_short_error_text_and_is_counted(reply, reason):
    (result,), _, metrics = ask(reply, ["q"])
    assert result.text.startswith("Search error: ")
    assert reason in result.text
    assert result.metrics["status"] == "api_error"
    assert metrics["num_tool_errors"] == 1


def test_no_results_read_differently_from_a_failure():  # O47
    (result,), _, metrics = ask(lambda body: {"result": [[]]}, ["q"])
    assert result.text == "No search results found."
    assert "num_tool_errors" not in metrics


def test_long_results_are_bounded():  # O47
    (result,), _, _ = ask(lambda body: {"result": [["x" * 20_000]]}, ["q"], max_result_chars=500)
    assert len(result.text) == 500


def test_a_service_that_recovers_is_asked_again():
    answers = iter([web.Response(status=503), None])

    def reply(body):
        return next(answers) or documents(body)

    (result,), bodies, _ = ask(reply, ["q"], deadline_s=5)
    assert result.metrics["status"] == "success"
    assert len(bodies) == 2


@pytest.mark.parametrize("queries", [[], [""], [" ", ""], "text", None, [3]])  # O47
def test_lists_without_a_query_are_answered_without_a_request(queries):
    async def main():
        tool = SearchTool({"retrieval_service_url": "http://127.0.0.1:9"})
        response, reward, metrics = await tool.execute("i", {"query_list": queries})
        assert "query_list" in response.text
        assert (reward, metrics["status"], tool.client.num_requests) == (0.0, "invalid_queries", 0)

    asyncio.run(main())


def test_a_missing_service_is_refused_at_construction():
    with pytest.raises(ValueError, match="retrieval_service_url"):
        SearchTool({})
    with pytest.raises(ValueError, match="result_format"):
        SearchTool({"retrieval_service_url": "http://x", "result_format": "xml"})


def test_an_unreachable_service_is_an_error_within_the_deadline():
    async def main():
        tool = SearchTool({"retrieval_service_url": "http://127.0.0.1:9", "max_attempts": 1})
        response, _, metrics = await tool.execute("i", {"query_list": ["q"]})
        await tool.close()
        assert "after 1 attempts" in response.text
        assert metrics["is_error"]

    asyncio.run(main())


def test_calls_failures_cache_hits_and_latency_are_reported_for_every_call():
    results, _, metrics = ask(documents, ["a"], ["a", "b"], [])
    reported = [(result.metrics["num_calls"], result.metrics["num_cache_hits"]) for result in results]
    assert reported == [(1, 0), (1, 1), (1, 0)]
    assert [result.metrics["is_error"] for result in results] == [False] * 3
    assert 0 < metrics["tool/search/latency_s"] < 10
    assert metrics["tool/search/num_calls"] == 3
    (failed,), _, metrics = ask(error_404, ["a"])
    assert failed.metrics["is_error"]
    assert (metrics["tool/search/is_error"], metrics["num_tool_errors"]) == (1, 1)

"""The retrieval service's answers, in this process; tests/integration has the service as a process."""

import asyncio
import json
import socket
import threading

import httpx
import pytest
from corpus_file import CorpusFile
from query_batcher import Overloaded, QueryBatcher
from retrieval_server import bind, create_app, parse_arguments
from rows import write_json_lines

PASSAGES = ["Oslo", "Oslo is big", "Bergen", "Bergen is wet", "Tromsø"]


class WordRetriever:
    """Scores by shared words; keeps the batches it was asked."""

    kind, size = "words", len(PASSAGES)

    def __init__(self):
        self.batches, self.release = [], threading.Event()
        self.release.set()

    def search(self, queries, topk):
        self.batches.append(list(queries))
        assert self.release.wait(10)
        if "explode" in queries:
            raise RuntimeError("the index is broken")
        scored = [[(n, float(len({*q.split()} & {*p.split()}))) for n, p in enumerate(PASSAGES)] for q in queries]
        return [sorted((pair for pair in row if pair[1]), key=lambda pair: -pair[1])[:topk] for row in scored]


@pytest.fixture
def corpus(tmp_path):
    rows = [{"id": str(number), "contents": f'"{text}"\n{text}.'} for number, text in enumerate(PASSAGES)]
    write_json_lines(tmp_path / "corpus.jsonl", rows)
    return CorpusFile(tmp_path / "corpus.jsonl")


def ask(corpus, *bodies, retriever=None, **options):
    """Replies of the application to these bodies, one after another."""
    app = create_app(retriever or WordRetriever(), corpus, **options)

    async def main():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://s") as client,
        ):
            return [
                await client.post("/retrieve", content=body if isinstance(body, bytes) else json.dumps(body))
                for body in bodies
            ]

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_with_scores_every_document_is_wrapped_without_them_it_is_not(corpus):
    queries = ["Oslo is", "Bergen"]
    with_scores, without = ask(
        corpus,
        {"queries": queries, "topk": 2, "return_scores": True},
        {"queries": queries, "topk": 1, "return_scores": False},
    )
    assert with_scores.json() == {
        "result": [
            [
                {"document": {"id": "1", "contents": '"Oslo is big"\nOslo is big.'}, "score": 2.0},
                {"document": {"id": "0", "contents": '"Oslo"\nOslo.'}, "score": 1.0},
            ],
            [
                {"document": {"id": "2", "contents": '"Bergen"\nBergen.'}, "score": 1.0},
                {"document": {"id": "3", "contents": '"Bergen is wet"\nBergen is wet.'}, "score": 1.0},
            ],
        ]
    }
    assert without.json() == {
        "result": [
            [{"id": "1", "contents": '"Oslo is big"\nOslo is big.'}],
            [{"id": "2", "contents": '"Bergen"\nBergen.'}],
        ]
    }


def test_topk_that_is_missing_or_zero_is_the_servers_own(corpus):
    replies = ask(corpus, {"queries": ["is"]}, {"queries": ["is"], "topk": 0}, {"queries": ["is"], "topk": 1}, topk=2)
    assert [len(reply.json()["result"][0]) for reply in replies] == [2, 2, 1]


def test_no_query_and_no_result_are_empty_lists(corpus):
    nothing, unknown = ask(corpus, {"queries": []}, {"queries": ["Paris", "Tromsø"], "return_scores": False})
    assert nothing.json() == {"result": []}
    assert unknown.json() == {"result": [[], [{"id": "4", "contents": '"Tromsø"\nTromsø.'}]]}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 400, "no JSON"),
        (b"[" * 100_000, 400, "no JSON"),
        (["Oslo"], 400, "must be an object, not a list"),
        ({}, 422, "queries must be a list of texts, not missing or null"),
        ({"queries": "Oslo"}, 422, "queries must be a list of texts, not a text"),
        ({"queries": ["Oslo", 7]}, 422, "queries[1] must be a text, not a number"),
        ({"queries": [["Oslo"]]}, 422, "queries[0] must be a text, not a list"),
        ({"queries": ["Oslo", " "]}, 422, "queries[1] is empty"),
        ({"queries": ["Oslo"], "topk": "3"}, 422, 'topk must be a whole number from 1 to 100, not "3"'),
        ({"queries": ["Oslo"], "topk": -1}, 422, "topk must be a whole number"),
        ({"queries": ["Oslo"], "topk": 101}, 422, "topk must be a whole number"),
        ({"queries": ["Oslo"], "topk": 1.5}, 422, "topk must be a whole number"),
        ({"queries": ["Oslo"], "topk": True}, 422, "topk must be a whole number"),
        ({"queries": ["Oslo"], "return_scores": "yes"}, 422, "return_scores must be true or false, not a text"),
        ({"queries": ["Oslo"] * 257}, 413, "queries has 257 entries, at most 256"),
        ({"queries": ["x" * 2**20]}, 413, "larger than 1048576 bytes"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong_and_the_next_one_is_answered(corpus, body, status, reason):
    refused, answered = ask(corpus, body, {"queries": ["Oslo"]})
    assert refused.status_code == status
    assert reason in refused.json()["error"]
    assert answered.status_code == 200


def test_unicode_and_half_a_surrogate_pair_are_searched(corpus):
    [reply] = ask(corpus, b'{"queries": ["\\ud800 Oslo", "Troms\xc3\xb8"], "return_scores": false}')
    assert [len(ranked) for ranked in reply.json()["result"]] == [2, 1]


def test_a_failing_index_fails_its_request_and_no_other(corpus):
    failed, answered = ask(corpus, {"queries": ["explode"]}, {"queries": ["Oslo"]})
    assert (failed.status_code, answered.status_code) == (500, 200)


def test_requests_that_wait_are_searched_together_and_equal_queries_once():
    retriever = WordRetriever()
    retriever.release.clear()

    async def main():
        batcher = QueryBatcher(retriever, max_batch=4)
        await batcher.start()
        first = asyncio.create_task(batcher.search(["Oslo"], 1))
        while not retriever.batches:
            await asyncio.sleep(0.005)
        rest = [
            asyncio.create_task(batcher.search(queries, topk))
            for queries, topk in ((["Bergen", "Oslo"], 1), (["Oslo", "is"], 2), (["wet"], 1))
        ]
        await asyncio.sleep(0.02)
        retriever.release.set()
        found = await asyncio.gather(first, *rest)
        await batcher.stop()
        return found

    first, second, third, fourth = asyncio.run(asyncio.wait_for(main(), 30))
    # Four queries at most, whole requests only; the fourth request waits for the next batch.
    assert retriever.batches == [["Oslo"], ["Bergen", "Oslo", "is"], ["wet"]]
    assert first == [[(0, 1.0)]]
    assert second == [[(2, 1.0)], [(0, 1.0)]]
    assert [len(ranked) for ranked in third] == [2, 2]
    assert fourth == [[(3, 1.0)]]


def test_too_many_waiting_queries_are_refused_at_once():
    retriever = WordRetriever()
    retriever.release.clear()

    async def main():
        batcher = QueryBatcher(retriever, max_waiting=2)
        await batcher.start()
        first = asyncio.create_task(batcher.search(["Oslo"], 1))
        while not retriever.batches:
            await asyncio.sleep(0.005)
        waiting = asyncio.create_task(batcher.search(["Oslo", "is"], 1))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await batcher.search(["wet"], 1)
        retriever.release.set()
        await asyncio.gather(first, waiting)
        await batcher.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_taken_port_and_a_foreign_address_are_refused_with_the_option():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"--port {port}: Address already in use. Give another port"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match="--host 192.0.2.1"):
        bind("192.0.2.1", 0)


def test_options_out_of_range_are_refused(capsys):
    paths = ["--index_path", "i", "--corpus_path", "c"]
    assert parse_arguments(paths).host == "127.0.0.1"
    for wrong in (["--topk", "0"], ["--num_threads", "0"], ["--port", "-1"], ["--topk", "101"]):
        with pytest.raises(SystemExit):
            parse_arguments([*paths, *wrong])
        assert f"{wrong[0]} {wrong[1]}: must be at" in capsys.readouterr().err

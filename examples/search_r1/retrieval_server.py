"""A retrieval service over HTTP, as Search-R1's: queries in, ranked passages out.

Run: python examples/search_r1/retrieval_server.py --index_path data/search_r1/flat.index
         --corpus_path data/search_r1/corpus.jsonl --topk 3

``POST /retrieve`` with ``{"queries": [text, ...], "topk": 3, "return_scores": true}`` answers
``{"result": [[{"document": {"id", "contents"}, "score": number}, ...], ...]}``, one inner list per query; without
scores the inner lists hold the documents themselves. ``GET /health`` says what is served. It is a process of its own,
listens on the loopback interface unless told otherwise, has no access control, and ends on SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from corpus_file import CorpusFile
from embedder import FAMILIES
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from query_batcher import Overloaded, QueryBatcher
from retriever import BM25, Retriever, check_sizes, load_retriever

MAX_TOPK = 100


class BadRequest(ValueError):
    """What the client sent cannot be answered.

    Args:
        status: HTTP status.
        message: For the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(
    retriever: Retriever,
    corpus: CorpusFile,
    *,
    topk: int = 3,
    max_queries: int = 256,
    max_request_bytes: int = 2**20,
    max_batch: int = 64,
) -> FastAPI:
    """Return the application.

    Args:
        retriever: Finds passage numbers.
        corpus: Has the passages.
        topk: Passages per query where the request does not say.
        max_queries: Queries of one request.
        max_request_bytes: Size of a request's body.
        max_batch: Queries embedded at once.
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    batcher = QueryBatcher(retriever, max_batch=max_batch)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await batcher.start()
        yield
        await batcher.stop()

    app = FastAPI(title="Retrieval", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    async def retrieve(request: Request) -> JSONResponse:
        try:
            queries, asked, with_scores = parse_request(await read_body(request, max_request_bytes), max_queries)
            found = await batcher.search(queries, asked or topk)
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        except Overloaded as error:
            return JSONResponse({"error": f"overloaded: {error}"}, status_code=503, headers={"Retry-After": "1"})
        return JSONResponse({"result": [_documents(corpus, ranked, with_scores) for ranked in found]})

    async def health() -> dict[str, Any]:
        return {"status": "ok", "passages": retriever.size, "index": retriever.kind, "topk": topk}

    app.add_api_route("/retrieve", retrieve, methods=["POST"], response_model=None)
    app.add_api_route("/health", health, methods=["GET"])
    return app


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body, without ever holding more than ``max_bytes`` and one chunk of it.

    Raises:
        BadRequest: If it is larger.
    """
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise BadRequest(413, f"the request is larger than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_request(body: bytes, max_queries: int) -> tuple[list[str], int, bool]:
    """Return queries, topk (0 where it is missing) and whether scores are wanted.

    Raises:
        BadRequest: Saying what is wrong.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest(400, "the request is no JSON") from None
    if not isinstance(content, dict):
        raise BadRequest(400, f"the request must be an object, not {_kind(content)}")
    queries = content.get("queries")
    if not isinstance(queries, list):
        raise BadRequest(422, f"queries must be a list of texts, not {_kind(queries)}")
    if len(queries) > max_queries:
        raise BadRequest(413, f"queries has {len(queries)} entries, at most {max_queries} are answered at once")
    for position, query in enumerate(queries):
        if not isinstance(query, str):
            raise BadRequest(422, f"queries[{position}] must be a text, not {_kind(query)}")
        if not query.strip():
            raise BadRequest(422, f"queries[{position}] is empty")
    topk = content.get("topk") or 0
    if not isinstance(topk, int) or isinstance(topk, bool) or not 0 <= topk <= MAX_TOPK:
        raise BadRequest(
            422, f"topk must be a whole number from 1 to {MAX_TOPK}, not {json.dumps(content['topk'])[:50]}"
        )
    with_scores = content.get("return_scores") or False
    if not isinstance(with_scores, bool):
        raise BadRequest(422, f"return_scores must be true or false, not {_kind(with_scores)}")
    # Half of a surrogate pair cannot be tokenised.
    return [query.encode("utf-8", "replace").decode() for query in queries], topk, with_scores


def _documents(corpus: CorpusFile, ranked: list[tuple[int, float]], with_scores: bool) -> list[dict[str, Any]]:
    if with_scores:
        return [{"document": corpus[number], "score": score} for number, score in ranked]
    return [corpus[number] for number, _ in ranked]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing or null"}
    return names.get(type(value), "a number")


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; connections are refused until the server listens.

    Raises:
        OSError: If the address is taken or not ours; the message names the option.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(
            f"--host {host} --port {port}: {error.strerror}. Give another port (0 takes a free one), or end the "
            "process that has it."
        ) from error
    return bound


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index_path", type=Path, required=True, help="faiss index, or the folder of a bm25 index")
    parser.add_argument("--corpus_path", type=Path, required=True)
    parser.add_argument("--topk", type=int, default=3, help="passages per query where a request does not say")
    parser.add_argument("--retriever_name", choices=[*FAMILIES, BM25], default="minilm")
    parser.add_argument("--retriever_model", help="folder or hub id (default: the family's usual one)")
    parser.add_argument("--faiss_gpu", action="store_true", help="search on the GPUs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the service has no access control")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--num_threads", type=int, default=1, help="threads of embedder and index")
    parser.add_argument("--max_queries", type=int, default=256, help="queries of one request")
    parser.add_argument("--max_request_bytes", type=int, default=2**20)
    options = parser.parse_args(arguments)
    for name, lowest in (("topk", 1), ("num_threads", 1), ("max_queries", 1), ("max_request_bytes", 1), ("port", 0)):
        if getattr(options, name) < lowest:
            parser.error(f"--{name} {getattr(options, name)}: must be at least {lowest}")
    if options.topk > MAX_TOPK:
        parser.error(f"--topk {options.topk}: must be at most {MAX_TOPK}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, load, serve."""
    options = parse_arguments(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        # First, and before anything is loaded: a taken port costs a second, not a minute.
        bound = bind(options.host, options.port)
        corpus = CorpusFile(options.corpus_path)
        if options.retriever_name != BM25:
            _limit_threads(options.num_threads)
        retriever = load_retriever(
            index_path=options.index_path,
            retriever_name=options.retriever_name,
            retriever_model=options.retriever_model,
            on_gpu=options.faiss_gpu,
            num_threads=options.num_threads,
        )
        check_sizes(retriever, len(corpus), options.index_path, options.corpus_path)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise SystemExit(f"retrieval_server: error: {error}") from error
    app = create_app(
        retriever,
        corpus,
        topk=options.topk,
        max_queries=options.max_queries,
        max_request_bytes=options.max_request_bytes,
    )
    address = f"http://{options.host}:{bound.getsockname()[1]}/retrieve"
    print(f"{address}: {retriever.size} passages, {retriever.kind}, topk {options.topk}", flush=True)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
    uvicorn.Server(config).run(sockets=[bound])


def _limit_threads(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)


if __name__ == "__main__":
    main()

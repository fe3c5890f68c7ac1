"""A search tool in front of a retrieval service (Search-R1).

Position in the flow: ToolSession -> **SearchTool** -> RetrievalClient. It always answers with a short text: a search
that found nothing and a search that failed read differently, and the failure is counted.
"""

from __future__ import annotations

import json
import time
from typing import Any

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.retrieval_client import RetrievalClient, RetrievalError
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_NO_RESULTS = "No search results found."


class SearchTool(BaseTool):
    """Looks queries up in a retrieval service.

    Args:
        config: ``retrieval_service_url`` (required); ``topk`` (documents per query, 3); ``timeout`` or
            ``default_timeout`` (seconds per HTTP request, 30); ``deadline_s`` (seconds per call with all retries,
            60); ``max_attempts`` (10); ``rate_limit`` and ``num_workers`` (HTTP requests at a time in one worker,
            the smaller counts, 120); ``cache_size`` (queries, 10000; 0 is off); ``result_format`` (``text``, or
            ``json`` for ``{"result": text}`` as verl sends it); ``max_result_chars`` (20000).
        tool_schema: Default: ``search(query_list: array of string)``.

    Raises:
        ValueError: Without ``retrieval_service_url``, or for an unknown ``result_format``.
    """

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        url = self.config.get("retrieval_service_url")
        if not url:
            raise ValueError("config.retrieval_service_url is missing: give the address of the retrieve endpoint.")
        self.result_format = self.config.get("result_format", "text")
        if self.result_format not in ("text", "json"):
            raise ValueError(f"config.result_format={self.result_format!r}: it must be 'text' or 'json'.")
        self.max_result_chars = int(self.config.get("max_result_chars", 20_000))
        deadline_s = float(self.config.get("deadline_s", 60.0))
        self.client = RetrievalClient(
            url,
            topk=int(self.config.get("topk", 3)),
            timeout_s=float(self.config.get("timeout", self.config.get("default_timeout", 30.0))),
            deadline_s=deadline_s,
            max_attempts=int(self.config.get("max_attempts", 10)),
            max_concurrent=min(int(self.config.get("rate_limit", 120)), int(self.config.get("num_workers", 120))),
            cache_size=int(self.config.get("cache_size", 10_000)),
        )
        if self.timeout_s is None:
            # The client's deadline answers first, with a reason.
            self.timeout_s = deadline_s + 5.0

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema: ``search(query_list: array of string)``."""
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "search",
                    "description": "Searches for relevant information based on queries.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "query_list": {
                                "type": "array",
                                "items": {"type": "string"},
                                "description": "Fully formed semantic queries.",
                            }
                        },
                        "required": ["query_list"],
                    },
                },
            }
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Look up ``parameters["query_list"]``; the reward is 0.0.

        Metrics: ``num_calls`` (1), ``query_count``, ``total_results``, ``status`` (``success``, ``no_results``,
        ``invalid_queries``, ``api_error``), ``is_error`` (the service failed) with a reason in ``api_request_error``,
        ``num_cache_hits`` (queries that needed no request) and ``latency_s``.
        """
        query_list = parameters.get("query_list")
        if not isinstance(query_list, list):
            return self._answer("Error: query_list must be a list of texts.", status="invalid_queries", num_queries=0)
        queries = [query.strip() for query in query_list if isinstance(query, str) and query.strip()]
        if not queries:
            return self._answer("Error: query_list holds no query.", status="invalid_queries", num_queries=0)
        started = time.perf_counter()
        metrics: dict[str, Any] = {"num_queries": len(queries)}
        try:
            retrieved = await self.client.retrieve(queries)
        except RetrievalError as error:
            metrics |= {"latency_s": time.perf_counter() - started, "is_error": True, "api_request_error": str(error)}
            return self._answer(f"Search error: {error}", status="api_error", **metrics)
        num_results = sum(len(documents) for documents in retrieved.documents)
        metrics |= {
            "latency_s": time.perf_counter() - started,
            "num_cache_hits": retrieved.num_cache_hits,
            "total_results": num_results,
        }
        if num_results == 0:
            return self._answer(_NO_RESULTS, status="no_results", **metrics)
        text = "\n---\n".join(format_documents(documents) for documents in retrieved.documents)
        return self._answer(text, status="success", **metrics)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    def _answer(
        self, text: str, *, status: str, num_queries: int, **metrics: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        text = text[: self.max_result_chars]
        if self.result_format == "json":
            text = json.dumps({"result": text}, ensure_ascii=False)
        # Zeros are reported too: a share needs all calls under it.
        counts = {"num_calls": 1, "query_count": num_queries, "is_error": False, "num_cache_hits": 0}
        return ToolResponse(text=text), 0.0, {**counts, "status": status, **metrics}


def format_documents(documents: list[Any]) -> str:
    """Return documents numbered from 1, each with the first line of its ``contents`` as title."""
    blocks = []
    for number, document in enumerate(documents, start=1):
        contents = document.get("contents", "") if isinstance(document, dict) else document
        title, _, body = str(contents).partition("\n")
        blocks.append(f"Doc {number} (Title: {title.strip()})\n{body.strip()}".strip())
    return "\n\n".join(blocks) or _NO_RESULTS

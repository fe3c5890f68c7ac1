"""The retrieval service as a process of its own: started, ended, killed and started again while a fit searches."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import lightning as L
import pytest
from tiny_fit import tiny_data, tiny_fit

from lit_rl.agents import AgentSettings, ToolAgentLoop
from lit_rl.agents.tool_parsers import FunctionCall, ParsedMessage

pytestmark = pytest.mark.usefixtures("nothing_left")

EXAMPLES = Path(__file__).parents[2] / "examples"
OUTAGE_S = 10.0


class Server:
    """``retrieval_server.py`` over three passages and BM25, which loads no model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, 0
        self.process: subprocess.Popen[str] | None = None
        passages = [f'"{name}"\n{name} is a city.' for name in ("Oslo", "Bergen", "Paris")]
        corpus = "".join(json.dumps({"id": str(n), "contents": text}) + "\n" for n, text in enumerate(passages))
        (folder / "corpus.jsonl").write_text(corpus)
        self._script("build_index.py").communicate(timeout=120)

    def start(self) -> None:
        """Start, on the port of the first time, and wait until it serves."""
        self.process = self._script("retrieval_server.py", "--port", str(self.port))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line + self.process.communicate(timeout=10)[1]
        self.url = line.split(": ")[0]
        self.port = int(self.url.split(":")[2].split("/")[0])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self.health = httpx.get(self.url.replace("retrieve", "health"), timeout=5).json()
                return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the server does not answer")

    def end(self, how: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.communicate(timeout=30)
        return self.process.returncode

    def _script(self, name: str, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                str(EXAMPLES / "search_r1" / name),
                "--corpus_path", str(self.folder / "corpus.jsonl"),
                "--index_path", str(self.folder / "bm25"),
                "--retriever_name", "bm25",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip


@pytest.fixture
def server(tmp_path: Path):  # type: ignore[no-untyped-def]
    server = Server(tmp_path)
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.end(signal.SIGKILL)


def test_it_serves_refuses_a_second_on_its_port_and_ends_on_sigterm(server: Server) -> None:
    assert server.health == {"status": "ok", "passages": 3, "index": "bm25", "topk": 3}
    reply = httpx.post(server.url, json={"queries": ["Where is Oslo"]}, timeout=10).json()
    assert [document["id"] for document in reply["result"][0]] == ["0"] or len(reply["result"][0]) == 3
    second = server._script("retrieval_server.py", "--port", str(server.port))
    _, error = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"retrieval_server: error: --host 127.0.0.1 --port {server.port}: Address already in use." in error
    assert "Traceback" not in error
    assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, timeout=5)


class SearchesOnce:
    """Finds a search in the first turn and none later: a random model writes none."""

    num_searches = 0

    def __init__(self) -> None:
        self.num_turns = 0

    def parse_ids(self, ids: list[int], tokenizer: Any, schemas: Any, *, is_truncated: bool) -> ParsedMessage:
        self.num_turns += 1
        if self.num_turns > 1:
            return ParsedMessage("text", [])
        SearchesOnce.num_searches += 1  # every query another: none is answered from the cache
        arguments = json.dumps({"query_list": [f"city {SearchesOnce.num_searches}"]})
        return ParsedMessage("text", [FunctionCall(name="search", arguments=arguments)])


class SearchingLoop(ToolAgentLoop):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parser = SearchesOnce()  # type: ignore[assignment]

    async def generate(self, prompt_ids, sampling):  # type: ignore[no-untyped-def]
        output = await super().generate(prompt_ids, sampling)
        if self.parser.num_turns == 0:  # type: ignore[attr-defined]
            output.token_ids, output.logprobs = output.token_ids[:4], output.logprobs[:4]
            output.policy_versions, output.stop_reason = output.policy_versions[:4], "stop"
        return output


class Outage(L.Callback):
    """Kills the server while the second rollout goes on, starts it ten seconds later, and ends the fit after that."""

    def __init__(self, server: Server) -> None:
        self.server, self.thread = server, threading.Thread(target=self._return, name="outage")
        self.num_after = 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.server.end(signal.SIGKILL)
            self.thread.start()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.num_after += trainer.current_epoch > 1 and not self.thread.is_alive()
        trainer.should_stop = self.num_after == 3

    def _return(self) -> None:
        time.sleep(OUTAGE_S)
        self.server.start()


@pytest.mark.parametrize(("deadline_s", "some_fail"), [(1.0, True), (60.0, False)])
def test_a_fit_goes_on_while_the_server_is_away_for_ten_seconds(
    server: Server, tmp_path: Path, deadline_s: float, some_fail: bool
) -> None:
    config = {"type": "native", "retrieval_service_url": server.url, "deadline_s": deadline_s, "topk": 1}
    tools = {"tools": [{"class_name": "lit_rl.tools.search_tool.SearchTool", "config": config}]}
    (tmp_path / "tools.yaml").write_text(json.dumps(tools))
    agents = AgentSettings(
        num_workers=1,
        default_agent_loop=f"{__name__}.SearchingLoop",
        tool_config_path=str(tmp_path / "tools.yaml"),
        chat_template=str(EXAMPLES / "chatml_tools.jinja"),
    )
    data = tiny_data(
        agents=agents, max_prompt_tokens=256, max_response_tokens=80, max_tokens_per_micro_batch=700, val_data=None
    )
    outage = Outage(server)
    run = tiny_fit(1000, data=data, callbacks=[outage])
    started = time.monotonic()
    run.fit()
    seconds = time.monotonic() - started

    rates = [rate for _, rate in run.logger.column("tool/search/is_error/per_call")]
    assert len(rates) == len(run.iterations)
    assert (rates[0], rates[-1]) == (0.0, 0.0)
    assert max(rates) == (1.0 if some_fail else 0.0)
    assert all(trajectory.error is None for trajectories in run.iterations for trajectory in trajectories)
    texts = [run.data.decode(t.response_ids) for trajectories in run.iterations for t in trajectories]
    failed = [text for text in texts if "Search error: no answer within 1 s" in text]
    assert len(failed) == sum(rate * 8 for rate in rates)
    assert seconds > OUTAGE_S

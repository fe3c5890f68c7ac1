"""The mailbox by itself, and what a rank says that has lost rank 0."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from lit_rl.cluster import ProcessIdentity
from lit_rl.experience import mailbox
from lit_rl.experience.mailbox import CollectiveExchange, ExperienceMailbox, RankZeroLost, SoloExchange, rank_zero_lost


def test_ranks_take_their_own_and_each_post_drops_the_one_before() -> None:
    async def run() -> list[Any]:
        box = ExperienceMailbox()
        waiting = asyncio.create_task(box.take(0, 1, 5.0))
        await asyncio.sleep(0)
        await box.post(0, [[], ["a1"], ["a2"]])
        taken = [(await waiting)[0], (await box.take(0, 2, 5.0))[0]]
        await box.post(1, [[], ["b1"], ["b2"]])
        taken.append((await box.take(1, 1, 5.0))[0])
        with pytest.raises(RuntimeError, match="Rank 2 asks for exchange 0, rank 0 is at 1 already"):
            await box.take(0, 2, 0.0)
        return taken

    assert asyncio.run(run()) == [["a1"], ["a2"], ["b1"]]


def test_who_waits_in_vain_hears_how_long_rank_0_has_been_silent() -> None:
    async def run() -> tuple[float, float]:
        box = ExperienceMailbox()
        await asyncio.sleep(0.05)
        refs, silent_s = await box.take(0, 1, 0.01)
        assert refs is None
        await box.beat()
        return silent_s, (await box.take(0, 1, 0.0))[1]

    before, after = asyncio.run(run())
    assert before > 0.05
    assert after < before


def test_one_rank_gets_what_is_made() -> None:
    assert SoloExchange().scatter("iteration 0", lambda: ["all"]) == "all"


def test_a_rank_waits_for_rank_0_to_say_why_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = psutil.Process(process.pid)
    identity = ProcessIdentity(ProcessIdentity.current().host, process.pid, seen.create_time())
    assert identity.may_live()
    monkeypatch.setattr(mailbox, "_RANK_0_ENDS_S", 0.5)

    error = rank_zero_lost("iteration 3", 2, identity, "the mailbox died")
    assert identity.may_live()  # it gave up waiting, and says so all the same
    process.kill()
    deadline = time.monotonic() + 10
    while identity.may_live() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen.status() == psutil.STATUS_ZOMBIE  # nobody has waited for it yet
    assert not identity.may_live()
    process.communicate(timeout=10)
    assert not identity.may_live()
    assert isinstance(error, RankZeroLost)
    assert "Rank 0 ended while rank 2 waited for iteration 3" in str(error)
    assert "the mailbox died" in str(error)


def test_a_broken_collective_is_told_as_the_loss_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def scatter(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.scatter_object_list", scatter)
    monkeypatch.setattr(mailbox, "_RANK_0_ENDS_S", 0.0)
    with pytest.raises(RankZeroLost, match="waited for iteration 0.*Connection closed by peer"):
        CollectiveExchange(1, ProcessIdentity.current()).scatter("iteration 0", list)

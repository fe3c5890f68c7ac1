from __future__ import annotations

import asyncio

import pytest

from lit_rl.serving.load_balancer import LoadBalancer, NoServerAvailableError


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_choice_of_replica() -> None:
    # Case O40 (verl#5399, verl#2826).
    balancer = LoadBalancer(["A", "B"])

    assert [balancer.acquire(request) for request in ("r1", "r2", "r3")] == ["A", "B", "A"]
    balancer.release("B")
    assert balancer.acquire("r4") == "B"
    balancer.release("A")
    assert balancer.acquire("r1") == "A"
    assert balancer.get_status()["servers"] == {"A": 2, "B": 1}
    assert balancer.acquire("r5") == "B"


def test_conversations_that_start_while_all_is_idle_are_spread() -> None:
    balancer = LoadBalancer(["A", "B", "C"])

    chosen = []
    for conversation in range(6):
        chosen.append(balancer.acquire(str(conversation)))
        balancer.release(chosen[-1])

    assert chosen == ["A", "B", "C", "A", "B", "C"]


def test_a_conversation_leaves_a_server_that_is_loaded_beyond_the_ratio() -> None:
    balancer = LoadBalancer(["A"], max_load_ratio=2.0)
    for _ in range(10):
        balancer.acquire("r")
    balancer.add_servers(["B"])
    balancer.acquire("other")  # B has one: the limit for A is 2 * 1 + 8

    assert balancer.acquire("r") == "A"
    assert balancer.acquire("r") == "B"


def test_without_a_ratio_a_conversation_stays_whatever_the_load() -> None:
    balancer = LoadBalancer(["A"], max_load_ratio=None)
    balancer.acquire("r")
    balancer.add_servers(["B"])

    assert {balancer.acquire("r") for _ in range(50)} == {"A"}


def test_the_least_recently_used_conversation_is_forgotten() -> None:
    balancer = LoadBalancer(["A", "B"], sticky_capacity=2)
    turns = ["r1", "r2", "r1", "r1", "r3"]

    # The last one pushes out r2, because r1 was used after it.
    assert [balancer.acquire(turn) for turn in turns] == ["A", "B", "A", "A", "B"]
    assert balancer.acquire("r1") == "A"
    assert balancer.get_status()["sticky_entries"] == 2
    for _ in range(4):
        balancer.release("A")
    assert balancer.acquire("r2") == "A"  # its server was B


def test_release_stops_at_zero_and_ignores_unknown_servers() -> None:
    balancer = LoadBalancer(["A"])
    balancer.acquire("r1")

    balancer.release("A")
    balancer.release("A")
    balancer.release("nobody")

    assert balancer.get_total_inflight() == 0


def test_a_removed_server_is_left_by_its_conversations() -> None:
    balancer = LoadBalancer(["A", "B"])
    assert balancer.acquire("r1") == "A"

    balancer.remove_servers(["A"])
    balancer.release("A")

    assert balancer.acquire("r1") == "B"
    assert balancer.get_status()["servers"] == {"B": 1}


def test_an_added_server_starts_with_nothing_in_flight() -> None:
    balancer = LoadBalancer(["A"])
    balancer.acquire("r1")

    balancer.add_servers({"A": "handle"})

    assert balancer.get_inflight_count("A") == 0
    assert balancer.get_handles() == {"A": "handle"}


def test_an_empty_pool_is_legal_until_something_is_asked() -> None:
    with pytest.raises(NoServerAvailableError, match="No available servers: 0 registered"):
        LoadBalancer().acquire("r1")


def test_failures_in_a_row_eject_a_server_until_a_probe_succeeds() -> None:
    clock = FakeClock()
    balancer = LoadBalancer(["A", "B"], max_failures=2, probe_after_s=10.0, clock=clock)
    for _ in range(2):
        balancer.report_failure("A")

    assert {balancer.acquire(f"r{i}") for i in range(4)} == {"B"}
    clock.now_s += 10.0
    assert balancer.acquire("probe") == "A"
    assert balancer.acquire("r5") == "B"  # one probe at a time
    balancer.release("A")
    assert balancer.get_status()["ejected_servers"] == []
    assert balancer.acquire("r6") == "A"


def test_a_failed_probe_keeps_a_server_out() -> None:
    clock = FakeClock()
    balancer = LoadBalancer(["A", "B"], probe_after_s=10.0, clock=clock)
    balancer.report_failure("A", is_dead=True)
    clock.now_s += 10.0

    assert balancer.acquire("probe") == "A"
    balancer.release("A", has_failed=True)

    clock.now_s += 9.0
    assert balancer.acquire("r1") == "B"
    assert balancer.get_status()["num_ejections"] == 1


def test_a_success_between_failures_keeps_a_server_in() -> None:
    balancer = LoadBalancer(["A"], max_failures=2)

    for _ in range(3):
        balancer.release(balancer.acquire("r"), has_failed=True)
        balancer.release(balancer.acquire("r"))

    assert balancer.acquire("r") == "A"


def test_all_servers_ejected_is_told_as_such() -> None:
    balancer = LoadBalancer(["A"])
    balancer.report_failure("A", is_dead=True)

    with pytest.raises(NoServerAvailableError, match="1 registered, 1 ejected"):
        balancer.acquire("r")


def test_a_server_to_avoid_is_used_only_if_there_is_no_other() -> None:
    balancer = LoadBalancer(["A", "B"])
    assert balancer.acquire("r") == "A"

    assert balancer.acquire("r", avoid=["A"]) == "B"
    assert balancer.acquire("r", avoid=["A", "B"]) == "B"  # its conversation is there now


def test_requests_of_a_client_that_is_gone_no_longer_count() -> None:
    clock = FakeClock()
    balancer = LoadBalancer(["A", "B"], lease_s=60.0, clock=clock)
    balancer.acquire("r1", owner="dead")
    balancer.acquire("r2", owner="alive")
    clock.now_s += 40.0
    asyncio.run(balancer.exchange("alive", [], []))
    clock.now_s += 40.0

    assert balancer.get_status()["servers"] == {"A": 0, "B": 1}
    balancer.release("A", owner="dead")  # too late to count
    assert balancer.get_total_inflight() == 1


def test_exchange_releases_before_it_acquires_and_tells_where_nothing_is_free() -> None:
    balancer = LoadBalancer(["A", "B"])

    first = asyncio.run(balancer.exchange("client", [], [("r1", ()), ("r2", ()), ("r3", ("A",))]))
    second = asyncio.run(balancer.exchange("client", [("B", False, False), ("B", False, False)], [("r4", ())]))
    balancer.remove_servers(["A", "B"])

    assert first == ["A", "B", "B"]
    assert second == ["B"]
    assert asyncio.run(balancer.acquire_many(["r5"])) == [None]


def test_deterministic_routing_depends_on_the_conversation_alone() -> None:
    ids = [f"conversation-{i}" for i in range(40)]
    forward = LoadBalancer(["A", "B"], is_deterministic=True)
    backward = LoadBalancer(["A", "B"], is_deterministic=True)

    chosen = {i: forward.acquire(i) for i in ids}

    assert {i: backward.acquire(i) for i in reversed(ids)} == chosen
    assert set(chosen.values()) == {"A", "B"}


@pytest.mark.parametrize("options", [{"max_failures": 0}, {"sticky_capacity": 0}, {"max_load_ratio": 0.5}])
def test_impossible_options_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LoadBalancer(["A"], **options)  # type: ignore[arg-type]

"""Reward functions that another process can import."""

from __future__ import annotations

import asyncio
import os
import time


def length(solution_str: str) -> float:
    print("a print must not disturb the protocol")
    return float(len(solution_str))


def spin_on_x(solution_str: str) -> float:
    while solution_str == "x":
        pass
    return 1.0


def exit_on_x(solution_str: str) -> float:
    if solution_str == "x":
        os._exit(3)
    return 1.0


def raise_on_x(solution_str: str) -> float:
    if solution_str == "x":
        raise LookupError("x is not rewarded")
    return 1.0


def sleep_on_x(solution_str: str) -> float:
    if solution_str == "x":
        time.sleep(0.5)
    return 1.0


async def sleep_long_on_x(solution_str: str, bonus: float = 0.0) -> float:
    await asyncio.sleep(3600 if solution_str == "x" else 0)
    return 1.0 + bonus

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import reward_samples

from lit_rl.rewards import RewardPart, RewardSettings
from lit_rl.rewards.functions import absolute_spec, importable_spec, load_reward_function

USER_FILE = """
LOADS.append(1) if "LOADS" in globals() else globals().update(LOADS=[1])

def my_reward(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return scale * (solution_str == ground_truth)

def other(solution_str):
    return 0.0
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "user_rewards.py"
    path.write_text(USER_FILE)
    return path


def test_function_in_a_file_is_loaded_once_from_any_folder(user_file: Path, tmp_path: Path, monkeypatch) -> None:  # O49
    monkeypatch.chdir(tmp_path)
    spec = absolute_spec("user_rewards.py:my_reward")
    monkeypatch.chdir("/")
    first = load_reward_function(spec, {"scale": 2.0})
    second = load_reward_function(spec, {})
    assert first.call is second.call
    assert first.call.__globals__["LOADS"] == [1]
    assert first.kwargs == {"scale": 2.0}


def test_wrong_name_lists_file_name_and_the_names_there_are(user_file: Path) -> None:  # O49
    with pytest.raises(ValueError, match=r"user_rewards\.py has no function 'my_rewrad'. It has: my_reward, other\."):
        load_reward_function(f"{user_file}:my_rewrad", {})


def test_name_defaults_to_compute_score(user_file: Path) -> None:
    with pytest.raises(ValueError, match="no function 'compute_score'"):
        load_reward_function(str(user_file), {})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/nowhere/rewards.py:f", "there is no file /nowhere/rewards.py"),
        ("no_such_package.rewards:f", "cannot import 'no_such_package.rewards'"),
        ("f", "write 'module:name'"),
    ],
)
def test_missing_file_or_module_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward_function(spec, {})


@pytest.mark.parametrize("spec", ["reward_samples:length", "reward_samples.length"])
def test_dotted_paths_with_colon_and_dot(spec: str) -> None:
    assert load_reward_function(spec, {}).call is reward_samples.length


def test_function_gets_only_the_arguments_it_takes() -> None:
    assert load_reward_function(lambda solution_str: 1.0, {}).arguments == ("solution_str",)
    assert len(load_reward_function(lambda **anything: 1.0, {}).arguments) == 4


def test_parameters_that_do_not_fit_are_named_at_load() -> None:
    def needs_more(solution_str: str, judge: Any) -> float:
        return 0.0

    with pytest.raises(ValueError, match="It needs judge beside them"):
        load_reward_function(needs_more, {})
    load_reward_function(needs_more, {"judge": None})
    with pytest.raises(ValueError, match=r"It does not take jugde of data\.rewards\.kwargs"):
        load_reward_function(needs_more, {"judge": None, "jugde": None})


def test_async_functions_and_async_call_methods_are_recognised() -> None:
    class Judge:
        async def __call__(self, solution_str: str) -> float:
            return 1.0

    assert load_reward_function(reward_samples.sleep_long_on_x, {}).is_async
    assert load_reward_function(Judge(), {}).is_async
    assert not load_reward_function(reward_samples.length, {}).is_async


def test_closure_cannot_run_in_another_process() -> None:
    assert importable_spec(reward_samples.length) == "reward_samples:length"
    with pytest.raises(ValueError, match=r"data\.rewards\.isolation='process' needs a function"):
        importable_spec(functools.partial(reward_samples.length))
    with pytest.raises(ValueError, match="set isolation to 'thread'"):
        importable_spec(lambda solution_str: 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "reward_samples:length", "parts": [RewardPart(name="x")]}, "not both"),
        ({"parts": [RewardPart(name="x"), RewardPart(name="x")]}, "names must be unique"),
        ({"parts": [RewardPart(name="x", weight=float("nan"))]}, "the weight of x, nan, must be a finite number"),
        ({"isolation": "fork"}, r"data\.rewards\.isolation='fork'"),
        ({"timeout_s": 0}, r"data\.rewards\.timeout_s=0"),
        ({"timeout_s": float("nan")}, r"data\.rewards\.timeout_s=nan"),
        ({"num_workers": 0}, r"data\.rewards\.num_workers=0"),
        ({"function": "reward_samples:lenght"}, r"has no function 'lenght'.*length"),
        ({"function": "nowhere/rewards.py"}, r"data\.rewards\.function: there is no file .*nowhere/rewards\.py"),
        ({"parts": [RewardPart(name="x", function="no.such:reward")]}, "cannot import 'no.such'"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_they_are_made(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardSettings(**settings)

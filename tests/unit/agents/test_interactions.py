"""A simulated user in the tool loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_tool_agent import call, roll_out, text_of

from lit_rl.agents import AgentSettings
from lit_rl.agents.interactions import BaseInteraction, load_interactions
from lit_rl.agents.run_tools import row_schemas


class Asking(BaseInteraction):
    """Asks again until the policy says "42"; scores the turn."""

    def __init__(self, config):
        super().__init__(config)
        self.events: list[object] = []

    async def start_interaction(self, instance_id=None, **kwargs):
        self.events.append(("start", kwargs))
        return await super().start_interaction(instance_id)

    async def generate_response(self, instance_id, messages, **kwargs):
        assert messages[-1]["role"] == "assistant"
        is_right = "42" in messages[-1]["content"]
        return is_right, "Try again.", float(is_right), {"replies": 1}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.25

    async def finalize_interaction(self, instance_id, **kwargs):
        self.events.append("finalize")


ROW = {"interaction_kwargs": {"name": "asking", "ground_truth": "42"}}


def test_the_user_answers_messages_without_calls_until_satisfied() -> None:
    user = Asking({"name": "asking"})
    trajectory, client, _ = roll_out(
        "7", call(), "it is 42", extra_info=ROW, interactions={"asking": user}, score_with_tools=True
    )
    assert text_of(trajectory, 0) == "u:Try again.|t:found x|"
    assert trajectory.loss_mask[-1] == 1
    assert [message["role"] for message in trajectory.messages] == [
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trajectory.num_turns == 2 + 3 + 1
    assert trajectory.reward_parts == {"tool_reward": 0.25, "user_turn_score": 1.0, "user_score": 0.25}
    assert trajectory.reward == 1.5
    assert trajectory.metrics["interaction/asking/replies"] == 2
    assert user.events == [("start", {"ground_truth": "42"}), "finalize"]


def test_limits_hold_for_users_too() -> None:
    user = Asking({"name": "asking"})
    _, client, _ = roll_out(*["7"] * 9, extra_info=ROW, interactions={"asking": user}, max_user_turns=2)
    assert len(client.prompts) == 3
    trajectory, client, _ = roll_out(*["7"] * 9, extra_info=ROW, interactions={"asking": user}, limit=10)
    assert len(client.prompts) == 1
    assert trajectory.is_truncated


def test_a_row_without_interaction_has_no_user() -> None:
    trajectory, client, _ = roll_out("7", interactions={"asking": Asking({"name": "asking"})})
    assert len(client.prompts) == 1
    assert trajectory.reward_parts == {}


class Failing(Asking):
    async def generate_response(self, instance_id, messages, **kwargs):
        raise OSError("no model behind it")


class Hanging(Asking):
    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.sleep(60)


class NeverThere(Asking):
    async def start_interaction(self, instance_id=None, **kwargs):
        raise OSError("nobody")

    async def finalize_interaction(self, instance_id, **kwargs):
        await super().finalize_interaction(instance_id)
        raise OSError("still nobody")


def test_a_user_that_cannot_start_is_finalized_too(caplog) -> None:
    user = NeverThere({"name": "asking"})
    with pytest.raises(RuntimeError, match="start_interaction of interaction 'asking' failed.*nobody"):
        roll_out("7", extra_info=ROW, interactions={"asking": user})
    assert user.events == ["finalize"]
    assert "still nobody" in caplog.text


@pytest.mark.parametrize(("kind", "what"), [(Failing, "no model behind it"), (Hanging, "no answer within 0.05 s")])
def test_a_user_that_fails_fails_the_trajectory_and_is_finalized(kind, what) -> None:
    user = kind({"name": "asking"})
    with pytest.raises(RuntimeError, match=f"Row row-5: generate_response of interaction 'asking' failed.*{what}"):
        roll_out("7", extra_info=ROW, interactions={"asking": user}, tool_timeout_s=0.05)
    assert user.events[-1] == "finalize"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"ground_truth": 1}, "must be a mapping with 'name'"), ({"name": "other"}, r"'other' is not configured.*asking")],
)
def test_rows_that_ask_for_nobody_are_refused(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        roll_out("7", extra_info={"interaction_kwargs": kwargs}, interactions={"asking": Asking({"name": "asking"})})


def test_interactions_are_read_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(
        "from lit_rl.agents.interactions import BaseInteraction\nclass Polite(BaseInteraction):\n    pass\n"
    )
    path = tmp_path / "users.yaml"
    path.write_text(
        "interaction:\n  - {name: one, class_name: 'users.py:Polite', config: {mood: good}}\n"
        "  - {class_name: 'users.py:Polite'}\n"
    )
    interactions = load_interactions(str(path))
    assert list(interactions) == ["one", "Polite"]
    assert interactions["one"].config == {"name": "one", "mood": "good"}
    for text, message in [
        ("[]", "top-level key 'interaction'"),
        ("interaction: [{name: x}]", r"interaction\[0\] must be a mapping with 'class_name'"),
        ("interaction: [{class_name: pathlib.Path}]", "no subclass"),
        ("interaction: [{class_name: 'users.py:Polite', name: [1]}]", "name must be a text"),
        ("interaction: [{class_name: 'users.py:Polite', config: hard}]", "config a mapping"),
        ("interaction: [{class_name: 'users.py:Polite'}, {class_name: 'users.py:Polite'}]", "two interactions"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_interactions(str(path))
        with pytest.raises(ValueError, match=message):  # before the engines start
            row_schemas(AgentSettings(interaction_config_path=str(path)), {})

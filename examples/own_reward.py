"""A reward function of one's own, with a number for the log beside the score.

Use: data.rewards.function: examples/own_reward.py:compute_score
"""

from lit_rl.data.arithmetic import parse_answer


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, tolerance: int = 10
) -> dict[str, float]:
    """Score by closeness: 1 for the right number, falling to 0 at ``tolerance`` away from it."""
    answer = parse_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "has_number": 0.0}
    distance = abs(answer - int(ground_truth))
    return {"score": max(0.0, 1.0 - distance / tolerance), "has_number": 1.0, "acc": float(distance == 0)}

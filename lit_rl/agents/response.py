"""What of a generation belongs to the response, and what of it the policy is trained on.

Pure functions over token lists, used by every agent loop. An engine may stop at one of several end tokens, at a stop
string, or at the limit, and may even go on after an end token; here that becomes ids, mask and stop reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lit_rl.types import StopReason, TokenOutput


@dataclass(kw_only=True)
class Response:
    """Tokens of one generation, ready to be part of a trajectory.

    Attributes:
        token_ids: Sampled ids in order, then an end token added by hand, if any.
        loss_mask: 1 where the policy sampled the token and is trained on it.
        logprobs: Log-probs in nats; 0.0 where the mask is 0.
        policy_versions: Weight versions; -1 where the mask is 0.
        stop_reason: ``length`` only where the response was cut.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    stop_reason: StopReason


def empty_response() -> Response:
    """A response without tokens, to which turns are appended."""
    return Response(token_ids=[], loss_mask=[], logprobs=[], policy_versions=[], stop_reason="stop")


def append_turn(response: Response, turn: Response) -> None:
    """Append one turn of the policy; its stop reason becomes that of the whole."""
    response.token_ids += turn.token_ids
    response.loss_mask += turn.loss_mask
    response.logprobs += turn.logprobs
    response.policy_versions += turn.policy_versions
    response.stop_reason = turn.stop_reason


def append_masked(response: Response, token_ids: list[int]) -> None:
    """Append ids that the policy did not sample (tools, users): mask 0, log-prob 0.0, version -1."""
    response.token_ids += token_ids
    response.loss_mask += [0] * len(token_ids)
    response.logprobs += [0.0] * len(token_ids)
    response.policy_versions += [-1] * len(token_ids)


def first_end_position(token_ids: list[int], end_token_ids: frozenset[int]) -> int | None:
    """Position of the first end token, or ``None``."""
    if end_token_ids.isdisjoint(token_ids):
        return None
    return next(position for position, token_id in enumerate(token_ids) if token_id in end_token_ids)


def cut_at_end(output: TokenOutput, end_token_ids: frozenset[int]) -> TokenOutput:
    """The output up to its first end token: what an engine samples after it must not stand inside a conversation."""
    end = first_end_position(output.token_ids, end_token_ids)
    if end is None:
        return output
    return replace(
        output,
        token_ids=output.token_ids[: end + 1],
        logprobs=output.logprobs[: end + 1],
        policy_versions=output.policy_versions[: end + 1],
    )


def finish_response(
    output: TokenOutput,
    *,
    end_token_ids: frozenset[int],
    max_tokens: int,
    ignore_eos: bool = False,
    appended_end_token_id: int | None = None,
) -> Response:
    """Apply the ending rules to what the engine returned.

    1. Everything beyond ``max_tokens`` is dropped and the response counts as cut.
    2. A response that holds an end token is complete, even if it fills the limit exactly. Tokens after the first end
       token stay but get mask 0: the policy was never meant to produce them. With ``ignore_eos`` this rule is off.
    3. Without an end token it is cut if the engine said ``length``, complete if it said ``stop`` (a stop string, or an
       end token that only the engine knows). Then ``appended_end_token_id`` is added with mask 0, if there is room.

    Args:
        output: The engine's answer.
        end_token_ids: All ids that end a response.
        max_tokens: Most tokens of the response, at least 0.
        ignore_eos: Whether the engine was told to sample on after end tokens.
        appended_end_token_id: End token to add where a stop string ended the response.

    Returns:
        Four lists of equal length, and the stop reason.

    Raises:
        ValueError: If the engine's three lists differ in length.
    """
    num_tokens = len(output.token_ids)
    if len(output.logprobs) != num_tokens or len(output.policy_versions) != num_tokens:
        raise ValueError(
            f"The replica returned {num_tokens} ids, {len(output.logprobs)} log-probs and "
            f"{len(output.policy_versions)} policy versions: the three must agree in length."
        )
    token_ids = output.token_ids[:max_tokens]
    logprobs = output.logprobs[:max_tokens]
    policy_versions = output.policy_versions[:max_tokens]
    loss_mask = [1] * len(token_ids)
    stop_reason: StopReason = "length" if num_tokens > max_tokens else output.stop_reason

    end_position = None if ignore_eos else first_end_position(token_ids, end_token_ids)
    if end_position is not None:
        stop_reason = "stop"
        for position in range(end_position + 1, len(token_ids)):
            loss_mask[position], logprobs[position], policy_versions[position] = 0, 0.0, -1
    elif stop_reason == "stop" and appended_end_token_id is not None and 0 < len(token_ids) < max_tokens:
        token_ids.append(appended_end_token_id)
        loss_mask.append(0)
        logprobs.append(0.0)
        policy_versions.append(-1)
    return Response(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        policy_versions=policy_versions,
        stop_reason=stop_reason,
    )

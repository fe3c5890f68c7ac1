"""``lit-rl rollout --config FILE --row 3``: hold one conversation and print it, to see what tools and templates do.

It builds the run of the configuration without its callbacks, rolls out one row as ``lit-rl predict`` would, with the
training sampling, and writes nothing. All further arguments are those of the other sub-commands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lit_rl.checkpoint_file import check_checkpoint
from lit_rl.config_keys import ConfigError
from lit_rl.data import PromptSource
from lit_rl.quiet import configure_logging
from lit_rl.run_folder import resolve_checkpoint
from lit_rl.types import Prompt, Trajectory
from lit_rl.weight_sync.publisher import WeightPublisher

_STYLES = {"policy": "\033[32m", "environment": "\033[36m", "prompt": "\033[2m", "head": "\033[1m", "error": "\033[31m"}
_RESET = "\033[0m"


def run_rollout(arguments: Sequence[str]) -> None:
    """Run the sub-command.

    Args:
        arguments: After ``rollout``.
    """
    options, overrides = _parser().parse_known_args(list(arguments))
    if not options.config:
        raise SystemExit("lit-rl: error: rollout needs a configuration: lit-rl rollout --config FILE --row 0")
    configure_logging(verbose=any(word.startswith("--verbose") for word in overrides))
    with tempfile.TemporaryDirectory() as folder:
        run = _build(options, [*overrides, f"--runs_dir={folder}"])
        # Only what brings the weights: nothing is saved, plotted or logged.
        run.trainer.callbacks = [item for item in run.trainer.callbacks if isinstance(item, WeightPublisher)]
        data = run.datamodule
        prompt = find_row(data.sources[options.split], options.split, options.row)
        _narrow(data, prompt, options)
        checkpoint = _checkpoint(options.ckpt_path, run.config.run_name)
        run.trainer.predict(run.model, datamodule=data, ckpt_path=checkpoint, return_predictions=False)
    uses_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for trajectory in data.last_validation_trajectories:
        print(describe(prompt, trajectory, data.decode, uses_color=uses_color))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-rl rollout", description="Hold one conversation and print it.", allow_abbrev=False
    )
    parser.add_argument("--config", action="append", default=[], help="Configuration file; may be given several times.")
    parser.add_argument("--row", default="0", help="Number of the row in its source, from 0, or its row id.")
    parser.add_argument("--split", choices=("train", "val", "test"), default="train", help="Which rows.")
    parser.add_argument("--samples", type=int, default=1, help="Conversations of the row.")
    parser.add_argument("--greedy", action="store_true", help="Sampling of validation instead of training.")
    parser.add_argument("--ckpt_path", default=None, help="Weights; without it those of the model as it was loaded.")
    return parser


def _checkpoint(given: str | None, run_name: str) -> str | None:
    """The file of a checkpoint, of a run folder, or of the newest run of this name below ``runs``."""
    try:
        checkpoint = resolve_checkpoint(given, "runs", run_name, required=True)
        if checkpoint is not None:
            check_checkpoint(checkpoint, resumes=False)
        return checkpoint
    except (FileNotFoundError, ConfigError) as error:
        raise SystemExit(f"lit-rl: error: {error}") from None


def _build(options: argparse.Namespace, overrides: list[str]) -> Any:
    from lit_rl.cli import build_from_config

    further = [word for path in options.config[1:] for word in ("--config", path)]
    return build_from_config(options.config[0], [*further, *overrides])


def find_row(source: PromptSource | None, split: str, row: str) -> Prompt:
    """Return a row by number or id.

    Raises:
        SystemExit: If there is none; says what there is.
    """
    if source is None:
        raise SystemExit(f"lit-rl: error: the configuration has no data.{split}_data.")
    if row.isdecimal() and int(row) < len(source):
        return source[int(row)]
    found = next((prompt for prompt in map(source.__getitem__, range(len(source))) if prompt.row_id == row), None)
    if found is None:
        raise SystemExit(
            f"lit-rl: error: --row {row}: data.{split}_data has the rows 0 to {len(source) - 1}; "
            f"the id of the first is {source[0].row_id!r}."
        )
    return found


def _narrow(data: Any, prompt: Prompt, options: argparse.Namespace) -> None:
    """Leave one row, and one worker of each kind."""
    data.sources = {"train": None, "val": None, "test": [prompt]}
    data.val_samples_per_row = options.samples
    data.agents.num_workers = data.rewards.num_workers = 1
    if not options.greedy:
        data.val_sampling = data.sampling


def describe(prompt: Prompt, trajectory: Trajectory, decode: Callable[[list[int]], str], *, uses_color: bool) -> str:
    """Return a conversation as text: prompt, one block per speaker with its tokens, tool calls, rewards, times.

    Args:
        prompt: The row.
        trajectory: What came of it.
        decode: Text of token ids, special tokens included.
        uses_color: Colour the blocks: green what the policy sampled and is trained on, blue what it was given.
    """

    def paint(style: str, text: str) -> str:
        return f"{_STYLES[style]}{text}{_RESET}" if uses_color else text

    lines = [paint("head", f"row {prompt.row_id}  source {prompt.data_source}  ground truth {prompt.ground_truth!r}")]
    lines += [paint("head", f"-- prompt, {len(trajectory.prompt_ids)} tokens")]
    lines += [paint("prompt", printable(decode(trajectory.prompt_ids)))]
    for is_policy, start, end in _blocks(trajectory.loss_mask):
        versions = sorted(set(trajectory.policy_versions[start:end]))
        who = "policy" if is_policy else "environment"
        held = f", weights of version {'/'.join(map(str, versions))}" if is_policy else ", not trained on"
        lines.append(paint("head", f"-- {who}, {end - start} tokens{held}"))
        lines.append(paint(who, printable(decode(trajectory.response_ids[start:end]))))
    calls = list(_tool_calls(trajectory))
    if calls:
        lines += [paint("head", "-- tool calls"), *calls]
    lines.append(paint("head", f"-- ended by {trajectory.stop_reason} after {trajectory.num_turns} turns"))
    if trajectory.error is not None:
        lines.append(paint("error", printable(trajectory.error)))
    parts = "".join(f"  {name} {value:g}" for name, value in trajectory.reward_parts.items())
    lines.append(f"reward {trajectory.reward}{parts}")
    lines += [printable(f"{name}: {text}") for name, text in trajectory.reward_notes.items()]
    lines.append("  ".join(f"{name} {value:.3g}" for name, value in trajectory.metrics.items()))
    return "\n".join(lines)


def printable(text: str) -> str:
    """Return the text with control characters written out: a policy must not steer the terminal."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else repr(character)[1:-1] for character in text
    )


def _blocks(loss_mask: Sequence[int]) -> Iterator[tuple[bool, int, int]]:
    """Runs of equal mask: whether the policy sampled them, start and end."""
    start = 0
    for mask, run in itertools.groupby(loss_mask):
        end = start + sum(1 for _ in run)
        yield bool(mask), start, end
        start = end


def _tool_calls(trajectory: Trajectory) -> Iterator[str]:
    answers = {m.get("tool_call_id"): m["content"] for m in trajectory.messages if m.get("role") == "tool"}
    for message in trajectory.messages:
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            answer = answers.get(call["id"], "(not run)")
            yield printable(f"{call['function']['name']}({arguments}) -> {answer}")

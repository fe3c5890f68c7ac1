"""Tell which strategy wrote a checkpoint, before anything starts that would only fail on it."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy

_ONE_FILE = "one device or DDP (one file)"
_SHARDED = "FSDP2Strategy (a folder with .metadata)"
_DEEPSPEED = "DeepSpeedStrategy (a folder with its file 'latest')"


def check_checkpoint(path: str | Path | None, strategy: Strategy, world_size: int, *, is_training: bool = True) -> None:
    """Refuse a checkpoint that another strategy wrote.

    Args:
        path: What is resumed; ``None`` and what is not on this machine is not looked at.
        strategy: The Trainer's.
        world_size: Ranks of this run.
        is_training: Whether it goes on training, or only evaluates.

    Raises:
        ValueError: Naming both strategies, or for DeepSpeed both numbers of ranks, or that it does not evaluate.
    """
    if path is None or not Path(path).exists():
        return
    folder = Path(path)
    written_by = _writer(folder)
    takes = (
        (_DEEPSPEED,)
        if isinstance(strategy, DeepSpeedStrategy)
        else (_SHARDED, _ONE_FILE)
        if isinstance(strategy, ModelParallelStrategy)
        else (_ONE_FILE,)
    )
    if written_by not in takes:
        raise ValueError(
            f"ckpt_path={path} was written by {written_by}, but trainer.strategy is {type(strategy).__name__}, which "
            f"resumes checkpoints of {' or '.join(takes)}. Resume with the strategy that wrote it, or begin from its "
            "weights: export them and give the folder as model_name."
        )
    if written_by == _DEEPSPEED:
        _check_deepspeed_ranks(folder, world_size)
    if isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3 and not is_training:
        raise ValueError(
            f"ckpt_path={path}: DeepSpeed loads a ZeRO-3 checkpoint for fit only (0.19). Validate during fit "
            "(trainer.check_val_every_n_epoch), or train with FSDP2Strategy."
        )


def _writer(path: Path) -> str:
    if path.is_file():
        return _ONE_FILE
    return _DEEPSPEED if (path / "latest").exists() else _SHARDED


def _check_deepspeed_ranks(folder: Path, world_size: int) -> None:
    """ZeRO's optimizer state is cut for a number of ranks, one file each."""
    ranks = {file.name for file in folder.glob("*/*zero_pp_rank_*_optim_states.pt")}
    if ranks and len(ranks) != world_size:
        raise ValueError(
            f"ckpt_path={folder} was written by {len(ranks)} ranks, and DeepSpeed resumes on as many only; this run "
            f"has {world_size}. Set trainer.devices (times trainer.num_nodes) to {len(ranks)}, or use FSDP2Strategy, "
            "which resumes on any number."
        )

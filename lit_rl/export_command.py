"""``lit-rl export --ckpt_path RUN --out FOLDER``: the policy of a checkpoint as a plain Hugging Face folder.

The folder holds weights (safetensors), configuration, tokenizer and chat template. It loads in transformers and vLLM,
and is a ``model_name`` for a further run, such as RL after a warm-up. Adapters (``model.lora``) are merged. Nothing of
the run but its checkpoint and ``config.yaml`` is read, and the folder appears complete or not at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_rl.quiet import configure_logging
from lit_rl.run_folder import CHECKPOINTS, resolve_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "actor.network."
_DTYPES = ("bfloat16", "float16", "float32")
_SHARDS = ".metadata"


class ExportError(ValueError):
    """What was asked for cannot be exported; the message says why and what to do."""


def run_export(arguments: Sequence[str]) -> None:
    """Run the sub-command.

    Args:
        arguments: After ``export``.
    """
    options = _parser().parse_args(list(arguments))
    configure_logging(verbose=False)
    try:
        path = export(
            options.ckpt_path,
            options.out,
            dtype=options.dtype,
            model_name=options.model_name,
            chat_template=options.chat_template,
        )
    except (ExportError, FileNotFoundError) as error:
        raise SystemExit(f"lit-rl: error: {error}") from None
    print(f"Exported to {path}: give this folder as model_name, or to transformers or vLLM.", flush=True)


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    model_name: str | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write the policy of a checkpoint as a Hugging Face folder and return its path.

    Args:
        checkpoint: A checkpoint, a run folder, or a checkpoint folder (its newest).
        out: Folder to make; it may exist if it is empty.
        dtype: Of the weights: ``bfloat16``, ``float16`` or ``float32``.
        model_name: What the run was started from, where neither checkpoint nor run folder says it or it has moved.
        chat_template: Path of a Jinja file that becomes the tokenizer's template. Default: the one that the run's
            configuration set, else the tokenizer's own.

    Raises:
        ExportError: If ``out`` is not empty, or the checkpoint does not fit the model.
        FileNotFoundError: If there is no such checkpoint or model.
    """
    target = Path(out).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"--out {out}: exists and is not an empty folder. Name a new one.")
    path = Path(str(resolve_checkpoint(str(checkpoint), "runs", "", required=True)))
    saved = _load_checkpoint(path)
    settings = _run_settings(path)
    origin = saved.get("lit_rl_model") or {}
    name = model_name or origin.get("model_name") or settings.get("model_name")
    if name is None:
        raise ExportError(f"{path} does not say which model it was trained from. Give --model_name.")
    network, tokenizer = _load_origin(name)
    if origin.get("lora"):
        _merge_adapters(network, origin["lora"], saved["state_dict"], str(path), name)
    else:
        _put_weights(network, saved["state_dict"], str(path), name)
    template = Path(chat_template).read_text() if chat_template else _configured_template(settings)
    if template is not None:
        tokenizer.chat_template = template
    _save(network, tokenizer, target, dtype)
    return target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-rl export",
        description="Write the policy of a checkpoint as a Hugging Face folder.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", required=True, help="Checkpoint, or a run folder: its newest checkpoint.")
    parser.add_argument("--out", required=True, help="Folder to make.")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="Of the weights (default: bfloat16).")
    parser.add_argument("--model_name", default=None, help="Model the run started from, where it has moved.")
    parser.add_argument("--chat_template", default=None, help="Jinja file to save instead of the run's template.")
    return parser


def _load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint's weights and what it says about itself, without its optimizer where that can be left out."""
    import torch

    if path.is_dir():
        return _load_shards(path)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError) as error:
        raise ExportError(f"{path} is no checkpoint that can be read: {error}") from error
    if not isinstance(saved, dict) or not any(name.startswith(_PREFIX) for name in saved.get("state_dict", {})):
        raise ExportError(f"{path} holds no policy of lit_rl (no weights below {_PREFIX}).")
    return saved


def _load_shards(folder: Path) -> dict[str, Any]:
    if not (folder / _SHARDS).is_file():
        raise ExportError(
            f"{folder} is a sharded checkpoint of a kind that export does not read. A DeepSpeed checkpoint becomes one "
            "file with lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict."
        )
    # What Lightning's own consolidate_checkpoint calls (2.6).
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    return _load_distributed_checkpoint(folder)


def _run_settings(checkpoint: Path) -> dict[str, Any]:
    """The run's configuration, where the checkpoint still lies in its run folder."""
    folder = checkpoint.resolve().parent
    candidate = (folder.parent if folder.name == CHECKPOINTS else folder) / "config.yaml"
    content = yaml.safe_load(candidate.read_text()) if candidate.is_file() else None
    return content if isinstance(content, dict) else {}


def _configured_template(settings: dict[str, Any]) -> str | None:
    """The chat template that the run's data was rendered with, if it was another than the tokenizer's."""
    options = (settings.get("data") or {}).get("init_args") or {}
    template = options.get("chat_template") or (options.get("agents") or {}).get("chat_template")
    if template is None or not str(template).endswith(".jinja"):
        return template
    if not Path(template).is_file():
        raise ExportError(f"The run's chat template {template} is not there from this folder. Give --chat_template.")
    return Path(template).read_text()


def _load_origin(name: str) -> tuple[Any, Any]:
    """The model and tokenizer a run started from, as they are: not prepared for training."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lit_rl.models.loading import no_progress_bars, resolve_model

    path = resolve_model(name)
    with no_progress_bars():
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, low_cpu_mem_usage=True)
    return network, AutoTokenizer.from_pretrained(path)


def _put_weights(network: Any, state_dict: dict[str, Tensor], checkpoint: str, name: str) -> None:
    """Replace every weight by the checkpoint's.

    Raises:
        ExportError: If one is missing, left over, or of another shape.
    """
    import torch

    trained = {key.removeprefix(_PREFIX): value for key, value in state_dict.items() if key.startswith(_PREFIX)}
    wanted = network.state_dict()
    missing, unknown = sorted(wanted.keys() - trained.keys()), sorted(trained.keys() - wanted.keys())
    other = sorted(key for key in wanted.keys() & trained.keys() if wanted[key].shape != trained[key].shape)
    if missing or unknown or other:
        raise ExportError(
            f"{checkpoint} is not of model {name}: {len(missing)} of its weights are missing {missing[:2]}, "
            f"{len(unknown)} are unknown {unknown[:2]}, {len(other)} have another shape {other[:2]}. Give the model "
            "that the run was started from as --model_name."
        )
    with torch.no_grad():
        for key, value in wanted.items():
            value.copy_(trained[key])


def _merge_adapters(
    network: Any, lora: dict[str, Any], state_dict: dict[str, Tensor], checkpoint: str, name: str
) -> None:
    """Merge the checkpoint's adapters into the weights they belong to.

    Raises:
        ExportError: If they are of another model.
    """
    from lit_rl.models.lora import LoraSettings, add_lora, merge_lora

    add_lora(network, LoraSettings(**lora))
    adapters = {key.removeprefix(_PREFIX): value for key, value in state_dict.items() if key.startswith(_PREFIX)}
    wanted = {key: value for key, value in network.named_parameters() if value.requires_grad}
    other = [key for key in wanted if key not in adapters or adapters[key].shape != wanted[key].shape]
    if other or len(adapters) != len(wanted):
        raise ExportError(
            f"The adapters of {checkpoint} are not of model {name}: {len(other)} of {len(wanted)} do not fit "
            f"{other[:2]}. Give the model that the run was started from as --model_name."
        )
    network.load_state_dict(adapters, strict=False)
    merge_lora(network)


def _save(network: Any, tokenizer: Any, target: Path, dtype: str) -> None:
    """Write into a sibling folder, flush, rename: the target exists complete or not at all."""
    import torch

    from lit_rl.models.loading import no_progress_bars

    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        with no_progress_bars():
            network.to(getattr(torch, dtype)).save_pretrained(part)
        tokenizer.save_pretrained(part)
        for file in part.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        part.chmod(0o755)
        part.rename(target)  # replaces an empty folder
    except OSError as error:
        free_gb = shutil.disk_usage(target.parent).free / 1e9
        raise ExportError(f"Could not write {target} ({free_gb:.2f} GB free there): {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)

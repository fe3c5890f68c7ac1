"""`lit-rl export`: the folder loads in transformers with the checkpoint's weights, or there is no folder at all."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl import SFT, SFTDataModule
from lit_rl.callbacks import IterationCheckpoint
from lit_rl.cli import main
from lit_rl.data import Conversation
from lit_rl.export_command import export
from lit_rl.models import load_causal_lm
from lit_rl.models.lora import LoraSettings

MODEL = "bundled/tiny-random"
ROWS = [
    Conversation(row_id=word, messages=[{"role": "user", "content": word}, {"role": "assistant", "content": "Yes"}])
    for word in ("one", "two")
]


def trained(folder: Path, lora: LoraSettings | None = None) -> tuple[Path, SFT]:
    """A run folder with a trained checkpoint, and its module."""
    module = SFT(MODEL, actor_lr=1e-2, lora=lora)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, default_root_dir=str(folder),
        enable_progress_bar=False, enable_model_summary=False, callbacks=[IterationCheckpoint()],
    )  # fmt: skip
    trainer.fit(module, datamodule=SFTDataModule(MODEL, ROWS))
    (folder / "config.yaml").write_text(yaml.safe_dump({"model_name": MODEL}))
    return folder, module


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, SFT]:
    return trained(tmp_path_factory.mktemp("run"))


def logits(network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=torch.arange(20)[None]).logits


def test_the_folder_holds_the_trained_policy_with_tokenizer_and_template(run, tmp_path, capsys) -> None:
    folder, module = run

    main(["export", "--ckpt_path", str(folder), "--out", str(tmp_path / "new/model"), "--dtype", "float32"])

    out = tmp_path / "new/model"
    network, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    torch.testing.assert_close(logits(network), logits(module.actor.network), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(network), logits(load_causal_lm(MODEL)), atol=1e-2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat
    assert {path.name for path in out.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert f"Exported to {out}" in capsys.readouterr().out


def test_weights_are_written_in_the_dtype_asked_for_and_the_folder_is_a_model_name(run, tmp_path) -> None:
    folder, module = run

    out = export(folder / "checkpoints/last.ckpt", tmp_path / "model")

    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    again = SFT(str(out))
    again.configure_model()
    rounded = module.actor.network.model.norm.weight.bfloat16().float()
    assert torch.equal(again.actor.network.model.norm.weight, rounded)


def test_a_template_of_the_run_becomes_that_of_the_folder(run, tmp_path) -> None:
    folder, _ = run
    moved = tmp_path / "moved"
    (moved / "checkpoints").mkdir(parents=True)
    (moved / "checkpoints/iteration_00000.ckpt").write_bytes((folder / "checkpoints/last.ckpt").read_bytes())
    template = tmp_path / "own.jinja"
    template.write_text("own {{ messages[0].content }}")
    data = {"init_args": {"agents": {"chat_template": str(template)}}}
    (moved / "config.yaml").write_text(yaml.safe_dump({"model_name": MODEL, "data": data}))

    out = export(moved, tmp_path / "model")

    assert AutoTokenizer.from_pretrained(out).chat_template == "own {{ messages[0].content }}"
    template.unlink()
    with pytest.raises(ValueError, match=r"chat template .*own\.jinja is not there.*--chat_template"):
        export(moved, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_adapters_are_merged(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    folder, module = trained(tmp_path / "run", LoraSettings(r=4))

    out = export(folder, tmp_path / "model", dtype="float32")

    network = AutoModelForCausalLM.from_pretrained(out)
    assert [name for name, _ in network.named_parameters()] == [
        name for name, _ in load_causal_lm(MODEL).named_parameters()
    ]
    torch.testing.assert_close(logits(network), logits(module.actor.network), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(network), logits(load_causal_lm(MODEL)), atol=1e-2)


def test_a_sharded_checkpoint_is_put_together(run, tmp_path) -> None:
    folder, module = run
    saved = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    # As ModelParallelStrategy lays it down: weights in shards, the rest beside them.
    torch.distributed.checkpoint.save({"state_dict": saved["state_dict"]}, checkpoint_id=tmp_path / "shards")
    torch.save({"lit_rl_model": saved["lit_rl_model"]}, tmp_path / "shards/meta.pt")

    out = export(tmp_path / "shards", tmp_path / "model", dtype="float32")

    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(out)), logits(module.actor.network), rtol=1e-5, atol=1e-5
    )
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero/latest").write_text("checkpoint")
    with pytest.raises(ValueError, match=r"zero is a sharded checkpoint of a kind .* DeepSpeed"):
        export(tmp_path / "zero", tmp_path / "other")


def test_what_is_there_is_not_overwritten(run, tmp_path, capsys) -> None:
    folder, _ = run
    (tmp_path / "full").mkdir()
    (tmp_path / "full/config.json").write_text("{}")
    (tmp_path / "empty").mkdir()

    with pytest.raises(SystemExit, match=r"--out .*full: exists and is not an empty folder"):
        main(["export", "--ckpt_path", str(folder), "--out", str(tmp_path / "full")])
    assert (tmp_path / "full/config.json").read_text() == "{}"
    assert (export(folder, tmp_path / "empty") / "config.json").is_file()


def test_a_failed_write_leaves_nothing(run, tmp_path, monkeypatch) -> None:
    folder, _ = run

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(ValueError, match=r"Could not write .*GB free there.*No space left on device"):
        export(folder, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_of_the_model_is_said(run, tmp_path, tiny_other_model) -> None:
    folder, _ = run
    with pytest.raises(FileNotFoundError, match=r"ckpt_path=.*nowhere: no such file or folder"):
        export(tmp_path / "nowhere", tmp_path / "model")
    torch.save({"state_dict": {"weight": torch.zeros(1)}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt holds no policy of lit_rl"):
        export(tmp_path / "other.ckpt", tmp_path / "model")
    (tmp_path / "broken.ckpt").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"broken\.ckpt is no checkpoint that can be read"):
        export(tmp_path / "broken.ckpt", tmp_path / "model")
    with pytest.raises(ValueError, match=r"is not of model .*: 0 of its weights are missing.*--model_name"):
        export(folder, tmp_path / "model", model_name=tiny_other_model)
    assert not (tmp_path / "model").exists()


@pytest.fixture
def tiny_other_model(tmp_path_factory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("other")
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(_bundled()).save_pretrained(folder)
    return str(folder)


def _bundled() -> str:
    from lit_rl.models import resolve_model

    return resolve_model(MODEL)

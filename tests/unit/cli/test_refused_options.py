from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("max_steps=3", "trainer.max_epochs"),  # case O45
        ("max_time=00:01:00:00", "trainer.max_epochs"),
        ("fast_dev_run=true", "trainer.max_epochs"),
        ("limit_train_batches=1", "data.num_mini_batches"),
        ("val_check_interval=0.5", "trainer.check_val_every_n_epoch"),
        ("val_check_interval=1", "trainer.check_val_every_n_epoch"),
        ("accumulate_grad_batches=2", "data.max_tokens_per_micro_batch"),
        ("gradient_clip_val=1.0", "model.max_grad_norm"),
        ("reload_dataloaders_every_n_epochs=1", "data.prompts_per_iteration"),
        ("default_root_dir=x", "runs_dir"),
        ("precision=bf16-true", "bf16-mixed"),
    ],
)
def test_an_option_that_acts_inside_an_iteration_is_refused_and_the_right_one_named(
    fit, capsys, option, instead
) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("--data=cli_standin.NeedsEngine", f"--trainer.{option}")

    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert f"trainer.{option.split('=')[0]}=" in message
    assert instead in message


@pytest.mark.parametrize(
    "option", ["max_steps=-1", "val_check_interval=1.0", "limit_train_batches=1.0", "precision=bf16-mixed"]
)
def test_values_that_mean_whole_iterations_pass(parse, option) -> None:
    assert parse(f"--trainer.{option}").trainer.max_epochs == 2


@pytest.mark.parametrize(
    "argument", ["--run_name=../elsewhere", "--run_name=..", "--trainer.check_val_every_n_epoch=0"]
)
def test_a_value_that_would_write_elsewhere_or_divide_by_zero_is_refused(fit, capsys, argument) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("--data=cli_standin.NeedsEngine", argument)

    assert stopped.value.code == 2
    assert argument.lstrip("-").split("=")[0] in capsys.readouterr().err

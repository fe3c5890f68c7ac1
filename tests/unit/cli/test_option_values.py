from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from cli_standin import Sampling

from lit_rl.data import PromptSource
from lit_rl.option_values import class_problem, shortened, value_problem


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--trainer.max_epochs=abc", "trainer.max_epochs='abc' must be a whole number or null."),
        ("--data.group_size=2.5", "data.init_args.group_size='2.5' must be a whole number."),
        ("--data.sampling.temperature=hot", "data.init_args.sampling.temperature='hot' must be a number."),
        ("--data.sampling={temperature: hot}", "data.init_args.sampling.temperature='hot' must be a number."),
        ("--data.sampling=abc", "data.init_args.sampling='abc' must be a mapping with temperature, stop"),
        ("--model.betas=[0.9]", "model.init_args.betas=[0.9] must be a list of 2: a number, a number."),
        ("--model.limits=[1, x]", "model.init_args.limits=[1, 'x'] must be a list, each item a whole number or null."),
        ("--model.use_bias=maybe", "model.init_args.use_bias='maybe' must be true or false."),
        ("--trainer.precision=bf16-mixd", "Did you mean 'bf16-mixed'?"),
        ("--default_callbacks=perhaps", "default_callbacks='perhaps' must be true or false."),
        ("--verbose=maybe", "--verbose"),
        ("--trainer.accelerator=cpuu", "cpuu"),
        ("--config=nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_wrong_value_is_said_in_one_line_with_option_value_and_rule(fit, capsys, option, message) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("--data=cli_standin.Data", option)

    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in error
    assert error.startswith("lit-rl: error: ")
    assert len(error.strip().splitlines()) <= 2


def test_a_wrong_value_in_a_file_names_the_file(fit, capsys, write_yaml) -> None:
    with pytest.raises(SystemExit):
        fit("--config", write_yaml("wrong.yaml", {"model": {"init_args": {"lr": "fast"}}}))

    assert "wrong.yaml: model.init_args.lr='fast' must be a number." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model=ModuleAA", "model='ModuleAA' names no class. Did you mean cli_standin.ModuleA?"),
        ("--model=cli_standin.Data", "model='cli_standin.Data' is no BaseModule."),
        ("--trainer.callbacks=TrajectoryLogg", "Did you mean lit_rl.callbacks.TrajectoryLog?"),
        ("--trainer.callbacks=lit_rl.modules.GRPO", "is no Callback. There are lit_rl.callbacks."),
        ("--trainer.logger=TensorBordLogger", "Did you mean lightning.pytorch.loggers.TensorBoardLogger?"),
    ],
)
def test_a_name_that_is_no_class_of_its_kind_is_said_with_the_nearest_one(fit, capsys, option, message) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit(option)

    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_protocol_suggests_the_classes_that_have_its_methods() -> None:
    problem = class_problem("Arithmetik", None, PromptSource | None)

    assert problem == "names no class. Did you mean lit_rl.data.Arithmetic?"
    assert class_problem("null", None, PromptSource | None) is None


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("1e-6", float),
        (1, float),
        ("3", int | None),
        (None, int),
        ("x", list[str]),  # one more item: --stop+=x
        ([1.0, 2], tuple[float, float]),
        ("false", bool | int | None),
        ("auto", list[int] | str | int),
        ("anything", Any),
        ("00:01:00", timedelta | None),
        ({"temperature": 1}, Sampling | None),
        ("b", Literal["a", "b"]),
    ],
)
def test_what_the_parser_takes_is_no_problem(value, hint) -> None:
    assert value_problem(value, hint) is None
    if isinstance(value, str):
        assert class_problem(value, None, hint) is None


def test_a_message_of_the_parser_is_cut_down_to_option_and_reason() -> None:
    message = """Parser key "data":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lit_rl.datamodule.RolloutDataModule'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'lit_rl.RolloutDataModule':
        Parser key "sampling":
          Expected a <class 'list'>. Got value: x
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: x"""

    assert shortened(message) == "data.sampling: Expected a list. Got value: x"


def test_a_run_uses_no_option_that_jsonargparse_will_drop(fit, monkeypatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "all")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit("--trainer.max_epochs=1")

    # Lightning's own uses are shown to nobody.
    assert [str(warning.message) for warning in caught if Path(warning.filename).parent.name == "lit_rl"] == []

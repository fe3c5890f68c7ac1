from __future__ import annotations

from typing import Any

import pytest
from cli_standin import BaseModule, Data, ModuleA, ModuleB, StandInCLI

from lit_rl.agents.settings import AgentLoopSpec
from lit_rl.config_keys import ConfigError, KeyChecker


def _error(capsys, run, *args: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(*args)
    assert stopped.value.code not in (0, None)
    return capsys.readouterr().err


# Case O42: overrides.


def test_a_command_line_value_keeps_the_files_other_values(parse) -> None:
    cli = parse("--model.init_args.hidden", "16")

    assert (cli.model.hidden, cli.model.lr) == (16, 0.25)


def test_the_short_form_without_init_args_means_the_same(parse) -> None:
    assert parse("--model.hidden=16").model.hidden == 16


def test_changing_the_class_keeps_what_it_has_and_warns_of_what_it_drops(parse, caplog) -> None:
    cli = parse("--model", "cli_standin.ModuleB")

    assert "from ModuleA to ModuleB, which does not have hidden: dropped" in caplog.text
    assert type(cli.model) is ModuleB
    assert (cli.model.width, cli.model.lr) == (3, 0.25)


def test_a_second_file_with_one_nested_value_changes_only_that_value(parse, write_yaml) -> None:
    second = write_yaml("second.yaml", {"data": {"init_args": {"sampling": {"stop": ["end"]}}}})
    cli = parse("--config", second)

    assert (cli.datamodule.sampling.temperature, cli.datamodule.sampling.stop) == (0.5, ["end"])
    assert cli.datamodule.group_size == 3
    assert type(cli.model) is ModuleA


# Case O43: typos.


@pytest.mark.parametrize(
    ("content", "named", "suggested"),
    [
        ({"trainer": {"max_epoch": 1}}, "trainer.max_epoch", "trainer.max_epochs"),
        ({"modle": {}}, "modle", "model"),
        ({"trainer": {"calbacks": {}}}, "trainer.calbacks", "trainer.callbacks"),
        ({"model": {"init_args": {"hiden": 1}}}, "model.init_args.hiden", "model.init_args.hidden"),
        (
            {"data": {"init_args": {"sampling": {"temprature": 1.0}}}},
            "data.init_args.sampling.temprature",
            "data.init_args.sampling.temperature",
        ),
        ({"trainer": {"group_size": 1}}, "trainer.group_size", "data.init_args.group_size"),
        (
            {
                "trainer": {
                    "callbacks": [{"class_path": "lit_rl.callbacks.TrajectoryLog", "init_args": {"max_per_iter": 1}}]
                }
            },
            "trainer.callbacks[].init_args.max_per_iter",
            "max_per_iteration",
        ),
    ],
)
def test_a_mistyped_key_in_a_file_is_named_with_the_nearest_valid_one(
    fit, capsys, write_yaml, content, named, suggested
) -> None:
    message = _error(capsys, fit, "--data", "cli_standin.NeedsEngine", "--config", write_yaml("typo.yaml", content))

    assert "typo.yaml" in message
    assert f"'{named}'" in message
    assert suggested in message.split("Did you mean")[1]


@pytest.mark.parametrize(
    ("option", "named", "suggested"),
    [
        ("--trainer.max_epoch=3", "trainer.max_epoch", "trainer.max_epochs"),
        ("--model.hiden=3", "model.init_args.hiden", "model.init_args.hidden"),
        ("--model.init_args.hiden=3", "model.init_args.hiden", "model.init_args.hidden"),
        (
            "--data.sampling={temprature: 3}",
            "data.init_args.sampling.temprature",
            "data.init_args.sampling.temperature",
        ),
        ("--run_nme=x", "run_nme", "run_name"),
    ],
)
def test_a_mistyped_option_is_named_with_the_nearest_valid_one(fit, capsys, option, named, suggested) -> None:
    message = _error(capsys, fit, option)

    assert f"unknown key '{named}'. Did you mean '{suggested}'?" in message


def test_a_mistyped_class_path_shows_the_path_and_the_import_error(fit, capsys) -> None:
    missing_name = _error(capsys, fit, "--model=cli_standin.ModuleAA")
    missing_module = _error(capsys, fit, "--model=lit_rl.modulez.GRPO")

    assert "'cli_standin.ModuleAA'" in missing_name
    assert "has no attribute 'ModuleAA'. Did you mean cli_standin.ModuleA?" in missing_name
    assert "'lit_rl.modulez.GRPO': ModuleNotFoundError: No module named 'lit_rl.modulez'" in missing_module


@pytest.mark.parametrize("args", [[], ["--config", "recipe.yaml"], ["fi", "--config", "recipe.yaml"]])
def test_leaving_out_the_subcommand_lists_them(recipe, capsys, args) -> None:
    message = _error(capsys, lambda: StandInCLI(BaseModule, Data, args=args))

    assert all(name in message for name in ("fit", "validate", "test", "predict"))


@pytest.mark.parametrize("option", ["--model.init_args.model_name=x", "--data.model_name=x", "--data.verbose=true"])
def test_setting_a_linked_option_is_refused_and_names_both(fit, capsys, option) -> None:
    message = _error(capsys, fit, option)

    part, name = option.removeprefix("--").split("=")[0].split(".")[0], option.split("=")[0].rpartition(".")[2]
    assert f"{part}.init_args.{name} is set from the top-level {name}" in message


def test_a_linked_option_in_a_file_is_refused(fit, capsys, write_yaml) -> None:
    second = write_yaml("linked.yaml", {"model": {"init_args": {"model_name": "other"}}})

    assert "model.init_args.model_name is set from the top-level model_name" in _error(capsys, fit, "--config", second)


def test_the_model_name_reaches_both_parts(parse) -> None:
    cli = parse("--model_name=other/model")

    assert (cli.model.model_name, cli.datamodule.model_name) == ("other/model", "other/model")


def test_negative_numbers_and_lists_are_values_not_options(parse) -> None:
    cli = parse("--model.lr=-1e-6", "--model.fails_at", "-2", "--model.limits", "[1, -2]", "--model.use_bias", "true")

    assert (cli.model.lr, cli.model.fails_at) == (-1e-6, -2)
    assert (cli.model.limits, cli.model.use_bias) == ([1, -2], True)


def test_an_option_that_a_part_refuses_is_said_alone_and_a_fault_of_a_part_keeps_its_traceback(fit, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("--model=cli_standin.RefusingModule", "--model.init_args.lr=-1")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "lit-rl: error: model.actor_lr=-1.0 must be above 0.\n"

    with pytest.raises(ValueError, match="a mistake of its author"):
        fit("--model=cli_standin.BrokenModule")


def test_the_keys_of_a_mapping_are_the_users_own_and_those_of_its_values_are_checked() -> None:
    checker = KeyChecker({"loops": dict[str, AgentLoopSpec], "maybe": dict[str, AgentLoopSpec] | None}, {})
    checker.check_mapping({"loops": {"mine": {"loop_class": "a.B"}}, "maybe": {"its": {"options": {"any": 1}}}}, "f")
    for name in ("loops", "maybe"):
        with pytest.raises(ConfigError, match=rf"unknown key '{name}\.mine\.loop_clas'.*loop_class"):
            checker.check_mapping({name: {"mine": {"loop_clas": "a.B"}}}, "f")


def test_text_where_anything_may_stand_names_no_class() -> None:
    checker = KeyChecker({"options": dict[str, Any], "maybe": dict[str, Any] | None}, {})
    checker.check_mapping({"options": {"agent": "examples/agent.py:run"}, "maybe": {"file": "a.b"}}, "test")

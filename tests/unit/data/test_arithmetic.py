import pytest

from lit_rl.data.arithmetic import Arithmetic, is_well_formed, parse_answer


def test_a_row_asks_for_a_sum_and_knows_its_answer() -> None:
    rows = Arithmetic(min_operand=3, max_operand=4, num_rows=None, split="train")
    for index in range(len(rows)):
        prompt = rows[index]
        a, b = prompt.extra_info["expression"].split(" + ")
        assert prompt.messages == [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        assert prompt.ground_truth == str(int(a) + int(b))
        assert prompt.data_source == "arithmetic"
        assert prompt.row_id == f"arithmetic/{a}+{b}"


def test_splits_share_no_operand_set_and_cover_everything() -> None:
    train, val, test = (Arithmetic(split=split, seed=seed) for seed, split in enumerate(("train", "val", "test")))
    assert not train.pairs() & val.pairs()
    assert not train.pairs() & test.pairs()
    assert not val.pairs() & test.pairs()
    assert len(train) + len(val) + len(test) == 50 * 50
    assert len(train.pairs() | val.pairs() | test.pairs()) == 50 * 51 // 2
    assert len(val) >= 300
    assert len(test) >= 300


def test_a_harder_validation_set_is_disjoint_from_an_easier_training_set() -> None:
    train = Arithmetic(split="train", max_operand=50, seed=1)
    val = Arithmetic(split="val", max_operand=900, operations=["+", "-", "*"], num_rows=2000, seed=2)
    assert not train.pairs() & val.pairs()


def test_rows_are_distinct_and_follow_from_the_seed() -> None:
    settings = {"num_rows": 200, "max_operand": 99, "operations": ["+", "-"], "num_terms": 3}
    first, again, other = (Arithmetic(seed=seed, **settings) for seed in (5, 5, 6))
    ids = [first[i].row_id for i in range(200)]
    assert len(set(ids)) == 200
    assert ids == [again[i].row_id for i in range(200)]
    assert ids != [other[i].row_id for i in range(200)]


def test_multiplication_binds_tighter_than_subtraction() -> None:
    rows = Arithmetic(min_operand=2, max_operand=4, operations=["-", "*"], num_terms=3)
    answers = {rows[i].extra_info["expression"]: rows[i].ground_truth for i in range(len(rows))}
    for expression, answer in answers.items():
        assert eval(expression) == int(answer)
    assert len(answers) == len(rows) > 20


def test_a_system_prompt_comes_first() -> None:
    prompt = Arithmetic(num_rows=1, system_prompt="Be brief.")[0]
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "dev"}, "split='dev' must be train, val or test"),
        ({"operations": ["/"]}, r"operations=\['/'\]"),
        ({"min_operand": 9, "max_operand": 5}, "min_operand=9 and max_operand=5"),
        ({"num_terms": 1}, "num_terms=1"),
        ({"num_rows": 5000}, "num_rows=5000, but these settings give only 1\\d\\d\\d rows"),
        ({"max_operand": 9999}, "Give num_rows"),
        ({"question": "Go"}, "must contain {expression}"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arithmetic(**settings)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", 7),
        (" 7. \n", 7),
        ("3 + 4 = 7", 7),
        ("The answer is 7.0", 7),
        ("1,024", 1024),
        ("3 - 10 = -7", -7),
        ("3 - 10 = \u22127", -7),
        ("10-3", 3),
        ("(2)-3", 3),
        ("1, 2", 2),
        ("7.5", None),
        ("", None),
        ("seven", None),
        ("1" * 5000, None),
    ],
)
def test_the_last_number_is_the_answer(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", True),
        (" -7.\n", True),
        ("1,024", True),
        ("7 apples", False),
        ("3 + 4 = 7", False),
        ("", False),
        ("7.5", False),
    ],
)
def test_well_formed_is_the_number_alone(text: str, expected: bool) -> None:
    assert is_well_formed(text) is expected

"""Levels say what they do, and are still the text that users write."""

from __future__ import annotations

import pytest

from passes.contract.policy import LEVELS, Level, Policy


def test_each_level_says_what_it_does() -> None:
    asked = ("rounds", "is_autocasts", "stores_low", "rounds_sensitive", "keeps_sums_fp32", "may_keep_products_fp32")
    assert {level.value: [name for name in asked if getattr(level, name)] for level in Level} == {
        "O0": [],
        "O1": ["rounds", "is_autocasts"],
        "O2": ["rounds", "stores_low", "keeps_sums_fp32", "may_keep_products_fp32"],
        "O3": ["rounds", "stores_low", "rounds_sensitive"],
    }


@pytest.mark.parametrize("text", LEVELS)
def test_the_level_of_a_policy_is_the_text_that_was_written(text: str) -> None:
    level = Policy(text).level
    assert level == text
    assert hash(level) == hash(text)
    assert [str(level), repr(level), f"{level:>4}", "%s" % level] == [text, repr(text), f"{text:>4}", text]  # noqa: UP031
    assert repr(Policy(text)).startswith(f"Policy(level='{text}', dtype=None")
    assert Policy(level) == Policy(text)


def test_a_policy_that_was_pickled_with_its_level_as_text_has_one_again() -> None:
    made = Policy.__new__(Policy)
    made.__setstate__({**Policy("O3", dtype="fp16").__dict__, "level": "O3"})
    assert made == Policy("O3", dtype="fp16")
    assert made.level.rounds_sensitive

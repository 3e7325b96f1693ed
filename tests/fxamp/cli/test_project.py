"""The settings of a project: what is wrong in them is named, and `fxamp init` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxamp.cli.main import main
from fxamp.cli.targets import configured

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tool.fxamp]\npolciy = "typo"\n', "[tool.fxamp] has no setting 'polciy'"),
        ('[tool.fxamp]\ntarget.net.target = "net.py:make"\n', "no setting 'target'; the nearest name is 'targets'"),
        ("[tool.fxamp]\ntargets = 5\n", "tool.fxamp.targets is 5, and should be a table"),
        ("tool = 3  # fxamp\n", "pyproject.toml: tool is 3, and should be a table"),
        ("[tool]\nfxamp = 3\n", "tool.fxamp is 3, and should be a table"),
        ('[[tool.fxamp.targets]]\ntarget = "net.py:make"\n', "tool.fxamp.targets is a list of tables"),
        ("[tool.other]\nfxamp = 1\n", "`fxamp init TARGET` writes one"),
        ('[tool.fxamp.targets.n]\ntarget = "n.py:m"\nplan = "p"\nstrikt = true\n', "the nearest name is 'strict'"),
    ],
)
def test_a_setting_that_is_not_there_is_named(text: str, said: str, capsys: Capture) -> None:
    Path("pyproject.toml").write_text(text, encoding="utf-8")
    assert main(["check"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_init_writes_the_table_that_check_reads(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "[project]\nname = 'mine'  # a comment"
    Path("pyproject.toml").write_text(before, encoding="utf-8")
    Path("src").mkdir()
    monkeypatch.chdir("src")
    Path("net.py").touch()
    assert main(["init", "net.py:make"]) == 0
    assert "next: fxamp check --update" in capsys.readouterr().out
    text = (here / "pyproject.toml").read_text(encoding="utf-8")
    assert text.startswith(f"{before}\n\n")
    (made,) = configured(here / "pyproject.toml")
    assert (made.name, made.target, made.policy) == ("net", "src/net.py:make", "O1,dtype=bf16")
    assert (made.plan, made.census) == ("src/net.plan.json", None)
    assert main(["init", "net.py:other"]) == 2
    assert "has a target 'net' already" in capsys.readouterr().err
    assert main(["init", "a.b:make", "--name", "my net", "--policy", "O2", "--census", "c.json"]) == 0
    made = configured(here / "pyproject.toml", ["my*"])[0]
    assert (made.name, made.target, made.policy, made.census) == ("my net", "a.b:make", "O2", "src/c.json")
    assert main(["init", "net.py"]) == 2


def test_init_begins_a_file_where_there_is_none(capsys: Capture) -> None:
    Path("net.py").touch()
    assert main(["init", "net.py:make"]) == 0
    assert [target.name for target in configured(Path("pyproject.toml"))] == ["net"]


@pytest.mark.parametrize("words", [["-o", "a", "--output=json=a"], ["--output=json", "--output=markdown"]])
def test_two_outputs_to_one_place_are_refused(words: list[str], capsys: Capture) -> None:
    assert main(["rules", "softmax", *words]) == 2
    assert "two outputs go to" in capsys.readouterr().err


def test_several_outputs_are_written_in_one_run(capsys: Capture) -> None:
    assert main(["rules", "softmax", "--output=json=rule.json", "--output=markdown=rule.md", "--output=text"]) == 0
    assert Path("rule.json").read_text(encoding="utf-8").startswith("[")
    assert Path("rule.md").read_text(encoding="utf-8").startswith("|")
    assert capsys.readouterr().out.startswith("fact")


def test_a_file_that_is_missing_is_named_and_nothing_is_written(capsys: Capture) -> None:
    for words in (
        ["init", "missing.py:make"], ["diff", "missing.json", "other.json"],
        ["diff", "missing.py:make", "--policy=O1", "--policy=O2"],
        ["check", "--here", "missing.py:make", "--plan=p.json"],
    ):  # fmt: skip
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "missing" in error
        assert error.count("\n") == 1
    assert not list(Path.cwd().iterdir())


def test_a_target_that_is_configured_is_pointed_to_by_its_name(capsys: Capture) -> None:
    Path("net.py").touch()
    main(["init", "net.py:make", "--name", "small"])
    assert main(["check", "net.py:make"]) == 2
    assert "pyproject.toml has this target: `fxamp check small`" in capsys.readouterr().err


BRACES = ["[tool.fxamp]\ntargets = {}\n", "[tool]\nfxamp = {targets = {}}\n", "tool.fxamp.targets = {}\n"]


@pytest.mark.parametrize("text", BRACES)
def test_init_leaves_a_file_alone_that_a_table_would_break(text: str, capsys: Capture) -> None:
    file = Path("pyproject.toml")
    file.write_text(text, encoding="utf-8")
    Path("net.py").touch()
    assert main(["init", "net.py:make"]) == 2
    assert 'add net = {target = "net.py:make", ' in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == text


def test_init_ends_lines_as_the_file_does() -> None:
    file = Path("pyproject.toml")
    file.write_bytes(b'[project]\r\nname = "\xc3\xa4"\r\n')
    assert main(["init", "a.b:make"]) == 0
    data = file.read_bytes()
    assert data.startswith(b'[project]\r\nname = "\xc3\xa4"\r\n')
    assert data.count(b"\r\n") == data.count(b"\n") > 4
    assert [target.target for target in configured(file)] == ["a.b:make"]


@pytest.mark.parametrize(
    "second", ['plan = "p.json"', 'plan = "./p.json"', 'plan = "q.json"\ncensus = "p.json"'],
    ids=["plan", "path", "census"],
)  # fmt: skip
def test_two_targets_with_one_file_are_an_error(second: str, capsys: Capture) -> None:
    Path("pyproject.toml").write_text(
        '[tool.fxamp.targets.a]\ntarget = "n.py:a"\nplan = "p.json"\n'
        f'[tool.fxamp.targets.b]\ntarget = "n.py:b"\n{second}\n',
        encoding="utf-8",
    )
    assert main(["check", "--update", "b"]) == 2
    error = capsys.readouterr().err
    assert "[tool.fxamp.targets.a] plan and [tool.fxamp.targets.b] " in error
    assert "are one file" in error
    assert not Path("p.json").exists()


@pytest.mark.parametrize("name", ["other", "vit*"])
def test_a_name_that_is_no_target_is_told_the_names(name: str, capsys: Capture) -> None:
    Path("net.py").touch()
    main(["init", "net.py:make", "--name", "small"])
    main(["init", "net.py:make", "--name", "large"])
    assert main(["check", name]) == 2
    assert f"has no target {name!r}; it has small, large" in capsys.readouterr().err

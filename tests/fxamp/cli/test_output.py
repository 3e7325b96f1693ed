"""Where the command writes: terminals wide and narrow, pipes, files that cannot be written, and nowhere."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import termios
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fxamp.cli.main import main
from fxamp.cli.output import shown_while
from passes.contract.plan import Decision, Plan
from passes.contract.policy import Policy
from tests.support.processes import in_another_process, printed
from tests.support.records import node, report_of

END = "the end"
LONG = Decision(
    "encoder.layers.0.attention/linear#0", 0, "linear", "encoder.layers.0.attention", "net.py:12: q = self.query(x)",
    "bfloat16", "bfloat16", "low", "low: matrix product, accumulated in FP32",
)  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    Plan((LONG,), Policy("O1", dtype="bf16", device="cpu")).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def in_terminal(columns: int, *words: str) -> str:
    """Return what the command writes to a terminal of that width, which is made the output of this process."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    os.environ["NO_COLOR"] = "1"
    for unwanted in ("COLUMNS", "LINES"):
        os.environ.pop(unwanted, None)
    for stream in (1, 2):
        os.dup2(theirs, stream)
    said: list[bytes] = []
    with ThreadPoolExecutor() as reader:
        reading = reader.submit(read_until, END, ours, said)
        assert main(words) == 0
        print(END, flush=True)
        reading.result()
    return b"".join(said).decode().partition(END)[0].replace("\r\n", "\n")


def read_until(end: str, file: int, said: list[bytes]) -> None:
    while end not in b"".join(said).decode(errors="ignore"):
        said.append(os.read(file, 4096))


def test_a_narrow_terminal_is_not_written_over_its_edge(plan: Path) -> None:
    text = in_another_process(in_terminal, 60, "report", str(plan), "--nodes")
    lines = text.splitlines()
    assert all(len(line) <= 60 for line in lines[lines.index("Modules") : -1])
    assert "These columns need a module that fxamp.convert returned" in text
    assert "\n  low: matrix product, accumulated in FP32\n  net.py:12: q = self.query(x)\n" in text
    assert "\x1b" not in text


def test_a_pipe_takes_any_width(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    status, text, _ = in_another_process(printed, main, ["report", str(plan), "--nodes"])
    assert status == 0
    assert "wider terminal" not in text
    assert any(LONG.key in line and "q = self.query(x)" in line for line in text.splitlines())


def test_columns_are_left_out_from_the_right_until_the_tree_fits() -> None:
    report = report_of([node(0, module="encoder.layers"), node(1, module="encoder.layers")])
    whole = report.to_tree()
    assert report.to_tree(width=200) == whole
    for width in (100, 80, 60, 40):
        text = report.to_tree(width=width).partition("Modules\n")[2].partition("\n\nA wider")[0]
        assert max(map(len, text.splitlines())) <= width
        assert "module" in text


@pytest.mark.parametrize("form", ["text", "markdown", "json", "html"])
def test_quiet_prints_nothing_and_still_writes_the_file(
    plan: Path, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(plan), "--quiet", f"--output-format={form}"]) == 0
    assert main(["report", str(plan), "-q", f"--output-format={form}", "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "out").stat().st_size > 100


def test_quiet_leaves_the_status_and_errors(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Plan((), Policy("O1", dtype="bf16", device="cpu")).save(tmp_path / "other.json")
    assert main(["diff", str(plan), str(tmp_path / "other.json"), "-q"]) == 1
    assert capsys.readouterr() == ("", "")
    assert main(["diff", str(plan), str(tmp_path / "none.json"), "-q"]) == 2
    assert "none.json" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_what_takes_long_is_said_on_a_terminal_alone_and_taken_away() -> None:
    for stream, said in ((Terminal(), "fxamp: converting x\\x1b.py ...\r\x1b[K"), (io.StringIO(), "")):
        with shown_while("converting x\x1b.py", stream, patience=0.01):
            time.sleep(0.2)
        assert stream.getvalue() == said
    with shown_while("converting", stream := Terminal()):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("form", ["html", "model-explorer"])
def test_a_place_that_cannot_be_written_to_is_named(
    plan: Path, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", tmp_path / "none" / "out.json", Path("/proc/out.json")):
        assert main(["report", str(plan), f"--output-format={form}", "-o", str(place)]) == 2
        said, error = capsys.readouterr()
        assert said == ""
        assert str(place.parent if place.name == "out.json" else place) in error


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--module=nothere", "no node has the module 'nothere'"),
        ("--op=lniear", "no node has the op 'lniear'; the nearest name is 'linear'"),
        ("--colour=bf16", "no node has the colour 'bf16'"),
        ("--reason=lo", "no node has the reason 'lo'"),
        ("--depth=-1", "'-1' is not a number of levels"),
    ],
)
def test_a_filter_that_matches_nothing_is_an_error(
    plan: Path, option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("text", "json", "html"):
        assert main(["report", str(plan), option, f"--output-format={form}"]) == 2
        assert said in capsys.readouterr().err


def in_encoding(encoding: str, words: list[str]) -> int:
    warnings.filterwarnings("ignore", "Guards may run slower", RuntimeWarning)  # on Python 3.13.0, at each capture
    with open(1, "w", encoding=encoding, closefd=False) as out, contextlib.redirect_stdout(out):
        return main(words)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize(
    "words", [("report", "--nodes"), ("report", "--output-format=json"), ("check", "--output-format=markdown")]
)
def test_an_output_that_lacks_a_character_fails_nothing(
    words: tuple[str, ...], encoding: str, tmp_path: Path, plan: Path
) -> None:
    verb, *options = words
    target = str(plan)
    if verb == "check":
        (tmp_path / "net.py").write_text(
            "import torch\ndef make():\n    return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
        )
        target, options = f"{tmp_path / 'net.py'}:make", [*options, "--here", "--budget=casts=100"]
    status, out, err = in_another_process(printed, in_encoding, encoding, [verb, target, *options])
    assert (status, err) == (0, "")
    written = out.encode("utf-8", "surrogateescape")
    if "json" in options[0]:
        assert json.loads(written.decode("utf-8"))["plan"]
    else:
        assert written.decode(encoding)


@pytest.mark.parametrize(
    ("verb", "form", "formats"),
    [
        ("census", "sarif", "text, json"),
        ("rules", "html", "text, markdown, json"),
        ("tune", "junit", "text, markdown, json"),
    ],
)
def test_a_format_of_another_verb_is_an_error_and_no_file(
    verb: str, form: str, formats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([verb, "net.py:make", "--output", f"{form}=a.out"]) == 2
    assert f"{verb} has no {form}; its formats are {formats}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["net.py", "pyproject.toml", "model.pt", "look.ipynb"])
@pytest.mark.parametrize("words", [["-o"], ["--save-plan"], ["--output-format=json", "-o"]])
def test_a_source_or_a_checkpoint_is_not_replaced(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, words: list[str]
) -> None:
    monkeypatch.chdir(plan.parent)
    Path(file).write_text("# mine\n", encoding="utf-8")
    assert main(["report", "plan.json", *words, file]) == 2
    error = capsys.readouterr().err
    assert f"{file} is there already" in error
    assert "give another file" in error
    assert Path(file).read_text(encoding="utf-8") == "# mine\n"
    assert main(["report", "plan.json", *words, f"other{Path(file).suffix}"]) == 0  # nothing is there


def test_a_folder_that_is_missing_is_named_by_the_file(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = plan.parent / "none" / "out.txt"
    assert main(["report", str(plan), "-o", str(place)]) == 2
    assert capsys.readouterr().err == f"fxamp: error: No such file or directory: {place}\n"

from __future__ import annotations

from pathlib import Path

import pytest

from fxamp import FxampError, demo


def _short(task: demo.Task, steps: int) -> demo.Task:
    return demo.Task(task.name, task.build, steps, task.learning_rate, task.weight_decay)


def test_prints_and_writes_one_row_per_model_and_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "demo.md"
    monkeypatch.setattr(demo, "TEST_IMAGES", demo.BATCH)  # for which it has been converted

    rows = demo.run(output=path, tasks=[_short(demo.TASKS[0], 6)])

    text = path.read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    assert [line[1:3] for line in cells[1:]] == [["LeNet-5", variant] for variant in demo.VARIANTS]
    casts = {row.variant: row.counts.casts for row in rows}
    assert [line[5] for line in cells[1:]] == [str(casts[variant]) for variant in demo.VARIANTS]
    assert casts[demo.FP32] == 0
    assert 0 < casts[demo.O1] <= casts[demo.AUTOCAST]
    assert 0 < casts[demo.PER_STEP] < casts[demo.O2]
    by_variant = {row.variant: row.accuracies for row in rows}
    assert by_variant[demo.PER_STEP] == by_variant[demo.O2]


@pytest.mark.matrix
def test_the_vision_transformer_trains_in_every_variant(tmp_path: Path) -> None:
    rows = demo.run(output=tmp_path / "demo.md", tasks=[_short(demo.TASKS[1], 30)])

    # A tenth is what guessing gives.
    assert min(row.accuracy for row in rows) > 50


def test_a_file_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(FxampError, match=r"cannot write .*missing.* give another file with -o"):
        demo.run(output=tmp_path / "missing" / "demo.md", tasks=[])


def test_no_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FxampError, match="seeds must be at least 1, got 0"):
        demo.run(seeds=0, output=tmp_path / "demo.md", tasks=[])


def test_the_table_is_written_to_the_current_directory_also_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("reports", "fxamp"):
        (tmp_path / folder).mkdir()
    (tmp_path / "fxamp" / "demo.py").touch()
    monkeypatch.chdir(tmp_path)

    demo.run(tasks=[])

    assert (tmp_path / "fxamp-demo.md").is_file()
    assert list((tmp_path / "reports").iterdir()) == []


@pytest.mark.matrix
def test_o1_and_o2_are_as_accurate_as_fp32(tmp_path: Path) -> None:
    rows = {(row.model, row.variant): row.accuracy for row in demo.run(seeds=3, output=tmp_path / "demo.md")}

    for task in demo.TASKS:
        reference = rows[task.name, demo.FP32]
        assert reference > 96
        assert rows[task.name, demo.O1] == pytest.approx(reference, abs=0.4)
        assert rows[task.name, demo.O2] == pytest.approx(reference, abs=0.4)

"""The report of what only a GPU can show runs end to end in its small form, and keeps what it had when it fails."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reports import gpu

SOME = [("BERT-base",), pytest.param(("BERT-base", "ResNet-50"), marks=pytest.mark.matrix)]


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class TwoBlocks(nn.Module):
    """A transformer that is traced in a tenth of the time of one of `transformers`."""

    config = SimpleNamespace(vocab_size=60)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(60, 32), nn.Linear(32, 60)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 32)]) for _ in range(2)
        )

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x = self.words(input_ids)
        blocks: Any = self.blocks
        for norm, qkv, up, down in blocks:
            q, k, v = qkv(norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + down(F.gelu(up(x)))
        logits = self.head(x)
        return Output(None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class StandIn(gpu.Subject):
    """Has the place of a model of `transformers`; those themselves are in the matrix."""

    def build(self, batch: int, small: bool, **others: Any) -> tuple[Any, gpu.Inputs]:
        torch.manual_seed(0)
        ids = torch.randint(1, 60, (batch, 8))
        return TwoBlocks(), {"input_ids": ids, "labels": ids}


STAND_IN = StandIn("", "", 8, (1, 2), {}, {}, {})


@pytest.fixture(scope="module", params=SOME, ids=" ".join)
def models(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


@pytest.fixture(scope="module")
def sections(models: list[str]) -> list[str]:
    """Return the sections to write: what is compiled is in its small form what `train` compiles, and is slow."""
    return [name for name in gpu.SECTIONS if len(models) > 1 or not name.startswith("compiled")]


@pytest.fixture(scope="module")
def cases(models: list[str]) -> list[str]:
    """Return the steps to train by."""
    return [name for name in gpu.SMALL_CASES if len(models) > 1 or not gpu.CASES[name].compile]


@pytest.fixture(scope="module")
def report(models: list[str], sections: list[str], cases: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the sections have written."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "SUBJECTS", {name: gpu.SUBJECTS[name] if len(models) > 1 else STAND_IN for name in models})
        patch.setattr(gpu, "LEARNER", gpu.LEARNER if len(models) > 1 else STAND_IN)
        patch.setattr(gpu, "SMALL_CASES", cases)
        gpu.main([*sections, "--small", "--here", "-o", str(folder)])
    return folder


@pytest.fixture(scope="module")
def rows(report: Path) -> dict[str, list[gpu.Row]]:
    """Return the rows of every section."""
    sections = json.loads((report / "gpu.json").read_text())["sections"]
    return {name: [row for rows in tasks.values() for row in rows] for name, tasks in sections.items()}


def test_every_section_runs_without_a_problem(
    report: Path, sections: list[str], rows: dict[str, list[gpu.Row]]
) -> None:
    assert list(rows) == sections
    assert all(rows.values())
    assert [row["problem"] for found in rows.values() for row in found if "problem" in row] == []
    text = (report / "gpu.md").read_text()
    titles = [gpu.SECTIONS[name].title for name in sections]
    assert [line[3:] for line in text.splitlines() if line[:3] == "## "] == [*titles, "Where fxamp gains least"]
    assert "small form" in text
    assert "Left out" not in text


def test_a_step_trains_as_the_loop_by_hand_in_every_case(cases: list[str], rows: dict[str, list[gpu.Row]]) -> None:
    assert [row["step"] for row in rows["train"]] == cases
    for row in rows["train"]:
        assert row["distance"] == 0, row["step"]
        scaled = gpu.CASES[row["step"]].low == torch.float16
        ours, _, other = row["loss scale"].partition(", by hand ")
        assert ours == other
        assert bool(ours) == scaled
        assert not scaled or float(ours) < gpu.SMALL_SCALE  # FP16 overflowed, and the step was skipped
        assert ("model and loss: 1 compiled, 0 graph breaks" in row["compiled"]) == gpu.CASES[row["step"]].compile


def test_o1_agrees_with_autocast_on_this_device(models: list[str], rows: dict[str, list[gpu.Row]]) -> None:
    assert [row["model"] for row in rows["agreement"]] == models
    for row in rows["agreement"]:
        assert row["values"] > 20
        assert (row["wrong"], row["first"], row["output"]) == (0, "", "equal"), row
        _, _, apart = row["gradients"].partition(", ")  # sums of 16 bits, where a value that several read is cast once
        assert not apart or float(apart.split()[0]) < 0.01, row


@pytest.mark.parametrize(
    ("section", "ways"),
    [
        ("eager", gpu.EAGER),
        ("inference", gpu.INFERENCE),
        pytest.param("compiled", gpu.COMPILED, marks=pytest.mark.matrix),
        pytest.param("compiled_inference", gpu.COMPILED_INFERENCE, marks=pytest.mark.matrix),
    ],
)
def test_every_way_is_timed_beside_autocast(rows: dict[str, list[gpu.Row]], section: str, ways: gpu.Ways) -> None:
    if section not in rows:
        pytest.skip("of one model it is not written")
    found = {row["variant"]: row for row in rows[section]}
    assert list(found) == list(ways)[: gpu.SMALL_COMPILED if section.startswith("compiled") else None]
    for way, row in found.items():
        base = found[ways[way][0]]
        assert row["over autocast"] == pytest.approx(row["ms"] / base["ms"])
        assert row["ms"] > 0
        compiled = section == "compiled" and way.startswith("fxamp")
        assert ("model and loss: 1 compiled, 0 graph breaks" in row["note"]) == compiled


def test_frozen_inference_gives_the_outputs_of_autocast(rows: dict[str, list[gpu.Row]]) -> None:
    notes = {row["variant"]: row["note"] for row in rows["inference"]}
    assert notes["fxamp O1, frozen"] == notes["fxamp O1"] == notes["torch.autocast, no_grad"] == "output equal"
    assert notes["FP32 with TF32"].endswith(" apart")


def test_losses_are_those_of_autocast_at_o1_and_fall(rows: dict[str, list[gpu.Row]]) -> None:
    found = {row["variant"]: row for row in rows["loss"]}
    assert list(found) == list(gpu.CURVES)
    assert found["fxamp O1"]["apart from autocast"] == 0
    assert 0 < found["FP32 with TF32"]["apart from autocast"] < 0.01
    assert all(row["loss at 10"] < row["loss at 1"] for row in found.values())


def test_sentences_follow_from_the_word_before_in_three_words_of_four() -> None:
    follows = torch.arange(50).roll(1)
    ids = gpu.sentences(follows, 40, 100, torch.Generator().manual_seed(0))
    share = (ids[:, 1:] == follows[ids[:, :-1]]).float().mean()
    assert 0.72 < float(share) < 0.8


@pytest.mark.parametrize(
    ("kernel", "casts"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::Tensor", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::float16_copy_kernel_cuda(at::Tensor", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda(at", True),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator", True),
        ("void at::native::elementwise_kernel<128, gpu_kernel_impl<at::native::direct_copy_kernel_cuda(at", True),
        ("void at::native::elementwise_kernel<128, gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda", False),
        ("triton_poi_fused__to_copy_3", True),
        ("triton_poi_fused__to_copy_t_12", True),
        ("triton_poi_fused__to_copy_add_3", False),
        ("triton_poi_fused_t_3", False),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", False),
    ],
)
def test_a_kernel_that_only_casts_is_told_by_its_name(kernel: str, casts: bool) -> None:
    assert gpu.only_casts(kernel) == casts


def test_batches_begin_with_one_that_is_bound_by_launching_kernels() -> None:
    for subject in gpu.SUBJECTS.values():
        assert subject.batches[0] == 1
        assert list(subject.batches) == sorted(set(subject.batches))
    assert len(gpu.SUBJECTS["BERT-base"].batches) >= 4


def test_what_fxamp_gains_least_in_is_named_and_16_bit_weights_are_not_counted() -> None:
    def rows(model: str, **ms: float) -> list[gpu.Row]:
        return [{"model": model, "low": "BF16", "variant": way.replace("_", " "), "ms": t} for way, t in ms.items()]

    tasks = {
        "won": rows("won", fxamp_O1=1.0, fxamp_O2=0.5, torch=1.0, all_low=0.1),
        "lost": rows("lost", fxamp_O1=3.0, torch=2.0, FP32=4.0),
        "alone": rows("alone", fxamp_O1=3.0),
    }
    data = {"machine": "here", "torch": "2", "small": False, "left": {}, "sections": {"eager": tasks}}
    found = gpu.least_gains(data)
    assert [(row["model"], row["ms over ms"]) for row in found] == [("lost", 1.5), ("won", 0.5)]
    assert "| Steps     | lost    | BF16  | fxamp O1" in gpu.to_markdown(data)


def test_what_is_there_is_not_measured_again_and_failures_are(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def task(label: str, until: float) -> gpu.Rows:
        begun.append(label)
        yield [{"op": label}]
        if label == "breaks":
            raise RuntimeError("out of luck\nand more")

    _only(monkeypatch, {label: lambda until, label=label: task(label, until) for label in ("holds", "breaks", "after")})
    folder = report.parent
    gpu.main(["--small", "--here", "-o", str(folder)])
    gpu.main(["--small", "--here", "-o", str(folder)])
    assert begun == ["holds", "breaks", "after", "breaks"]
    found = json.loads((folder / "gpu.json").read_text())["sections"]["one"]
    assert found["breaks"] == [{"op": "breaks"}, {"op": "breaks", "problem": "RuntimeError: out of luck"}]
    assert found["after"] == [{"op": "after"}]
    assert "| breaks | RuntimeError: out of luck |" in (folder / "gpu.md").read_text()


def test_what_was_measured_before_an_end_by_force_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def task(until: float) -> gpu.Rows:
        yield [{"op": "first"}]
        raise SystemExit

    _only(monkeypatch, {"both": task})
    with pytest.raises(SystemExit):
        gpu.main(["--small", "--here", "-o", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())["sections"]["one"]
    assert found["both"] == [{"op": "first"}, {"op": "both", "problem": gpu.UNFINISHED}]
    assert gpu.UNFINISHED in (tmp_path / "gpu.md").read_text()


def test_tasks_for_which_there_is_no_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, {"this": lambda until: iter([]), "that": lambda until: iter([])})
    gpu.main(["--small", "--here", "--seconds", "0", "-o", str(tmp_path)])
    assert "Left out for lack of time: this; that." in (tmp_path / "gpu.md").read_text()


def _only(monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Any]) -> None:
    """Let the report have one section, of these tasks."""
    monkeypatch.setattr(gpu, "SECTIONS", {"one": gpu.Section("One", 1, lambda small: tasks, ("op",), "Nothing.")})


def test_a_way_that_runs_out_of_memory_is_a_row_and_the_others_are_timed() -> None:
    def breaks(bench: gpu.Bench) -> gpu.Run:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand so on")

    ways = {gpu.AUTOCAST: gpu.EAGER[gpu.AUTOCAST], "greedy": (gpu.AUTOCAST, breaks)}
    *_, rows = gpu.measured("BERT-base", 2, torch.bfloat16, True, ways, gpu.Bench, float("inf"))
    assert rows[1]["problem"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert "ms" not in rows[1]
    assert rows[0]["over autocast"] == 1


def test_a_way_for_which_there_is_no_time_is_left_out_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(bench: gpu.Bench) -> gpu.Run:
        raise AssertionError("there was no time for it")

    ways = {gpu.AUTOCAST: gpu.EAGER[gpu.AUTOCAST], "slow": (gpu.AUTOCAST, slow)}
    clock = time.monotonic
    steps = gpu.measured("BERT-base", 2, torch.bfloat16, True, ways, gpu.Bench, clock() + 600)
    next(steps)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 600)
    *_, rows = steps
    assert rows[1]["problem"] == gpu.NO_TIME
    assert rows[0]["ms"] > 0


def test_each_section_has_a_process_that_is_ended_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, float, float]] = []

    def run(command: list[str], *, timeout: float, check: bool) -> None:
        name, seconds = command[2], float(command[command.index("--seconds") + 1])
        called.append((name, seconds, timeout))
        (tmp_path / "gpu.md").write_text(name)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    gpu.main(["--small", "-o", str(tmp_path)])
    assert [name for name, _, _ in called] == list(gpu.SECTIONS)
    assert called[-1][1] == pytest.approx(gpu.SECONDS, abs=5)  # what the others left
    assert all(timeout == seconds + gpu.GRACE for _, seconds, timeout in called)
    assert gpu.SECONDS + gpu.GRACE <= 9 * 60


@pytest.mark.parametrize(
    ("name", "millions"),
    [("BERT-base", 110), ("GPT-2", 124), ("ResNet-50", 25.6), ("ViT-B", 86.6), ("Llama 0.5B", 500)],
)
def test_the_models_have_their_real_sizes(name: str, millions: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "meta")
    model, inputs = gpu.SUBJECTS[name].build(1, small=False)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    assert all(t.device.type == "meta" and t.shape[0] == 1 for t in inputs.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_the_small_form_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no GPU here: --small" in capsys.readouterr().err


def test_the_small_form_is_not_written_beside_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--small"])
    assert "say by -o where to write" in capsys.readouterr().err


def test_an_unknown_section_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["kernels"])
    assert "no section kernels: choose from inference, train, agreement" in capsys.readouterr().err


def test_only_facts_that_differ_are_shown() -> None:
    same = {"op": "abs", "low": "BF16", "holds": ["rounds_once"], "assumed": ["rounds_once"]}
    other = {**same, "holds": ["fp32_internal"]}
    failed = {"op": "neg", "problem": "RuntimeError"}
    shown = gpu.differing([same, other, failed])
    assert [(row["holds, not assumed"], row["assumed, does not hold"]) for row in shown[:1]] == [
        ("fp32_internal", "rounds_once")
    ]
    assert shown[1:] == [failed]

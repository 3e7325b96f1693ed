"""Compare what `fxamp.estimate_error` predicts with what is measured, and judge the plans of `fxamp.tune`.

    python reports/error.py                    # as many models as fit the minutes, in the order of a seed
    python reports/error.py --minutes 60       # more of them: what `error.json` holds already is kept
    python reports/error.py --write            # only write the report

    python reports/error.py --only "tune 0.02"  # only what has a key that begins so

Models are those of `architectures.py` and `zoo.py`, random, in train mode, in BF16 on a CPU; some in FP16, and some
after training. Batches have 4 examples, and those of the zoo 4 to 14. A prediction sees 3 batches, and is compared with
the RMS over 8 others; gradients are compared on the same batches too. Writes `error.json`, `error.md` and `error.svg`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402
from fxamp.calibration import ROOM  # noqa: E402
from fxamp.diagnose.step import POLICIES, Step, step_of  # noqa: E402
from fxamp.error.derivatives import Derivatives, keys_of  # noqa: E402
from fxamp.error.estimate import estimated  # noqa: E402
from fxamp.error.measure import measured  # noqa: E402
from fxamp.error.report import ErrorReport, Tally, squared  # noqa: E402
from fxamp.error.rounding import rounded  # noqa: E402
from fxamp.observe.emulation import Observer, Site  # noqa: E402
from fxamp.observe.workload import floats  # noqa: E402
from reports.made import made, sentence  # noqa: E402
from reports.plot import scatter  # noqa: E402
from tests.support.architectures import BY_NAME as ARCHITECTURES  # noqa: E402
from tests.support.zoo import BY_NAME as ZOO  # noqa: E402

SEED, EXAMPLES, SEEN, OTHERS, ATTRIBUTED, TUNED_ON = 34, 4, 3, 8, 8, 24
UNSEEN = 36  # batches that a plan is measured on, beside those that it was tuned on
LEVELS = ("O1", "O2")
TUNED, MIXED, FIXED, TRAINED = 17, 18, 20, ("zoo:gpt", "zoo:hf_vit", "zoo:resnet18")  # how many models, and which
CURVES = ("zoo:hf_bert", "zoo:hf_gpt2", "zoo:hf_vit", "zoo:hf_llama", "zoo:hf_t5", "zoo:hf_resnet")
TOLERANCES = (1.0, 1.2, 1.5)  # times autocast's error
Row = dict[str, Any]


def names() -> list[str]:
    """Return all models in the order of the seed."""
    found = [*ARCHITECTURES, *(f"zoo:{name}" for name in ZOO)]
    random.Random(SEED).shuffle(found)
    return found


def given(name: str) -> tuple[nn.Module, Any, Callable[[int], Any]]:
    """Return a model, its loss, and a function that gives the batch of a seed."""
    torch.manual_seed(0)
    if not name.startswith("zoo:"):
        found = ARCHITECTURES[name]
        model, _ = found(EXAMPLES)
        return model.train(), _loss, partial(_batch, found.inputs)
    zoo = ZOO[name[4:]]

    def inputs(count: int) -> Any:  # which its entry seeds by the number of examples
        args, kwargs = zoo.inputs(count)
        return kwargs or (args[0] if len(args) == 1 else args)

    return zoo.build().train(), zoo.loss, lambda seed: inputs(EXAMPLES + seed % 60)


def _loss(output: Any) -> Tensor:
    """Return the loss of an output; the mean square of its first floats where it has none."""
    found = getattr(output, "loss", None)
    return floats(output)[0].square().mean() if found is None else found


def _batch(inputs: Callable[[int], Any], seed: int) -> Any:
    torch.manual_seed(1000 + seed)
    return inputs(EXAMPLES)


def _pairs(batches: Iterable[Any]) -> list[Any]:
    """Return batches as diagnostics take them: two inputs are no pair of input and target."""
    return [(b, None) if isinstance(b, tuple) else b for b in batches]


def case(name: str, dtype: str, trained: int = 0) -> list[Row]:
    """Predict and measure one model; a row a level."""
    model, loss, batch = given(name)
    if trained:
        _train(model, loss, batch, trained)
    policies = tuple(f"{level},dtype={dtype}" for level in LEVELS)
    step = step_of(model, batches=_pairs(batch(i) for i in range(SEEN + OTHERS)), loss=loss)
    whole = step.batches
    reports = []
    for run, part in (
        (estimated, slice(SEEN)),
        (measured, slice(SEEN)),
        (measured, slice(1)),
        (measured, slice(SEEN, None)),
    ):
        step.batches = whole[part]
        reports.append(run(step, policies))
    return [
        _row(name, level, dtype, trained, [r[policy] for r in reports], reports[-1])
        for level, policy in zip(LEVELS, policies, strict=True)
    ]


def _row(name: str, level: str, dtype: str, trained: int, errors: Sequence[Any], report: ErrorReport) -> Row:
    predicted, same, one, measured = errors
    shared = predicted.parameters.keys() & same.parameters.keys()
    return {
        "model": name, "level": level, "dtype": dtype, "trained": trained, "loss_value": report.loss,
        "floor": report.floor, "reference": report.reference.partition(",")[0],
        "loss": [predicted.loss, measured.loss, one.loss],
        "gradient": [predicted.gradient, measured.gradient, one.gradient],
        "same": [predicted.gradient, same.gradient],
        "parameters": [[predicted.parameters[p], same.parameters[p]] for p in sorted(shared)],
        "dead": len(report.dead), "flips": sum(predicted.flips.values()),
        "top": [[node.what, round(node.share, 3)] for node in predicted.nodes[:3]],
    }  # fmt: skip


def _train(model: nn.Module, loss: Any, batch: Callable[[int], Any], steps: int) -> None:
    view = fxamp.convert(model, policy="O1,dtype=bf16", check=False)
    step = fxamp.TrainStep(view, loss, torch.optim.AdamW(model.parameters(), 1e-3))
    for i in range(steps):
        step(batch(i % 4))


def tuned(name: str, times: float | None) -> Row:
    """Tune one model at a multiple of autocast's error (None: at 0.02), and measure on batches that it did not see."""
    model, loss, batch = given(name)
    seen, others = (_pairs(batch(at + i) for i in range(n)) for at, n in ((0, TUNED_ON), (TUNED_ON, UNSEEN)))
    policies = ("autocast,dtype=bf16", "O1,dtype=bf16")
    found = fxamp.measure_error(model, batches=others, loss=loss, policies=policies)
    autocast, o1 = (found[p] for p in policies)
    near = fxamp.measure_error(model, batches=seen, loss=loss, policies=policies[0])[policies[0]].per_parameter
    tolerance: Any = 0.02 if times is None else "autocast" if times == 1 else near * times
    kept = fxamp.measure_error(model, batches=others[:1], loss=loss, policies="O1,dtype=bf16,output_dtype=autocast")
    row: Row = {"model": name, "times": times, "autocast": _costs(autocast), "o1": _costs(o1, kept)}
    started = time.perf_counter()
    try:
        plan = fxamp.tune(model, batches=seen, loss=loss, tolerance=tolerance, policy="O2,dtype=bf16")
    except fxamp.PolicyError as error:
        return {**row, "refused": str(error)}
    seconds = time.perf_counter() - started
    errors = fxamp.measure_error(fxamp.convert(model, plan=plan, check=False), batches=others, loss=loss).policies[1]
    low = replace(plan, policy=replace(plan.policy, output_dtype="autocast"))
    kept = fxamp.measure_error(fxamp.convert(model, plan=low, check=False), batches=others[:1], loss=loss)
    return {**row, "tuned": _costs(errors, kept), "level": str(plan.policy)[:2],
            "tolerance": plan.certificate["tolerance"], "certified": plan.certificate["measured"],
            "seconds": round(seconds, 1)}  # fmt: skip


def attributed(name: str) -> list[Row]:
    """Return the root of the sum of what nodes add to the variance of the gradients, beside the error as a whole."""
    model, loss, batch = given(name)
    step = step_of(model, batches=_pairs(batch(i) for i in range(ATTRIBUTED)), loss=loss)
    derived, rows = Derivatives(step, "O2,dtype=bf16", most=ATTRIBUTED), []
    for level in LEVELS:
        policy = f"{level},dtype=bf16"
        whole = estimated(step, (policy,))[policy]
        mean = sum(derived.gradients(map(keys_of, step.rounding(policy)))) / (ATTRIBUTED * len(whole.parameters))
        rows.append({"model": name, "level": level, "sum": mean**0.5, "whole": whole.per_parameter})
    return rows


def three(name: str) -> list[Row]:
    """Predict what O1 would give with FP16 where calibrated ranges allow it and BF16 elsewhere, and what it would cost.

    A node is FP16 if its values fit, by proof or by calibration, and its gradients do with the loss scale that O1 finds
    in FP16, less the room that calibration asks for. Where a value is read in another dtype than its own it is cast,
    and rounded again.
    """
    model, loss, batch = given(name)
    step = step_of(model, batches=_pairs(batch(i) for i in range(SEEN)), loss=loss)
    o1, fp16 = "O1,dtype=bf16", "O1,dtype=fp16"
    known = {policy: estimated(step, (policy,))[policy] for policy in (o1, fp16)}
    scale = max(step.scale(fp16) / ROOM, 1.0)
    ranges = fxamp.calibrate(model, batches=step.batches, loss=loss, scale=scale, policy=o1)
    fits = {
        key for key, held in ranges.values.items()
        if held.fits and (key not in ranges.gradients or replace(
            ranges.gradients[key], largest=(ranges.gradients[key].largest or math.inf) * scale).fits)
    }  # fmt: skip
    mixed = _Mixed(step, fits)
    tally, norms = Tally(), dict[str, float]()
    for b in step.batches:
        plain = step.run(b, o1, Observer())
        squared(plain.gradients, norms)
        tally.add(0.0, mixed.run(o1, b, scale).gradients, plain.gradients, 2.0)
    errors = tally.errors("fp16+bf16", norms)
    listed = (known[o1], known[fp16], errors)
    return [{"model": name, "low": len(mixed.low), "fits": len(mixed.low & fits), "casts": mixed.casts(set()),
             "mixed_casts": mixed.casts(fits), "scale": scale, "gradient": [_finite(e.gradient) for e in listed],
             "per_parameter": [_finite(e.per_parameter) for e in listed]}]  # fmt: skip


def _finite(error: float | None) -> float | None:
    """Return an error as JSON holds it, None where it is not finite."""
    return error if error is not None and math.isfinite(error) else None


class _Mixed:
    """Steps that round at random to FP16 at some nodes, and to BF16 at others.

    Args:
        step: the model.
        fits: the keys of the nodes that are FP16.

    Attributes:
        low: the keys of the nodes that give 16 bits.
    """

    def __init__(self, step: Step, fits: set[str]) -> None:
        self._step, self._fits, self._generator = step, fits, torch.Generator()
        self.low: set[str] = set()
        self._reads: set[tuple[str, str]] = set()  # the keys of readers and of what they read

    def run(self, name: str, batch: Any, scale: float) -> Any:
        """Run a step."""
        self._generator.manual_seed(0)

        def at(site: Site, value: Tensor) -> Tensor:
            if site.part in ("", "cast") and getattr(site.node.meta.get("val"), "dtype", None) == torch.bfloat16:
                self.low |= {site.key} if not site.part else set()
            if not site.rounds:
                return value
            return rounded(value, self._dtype(site.key, self._fits), self._generator, forward=site.part != "scores")

        def read(reader: str, source: str, value: Tensor) -> Tensor:
            self._reads.add((reader, source))
            mine, other = self._dtype(source, self._fits), self._dtype(reader, self._fits)
            if source not in self.low:
                return value
            value = rounded(value, mine, self._generator, forward=False)
            return rounded(value, other, self._generator) if reader in self.low and mine != other else value

        return self._step.run(batch, name, Observer(at, read), scale=scale)

    def casts(self, fits: set[str]) -> int:
        """Return how many casts of values forward makes that 16-bit nodes read, a value once for each dtype."""
        dtypes: dict[str, set[torch.dtype]] = {}
        for reader, source in self._reads:
            if reader in self.low:
                dtypes.setdefault(source, set()).add(self._dtype(reader, fits))
        return sum(len(found - ({self._dtype(s, fits)} if s in self.low else set())) for s, found in dtypes.items())

    @staticmethod
    def _dtype(key: str, fits: set[str]) -> torch.dtype:
        return torch.float16 if key in fits else torch.bfloat16


def cost() -> list[Row]:
    """Return what a prediction of all four policies costs a batch, in CPU time of forwards and backwards in FP32.

    The model is a BERT of 4 layers of width 256, with 4 sentences of 64 tokens; graphs are captured beforehand.
    """
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForMaskedLM(BertConfig(vocab_size=4096, **sizes)).eval()
    ids = torch.randint(0, 4096, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    step = step_of(model, batch)

    def plain() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    runs: dict[str, Callable[[], Any]] = {
        "plain": plain, "loss": partial(estimated, step, POLICIES, gradients=False),
        "with gradients": partial(estimated, step, POLICIES),
        "with nodes": partial(estimated, step, POLICIES, gradients="nodes"),
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(6):
        for name, run in runs.items():
            started = time.process_time()
            run()
            taken[name].append(time.process_time() - started)
    least = {name: min(seconds[1:]) for name, seconds in taken.items()}
    return [{"of": name, "steps": round(least[name] / least["plain"], 1)} for name in runs]


def _costs(errors: Any, kept: ErrorReport | None = None) -> list[Any]:
    """Return an error, and the casts and bytes of a step; where outputs are kept low, as autocast does, if given."""
    costs = errors if kept is None else kept.policies[1]
    return [errors.per_parameter, costs.casts, costs.cast_bytes]


# Runs.


def _tuning(name: str, times: float | None) -> list[Row]:
    return [tuned(name, times)]


def jobs() -> list[tuple[str, Callable[[], list[Row]]]]:
    """Return everything that is measured, in order: a key, and a function that gives rows."""
    order = names()
    listed: list[tuple[str, Callable[[], list[Row]]]] = [("cost", cost)]
    tunes = [(n, 1.0) for n in CURVES] + [(n, t) for n in CURVES for t in TOLERANCES[1:]]
    tunes += [(n, 1.0) for n in ("Qwen3ForCausalLM", *order[:TUNED]) if n not in CURVES]
    listed += [(f"nodes {name}", partial(attributed, name)) for name in CURVES]
    for at, name in enumerate(order):
        listed.append((f"bf16 {name}", partial(case, name, "bf16")))
        if at % 4 == 3:
            listed.append((f"fp16 {order[at // 4]}", partial(case, order[at // 4], "fp16")))
        if at % 2 == 1 and at // 2 < len(tunes):
            who, times = tunes[at // 2]
            listed.append((f"tune {times} {who}", partial(_tuning, who, times)))
        if at < MIXED:
            who = (*CURVES, *order)[at]
            listed.append((f"three {who}", partial(three, who)))
        if at % 2 == 0 and at // 2 < FIXED:
            listed.append((f"tune 0.02 {order[at // 2]}", partial(_tuning, order[at // 2], None)))
        if at % 12 == 11 and at // 12 < len(TRAINED):
            listed.append((f"trained {TRAINED[at // 12]}", partial(case, TRAINED[at // 12], "bf16", 60)))
    listed += [(f"tune {times} {who}", partial(_tuning, who, times)) for who, times in tunes[len(order) // 2 :]]
    return listed


def run(minutes: float, only: str = "") -> dict[str, Any]:
    """Run what `error.json` has not got yet, of keys that begin with `only`, until the minutes are over."""
    file = HERE / "error.json"
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"made": made(), "rows": {}, "errors": {}}
    end = time.monotonic() + 60 * minutes
    for key, job in tqdm(jobs(), disable=None):
        if time.monotonic() > end:
            break
        if key in data["rows"] or key in data["errors"] or not key.startswith(only):
            continue
        torch._dynamo.reset()
        data["continued"] = made()
        try:
            data["rows"][key] = job()
        except Exception as error:
            data["errors"][key] = f"{type(error).__name__}: {error}"[:300]
        file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    return data


# What is written.


def shares(ratios: Sequence[float]) -> list[str]:
    """Return the number of ratios, their median, and the shares of them within 2, 3 and 10."""
    if not ratios:
        return ["0", "", "", "", ""]
    within = [sum(1 / f <= r <= f for r in ratios) / len(ratios) for f in (2, 3, 10)]
    return [str(len(ratios)), f"{statistics.median(ratios):.2f}", *(f"{w:.0%}" for w in within)]


def ratios(rows: Sequence[Row], what: str, predicted: int = 0) -> list[float]:
    """Return predicted over measured; what is not finite counts as missed."""
    return [_ratio(row[what][predicted], row[what][1]) for row in rows]


def _ratio(predicted: float, true: float) -> float:
    found = predicted / true if true else math.inf
    return found if math.isfinite(found) else math.inf


def median_of_others(rows: Sequence[Row], what: str) -> list[float]:
    """Return the ratios of a baseline that predicts the median of all other models at the same level and dtype."""
    found = []
    for row in rows:
        unit = row["loss_value"] if what == "loss" else 1.0
        others = [
            r[what][1] / abs(r["loss_value"] if what == "loss" else 1.0) for r in rows
            if r["model"] != row["model"] and (r["level"], r["dtype"]) == (row["level"], row["dtype"])
        ]  # fmt: skip
        found.append(_ratio(statistics.median(others) * abs(unit), row[what][1]) if others else math.inf)
    return found


def table(rows: Sequence[Row], routers: Collection[str] = ()) -> str:
    """Return the shares of predictions and of both baselines; `routers` are models with routers beside those seen."""
    losses = [r for r in rows if not at_floor(r)]
    smooth = [r for r in rows if r["model"] not in {*routers, *(r["model"] for r in rows if r["flips"])}]
    listed = [
        ["loss", *shares(ratios(losses, "loss"))],
        ["loss, without routers", *shares(ratios([r for r in smooth if not at_floor(r)], "loss"))],
        ["loss: one converted run", *shares(ratios(losses, "loss", 2))],
        ["loss: median of other models", *shares(median_of_others(losses, "loss"))],
        ["gradient, same batches", *shares(ratios(rows, "same"))],
        ["gradient, other batches", *shares(ratios(rows, "gradient"))],
        ["gradient, other batches, without routers", *shares(ratios(smooth, "gradient"))],
        ["gradient: one converted run", *shares(ratios(rows, "gradient", 2))],
        ["gradient: median of other models", *shares(median_of_others(rows, "gradient"))],
        ["each parameter, same batches", *shares([_ratio(*pair) for row in rows for pair in row["parameters"]])],
    ]
    head = ("predicted / measured", "cases", "median", "2x", "3x", "10x")
    return tabulate(listed, head, "pipe", disable_numparse=True)


def beside_one_run(rows: Sequence[Row]) -> str:
    """Say how far the predictions of gradients are above both baselines, and why not further."""
    factors = (1.25, 2.0)
    who = {"the prediction": ratios(rows, "gradient"), "one converted run": ratios(rows, "gradient", 2),
           "the median of the other models": median_of_others(rows, "gradient")}  # fmt: skip
    within = {name: [sum(1 / f <= r <= f for r in found) / len(found) for f in factors] for name, found in who.items()}
    errors = sorted(row["gradient"][1] for row in rows if row["level"] == "O1")
    quarters = statistics.quantiles(errors, n=4)
    listed = ", ".join(f"{name} has {near:.0%} and {far:.0%}" for name, (near, far) in within.items())
    return (
        f"Of gradients on other batches, within {factors[0]:g}x and {factors[1]:g}x {listed}. One converted run is a "
        "measurement itself: the error of a whole gradient is a norm over all of its elements, which one batch gives "
        "nearly as well as eight, so that nothing can be ten points above it. That of a loss is a single number, of "
        "which one run is one draw. The median is good as far as models are alike: half of the errors of gradients at "
        f"O1 lie between {quarters[0]:.1e} and {quarters[2]:.1e}, and all between {errors[0]:.1e} and {errors[-1]:.1e}."
    )


def at_floor(row: Row) -> bool:
    """Say whether the loss moves no more than FP32's own error: left out of the shares of the loss, and listed."""
    return bool(row["loss"][1] <= 2 * row["floor"])


def write(data: Mapping[str, Any]) -> None:
    """Write `error.md` and `error.svg`."""
    rows = [row for key, found in data["rows"].items() if key.startswith(("bf16", "fp16", "trained")) for row in found]
    steps = {row["of"]: row["steps"] for row in data["rows"].get("cost", [])}
    plain = [r for r in rows if r["dtype"] == "bf16" and not r["trained"]]
    fp16, trained = [r for r in rows if r["dtype"] == "fp16"], [r for r in rows if r["trained"]]
    tunes = [row for key, found in data["rows"].items() if key.startswith("tune") for row in found]
    mixed = [row for key, found in data["rows"].items() if key.startswith("three") for row in found]
    nodes = [row for key, found in data["rows"].items() if key.startswith("nodes") for row in found]
    routers = sorted({r["model"] for r in rows if r["flips"]})
    floor = sorted({f"{r['model']} {r['level']}" for r in plain if at_floor(r)})
    references = sorted({r["model"] for r in plain if r["reference"] != "float64"})
    parts = [
        "# The error of a colouring: predicted, measured, and kept",
        f"Written by `python reports/error.py`. {_when(data)} Random models in train mode, in the order of "
        f"seed {SEED}, O1 and O2; {SEEN} batches of {EXAMPLES} predicted, RMS over {OTHERS} other batches measured "
        "against float64. A share says how many predictions are within a factor.",
        f"## BF16: {len({r['model'] for r in plain})} models", table(plain), beside_one_run(plain),
        "![Predicted and measured errors](error.svg)",
        f"At the floor of FP32, left out of the rows on the loss: {', '.join(floor) or 'none'}. Measured against FP32, "
        f"since float64 does not run: {', '.join(references) or 'none'}. With routers, whose choices flip: "
        f"{', '.join(routers) or 'none'}. Not run, for an error: "
        f"{'; '.join(f'{k} ({v.splitlines()[0][:120]})' for k, v in data['errors'].items()) or 'none'}.",
        "Furthest off:", worst(plain),
        "Of a BERT of 4 layers of width 256 a prediction of all four policies takes the CPU time of "
        f"{steps.get('loss')} forwards and backwards in FP32 a batch, with gradients {steps.get('with gradients')}, "
        f"and with the nodes that these come from {steps.get('with nodes')}.",
        "## Gradients by node", _attributed(nodes),
        f"## FP16: {len({r['model'] for r in fp16})} models", table(fp16, routers),
        "## After 60 steps of training, beside the same models before", _trained(trained, plain),
        "## Tuned at the error of autocast", _tuned([t for t in tunes if t["times"] == 1.0]),
        "## Tuned at an error of 0.02", _fixed([t for t in tunes if t["times"] is None]),
        "## Tolerance against casts and error", _curves([t for t in tunes if t["times"] is not None]),
        "## FP16 where it fits, and BF16 elsewhere", _three(mixed),
    ]  # fmt: skip
    (HERE / "error.md").write_text("\n\n".join(parts) + "\n")
    points = {
        f"{what} {level}": [(r[what][1], r[what][0]) for r in plain if r["level"] == level]
        for what in ("loss", "gradient") for level in LEVELS
    }  # fmt: skip
    (HERE / "error.svg").write_text(scatter(points, "measured error", "predicted"))


def _when(data: Mapping[str, Any]) -> str:
    continued = sentence(data["continued"]) if "continued" in data else ""
    return sentence(data["made"]) + (f" Continued: {continued[0].lower()}{continued[1:]}" if continued else "")


def worst(rows: Sequence[Row]) -> str:
    """Return the cases that are furthest from their prediction, with what moves their loss and how often they flip."""
    listed = []
    for row in rows:
        for what in ("loss", "gradient"):
            if what == "gradient" or not at_floor(row):
                ratio = _ratio(*row[what][:2])
                listed.append((abs(math.log(max(ratio, 1e-9))), row, what, ratio))
    listed.sort(key=lambda item: -item[0])
    cells = [
        (r["model"], r["level"], what, f"{ratio:.2f}", f"{r['flips']:.2g}" if r["flips"] else "", r["dead"] or "",
         ", ".join(f"{n} {s:.0%}" for n, s in r["top"]))
        for _, r, what, ratio in listed[:10]
    ]  # fmt: skip
    head = ("model", "level", "of", "predicted / measured", "flips a batch", "dead", "what moves the loss")
    return tabulate(cells, head, "pipe", disable_numparse=True)


def _trained(rows: Sequence[Row], before: Sequence[Row]) -> str:
    known = {(r["model"], r["level"]): r for r in before}
    cells = []
    for row in rows:
        for r in (known.get((row["model"], row["level"])), row):
            if r is not None:
                cells.append((r["model"], r["level"], r["trained"], f"{r['loss_value']:.3g}", f"{r['loss'][1]:.2e}",
                              f"{_ratio(*r['loss'][:2]):.2f}", f"{r['gradient'][1]:.2e}",
                              f"{_ratio(*r['gradient'][:2]):.2f}"))  # fmt: skip
    head = ("model", "level", "steps", "loss", "error of the loss", "predicted / measured", "error of the gradient",
            "predicted / measured")  # fmt: skip
    return tabulate(cells, head, "pipe", disable_numparse=True)


def _attributed(rows: Sequence[Row]) -> str:
    cells = [
        (r["model"], r["level"], f"{r['sum']:.2e}", f"{r['whole']:.2e}", f"{r['sum'] / r['whole']:.2f}") for r in rows
    ]
    head = ("model", "level", "sum over nodes", "whole, by random rounding", "sum / whole")
    return tabulate(cells, head, "pipe", disable_numparse=True)


def _tuned(rows: Sequence[Row]) -> str:
    cells = [
        (r["model"], r.get("level", r.get("refused", "")), *_triple(r["autocast"]), *_triple(r["o1"]),
         *_triple(r.get("tuned", [0, 0, 0])))
        for r in rows
    ]  # fmt: skip
    head = (
        "model",
        "plan",
        *(f"{who}: {what}" for who in ("autocast", "O1", "tuned") for what in ("error", "casts", "MB")),
    )
    done = [r for r in rows if "tuned" in r]
    kept = [sum(r["tuned"][0] <= r["autocast"][0] * f for r in done) for f in (1.0, 1.02, 1.1)]
    fewer = [sum(r["tuned"][i] <= min(r["autocast"][i], r["o1"][i]) for r in done) for i in (1, 2)]
    said = (
        f"Tuned on {TUNED_ON} batches. Errors are RMS over parameters, on {UNSEEN} batches that tune did not see: at "
        f"most autocast's on {kept[0]} of {len(done)}, at most 1.02 times it on {kept[1]}, 1.1 times on {kept[2]}. "
        f"Casts, those that restore an output apart, are at most those of autocast and of O1 on {fewer[0]}, their "
        f"bytes on {fewer[1]}."
    )
    return f"{tabulate(cells, head, 'pipe', disable_numparse=True)}\n\n{said}"


def _curves(rows: Sequence[Row]) -> str:
    cells = [
        (
            r["model"],
            f"{r['times']:g}",
            f"{r['tolerance']:.2e}",
            r["level"],
            f"{r['certified']:.2e}",
            *_triple(r["tuned"]),
        )
        for r in sorted(rows, key=lambda r: (r["model"], r["times"]))
        if r["model"] in CURVES and "tuned" in r
    ]
    head = ("model", "times autocast's error", "tolerance", "plan", "certified", "on other batches", "casts", "MB cast")
    return tabulate(cells, head, "pipe", disable_numparse=True)


def _fixed(rows: Sequence[Row]) -> str:
    cells = [
        (r["model"], r.get("level", "refused"), f"{r['tuned'][0]:.2e}" if "tuned" in r else "",
         *(_triple(r[who])[i] if who in r else "" for who in ("tuned", "o1", "autocast") for i in (1, 2)),
         f"{r['o1'][0]:.2e}", r.get("refused", "").partition(".")[0].partition(": ")[2])
        for r in rows
    ]  # fmt: skip
    head = ("model", "plan", "error", "casts", "MB", "O1: casts", "MB", "autocast: casts", "MB", "O1: error", "refused")
    done = [r for r in rows if "tuned" in r]
    kept = sum(r["tuned"][0] <= 0.02 for r in done)
    said = (
        f"On {UNSEEN} batches that tune did not see, {kept} of {len(done)} plans are within 0.02; for "
        f"{len(rows) - len(done)} models tune finds none, and says which is nearest."
    )
    return f"{tabulate(cells, head, 'pipe', disable_numparse=True)}\n\n{said}"


def _three(rows: Sequence[Row]) -> str:
    cells = [
        (r["model"], f"{r['fits']} of {r['low']}", f"{r['scale']:g}", r["casts"], r["mixed_casts"],
         *("not finite" if e is None else f"{e:.2e}" for e in r["per_parameter"]))
        for r in rows
    ]  # fmt: skip
    head = ("model", "16-bit nodes in FP16", "loss scale", "O1: casts forward", "FP16 and BF16: casts",
            "O1 in BF16: error", "O1 in FP16: error", "FP16 and BF16: error")  # fmt: skip
    finite = [r for r in rows if r["per_parameter"][2] is not None]
    better = [r for r in finite if r["per_parameter"][2] <= r["per_parameter"][0] * 2 / 3]
    kept = [r for r in better if r["mixed_casts"] <= r["casts"]]
    beyond = [r for r in finite if r["per_parameter"][2] < r["per_parameter"][1] * 2 / 3]
    whole = [r for r in rows if r["fits"] == r["low"]]
    more = [r for r in rows if r["fits"] < r["low"] and r["mixed_casts"] > r["casts"]]
    said = (
        "Errors are predicted, per parameter, by roundings at random; a node is FP16 if its values fit, proved or "
        f"calibrated, and its gradients do with the loss scale. Of {len(rows)} models, {len(better)} have a third less "
        f"error than O1 in BF16, {len(kept)} of these at no more casts. But {len(whole)} need BF16 nowhere, and are O1 "
        f"in FP16; of the others {len(more)} of {len(rows) - len(whole)} cast more, and {len(rows) - len(finite)} "
        "overflow, where what is BF16, for its range, is read in FP16. A third less error than O1 in FP16 has "
        f"{len(beyond)}. So these dtypes are not mixed: where all fits, `dtype=fp16` alone has such errors, and what "
        "does not fit `calibrate` keeps in FP32."
    )
    return f"{tabulate(cells, head, 'pipe', disable_numparse=True)}\n\n{said}"


def _triple(found: Sequence[Any]) -> tuple[str, str, str]:
    return f"{found[0]:.2e}", str(found[1]), f"{found[2] / 1e6:.2f}"


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--only", default="", help="keys begin with it, such as fp16")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("fxamp").setLevel(logging.ERROR)
    write(run(0.0 if args.write else args.minutes, args.only))


if __name__ == "__main__":
    main()

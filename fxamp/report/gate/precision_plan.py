"""The fixture `precision_plan` of the pytest plugin: a model against the plan that is committed beside its test.

tests/test_net.py::test_small[3-wide]  ->  tests/test_net/test_small_3_wide_.plan.json
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from passes.contract.errors import PlanError
from passes.contract.plan import Plan
from passes.contract.policy import Policy

from ...census.census import census
from ...convert import convert, converted_in, to_read
from ..reader import with_totals
from .gate import KEPT, check
from .outcomes import to_text

OPTION = "--update-precision-plans"
_LONGEST = 120  # characters of a file name; Windows has 260 for a whole path
# What Windows takes for a device, whatever stands behind the first dot.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)


class PrecisionPlan:
    """Compares models with plans, each in a file of its own."""

    def __init__(self, request: pytest.FixtureRequest, temporary: pytest.TempPathFactory) -> None:
        self._test: str = request.node.nodeid
        self._name: str = request.node.name
        self._folder = request.path.parent / request.path.stem
        self._root = request.config.rootpath
        self._update = bool(request.config.getoption(OPTION))
        self._here: set[Path] = set()
        # All processes of a run share one folder: pytest-xdist gives each process a folder inside it.
        shared = temporary.getbasetemp()
        self._claims = (shared.parent if hasattr(request.config, "workerinput") else shared) / "precision_plans"

    def check(
        self, model: nn.Module, args: Any = None, kwargs: Any = None, *, policy: Policy | str = "O1",
        basename: str | None = None,
    ) -> None:  # fmt: skip
        """Fail the test if decisions, casts or totals of a model differ from the committed plan.

        Args:
            model: to be converted and read, not run; or a module that `fxamp.convert` returned, read as it is.
            args: example inputs, as `fxamp.convert` takes them.
            kwargs: example keyword inputs.
            policy: a level, a policy string or a Policy.
            basename: base name of the plan file, instead of the name of the test.

        Raises:
            FxampError: the model cannot be converted under the policy.
        """
        path = self._claimed(file_name(self._name if basename is None else basename))
        shown = path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else path.as_posix()
        if not self._update and not path.exists():
            pytest.fail(f"there is no {shown} yet: write it with pytest {OPTION}, and commit it", pytrace=False)
        asked = Policy.of(policy)

        def make(replayed: Plan | None) -> Any:
            return model if converted_in(model) else to_read(model, args, kwargs, asked, replayed=replayed)

        said = "there was none" if not path.exists() else _changed(shown, make, path)
        if said is None:
            return
        if not self._update:
            pytest.fail(f"{said}\nIf that is intended, write a new plan with pytest {OPTION}", pytrace=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with_totals(make(None))[0].save(path)
        pytest.fail(f"wrote {shown}: read it and commit it. Before that:\n{said}", pytrace=False)

    def run(
        self, model_or_step: Any, inputs: Any, target: Any = None, *, loss: Callable[..., Any] | None = None,
        policy: Policy | str = "O1",
    ) -> None:  # fmt: skip
        """Fail the test if one real step does not run as planned; see `fxamp.census`.

        Args:
            model_or_step: to be converted; or a module that `fxamp.convert` returned, or a TrainStep, as it is.
            inputs: as `fxamp.census` takes them.
            target: as `fxamp.census` takes it.
            loss: as `fxamp.census` takes it.
            policy: a level, a policy string or a Policy, for a model that is not converted.

        Raises:
            FxampError: the step cannot be run, or a model cannot be converted under the policy.
        """
        given = model_or_step
        if isinstance(given, nn.Module) and not converted_in(given):
            given = convert(given, policy=policy)
        found = census(given, inputs, target, loss=loss)
        if found.planned is None:
            pytest.fail(f"nothing of this {type(given).__name__} is converted: give it a view", pytrace=False)
        if found.differences:
            listed = "\n".join(f"  {difference}" for difference in found.differences)
            pytest.fail(f"{found.name} did not run as planned:\n{listed}", pytrace=False)

    def _claimed(self, name: str) -> Path:
        """Return the path of a file that belongs only to this test."""
        path = self._folder / f"{name}.plan.json"
        self._claims.mkdir(exist_ok=True)
        claim = self._claims / hashlib.sha256(str(path).casefold().encode(errors="replace")).hexdigest()
        try:
            with claim.open("x", encoding="utf-8") as file:
                file.write(self._test)
            owner = self._test
        except FileExistsError:
            owner = claim.read_text(encoding="utf-8")
        if owner != self._test or path in self._here:
            other = "this test again" if owner == self._test else owner or "another test"
            pytest.fail(
                f"{path.name} is the plan of two checks, here and in {other}: give one of them a basename of its own",
                pytrace=False,
            )
        self._here.add(path)
        return path


def _changed(shown: str, make: Callable[[Plan | None], nn.Module], path: Path) -> str | None:
    """Say how a model differs from its plan, or why that cannot be told; None if it does not differ."""
    try:
        found = check(shown, make, path, (), update=False)
    except PlanError as e:
        return str(e).replace("--update", OPTION)  # the name of the option in pytest
    return None if found.status == KEPT else to_text([found], way_out="")


def file_name(name: str) -> str:
    """Make a file name for every file system: of word characters, not too long, and no device name of Windows."""
    plain = re.sub(r"\W", "_", unicodedata.normalize("NFC", name)) or "_"
    if _DEVICES.fullmatch(plain):
        plain += "_"
    if len(plain.encode()) <= _LONGEST:
        return plain
    kept = plain.encode()[: _LONGEST - 9].decode(errors="ignore")
    return f"{kept}_{hashlib.sha256(plain.encode()).hexdigest()[:8]}"

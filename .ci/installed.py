"""What an installed fxamp does on every system: convert with the eager inner compiler, which needs no C++ compiler.

`python .ci/installed.py CHECKOUT` fails where the packages are those of the checkout and not those of the wheel.
"""

import sys

import torch

import fxamp
import passes

for package in (fxamp, passes):
    assert package.__file__ is not None
    assert not package.__file__.startswith(sys.argv[1]), package.__file__
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
x = torch.randn(3, 8)
converted = fxamp.convert(model, (x,), backend="eager")
with torch.autocast("cpu"):
    expected = model(x)
assert torch.equal(converted(x), expected.float())
assert fxamp.report(converted).to_html().startswith("<!doctype html>")

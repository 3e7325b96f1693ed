"""Make the examples in the README: the printed census, and pictures of the page, light and dark.

    python reports/shown.py             # all
    python reports/shown.py --printed   # without the pictures, which need chromium and playwright

The printed census is that of the README's own example, and a test holds that it is; the page is of BERT with 12 layers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from transformers import BertConfig, BertForMaskedLM

import fxamp
from fxamp.demo import LeNet5

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
PICTURES: dict[Literal["light", "dark"], Path] = {"light": HERE / "page.png", "dark": HERE / "page-dark.png"}
LAYER = "bert.encoder.layer.0.attention"
# The example, and the block of text under it.
BLOCK = re.compile(r"(census\(model, x\)\)\n```\n\n```text\n)((?s:.*?))(?=```)")


def printed() -> str:
    """Return what the README's example prints."""
    torch.manual_seed(0)
    model, x = LeNet5(), torch.randn(32, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        text = str(fxamp.census(model, x))
    return re.sub(r" +$", "", text, flags=re.MULTILINE) + "\n"


def page() -> str:
    """Return the page of a BERT with 12 layers and few numbers."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=96, num_hidden_layers=12, num_attention_heads=4, intermediate_size=384,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 1000, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    converted = fxamp.convert(BertForMaskedLM(config), (), inputs, policy="O2,dtype=bf16")
    text: str = fxamp.report(converted).to_html()
    return text


def pictures(text: str) -> None:
    """Open a page, choose a node of one layer, and save what is seen, in both colour schemes."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme, to in PICTURES.items():
            seen = browser.new_page(
                viewport={"width": 1400, "height": 860}, color_scheme=scheme, reduced_motion="reduce"
            )
            seen.goto(f"{file.as_uri()}#{LAYER}.self%2Fsoftmax%230")
            seen.screenshot(path=to)
        browser.close()


def main() -> None:
    """Write the block of the README, and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--printed", action="store_true", help="without the pictures")
    args = parser.parse_args()
    text, found = BLOCK.subn(lambda block: block.group(1) + printed(), README.read_text(encoding="utf-8"))
    if found != 1:
        raise SystemExit("the README has no such example")
    README.write_text(text, encoding="utf-8")
    if not args.printed:
        pictures(page())


if __name__ == "__main__":
    main()

"""Make the two examples of a report in the README: the printed report, and a picture of the page.

    python reports/shown.py             # both
    python reports/shown.py --printed   # without the picture, which needs chromium and playwright

The printed report is that of the README's own example, and a test holds that it is; the page is of BERT with 12 layers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

import fxamp
from fxamp.demo import LeNet5

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
PICTURE = HERE / "page.png"
LAYER = "bert.encoder.layer.0.attention"
# The example, and the block of text under it.
BLOCK = re.compile(r"(report\(converted\)\.to_tree\(\)\).*\n```\n\n```text\n)((?s:.*?))(?=```)")


def printed() -> str:
    """Return what the README's example prints."""
    torch.manual_seed(0)
    converted = fxamp.convert(LeNet5(), (torch.randn(32, 1, 8, 8),), policy="O1,dtype=bf16")
    text: str = fxamp.report(converted).to_tree()
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def page() -> str:
    """Return the page of a BERT with 12 layers and few numbers."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=96, num_hidden_layers=12, num_attention_heads=4, intermediate_size=384,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 1000, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    converted = fxamp.convert(BertForMaskedLM(config), (), inputs, policy="O1,dtype=bf16")
    text: str = fxamp.report(converted).to_html()
    return text


def picture(text: str, to: Path) -> None:
    """Open a page, choose a node of one layer, and save what is seen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        seen = browser.new_page(viewport={"width": 1400, "height": 860}, color_scheme="light")
        seen.goto(f"{file.as_uri()}#{LAYER}.self%2Fsoftmax%230")
        seen.screenshot(path=to)
        browser.close()


def main() -> None:
    """Write the block of the README, and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--printed", action="store_true", help="without the picture")
    args = parser.parse_args()
    text, found = BLOCK.subn(lambda block: block.group(1) + printed(), README.read_text(encoding="utf-8"))
    if found != 1:
        raise SystemExit("the README has no such example")
    README.write_text(text, encoding="utf-8")
    if not args.printed:
        picture(page(), PICTURE)


if __name__ == "__main__":
    main()

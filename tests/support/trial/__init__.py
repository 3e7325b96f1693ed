"""Trial: what is run through every level and front end, and judged against eager PyTorch and `torch.autocast`.

The harness lies here, beside the reports that it writes; `tests/reports/test_trial.py` runs a small sample of it, and
all of it behind the marker `trial`. Nothing here imports the tests.
"""

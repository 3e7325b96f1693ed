"""One thread: the models are tiny, and threads that wait for each other are slower than none."""

from __future__ import annotations

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
torch.set_num_threads(1)

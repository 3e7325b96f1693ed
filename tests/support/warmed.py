"""What has happened already in each process of `tests.support.processes`: fxamp has converted, and torch has compiled.

The first time, each of them imports what it needs and fills tables, which takes seconds.

Nothing is differentiated: the first backward pass of a process starts a thread for each device that is no CPU, and
torch's CUDA build counts one even where there is none, once a model was captured. A fork of it could not differentiate.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed.fsdp
import torch.nn.parallel
import transformers

from tests.support.guards import untimed_guards
from tests.support.small import BF16, FP16, X, converted

torch.set_num_threads(1)
untimed_guards()
BERT = transformers.BertForMaskedLM  # what ranks train; transformers imports a model when it is asked for
if not torch.cuda.device_count():  # a capture asks the GPU for its random state, and a fork of that has no GPU
    for policy in (FP16, BF16):
        converted(policy)
    compiled: Any = torch.compile(converted(BF16), backend="aot_eager")
    with torch.no_grad():  # so that torch traces the forward pass only
        compiled(X[0])
    torch.compiler.reset()
gc.collect()
gc.freeze()  # what is not looked at again stays shared with the processes that are forked

"""What has happened already in each process of `tests.support.processes`: fxamp has converted, and torch has compiled.

The first time, each of them imports what it needs and fills tables, which takes seconds.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed.fsdp
import torch.nn.parallel
import transformers

from tests.support.small import BF16, FP16, X, converted, step_of

torch.set_num_threads(1)
BERT = transformers.BertForMaskedLM  # what ranks train; transformers imports a model when it is asked for
for policy in (FP16, BF16):
    step_of(converted(policy), compile="aot_eager" if policy == BF16 else False)(X[0])
torch.compiler.reset()
gc.collect()
gc.freeze()  # what is not looked at again stays shared with the processes that are forked

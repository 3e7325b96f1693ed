"""Where the class of converted modules was while models were captured by `torch.export`; its pickles name this module.

Such modules cannot be made again from their graphs.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from passes.contract.errors import CaptureError

sys.modules[f"{__name__}.module"] = sys.modules[__name__]  # by which a pickle names it


def _load(*_: Any) -> NoReturn:
    raise CaptureError(
        "this converted module was saved when fxamp captured models by torch.export, and cannot be loaded: load the "
        "state_dict of its model, then call fxamp.convert(model, args) again."
    )

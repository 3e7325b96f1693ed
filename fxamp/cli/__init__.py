"""The command `fxamp`.

Imports all of fxamp, each part only when it is needed. `python -m fxamp` and the console script run it.
"""

import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # which fxamp does not need

"""Each test begins with nothing compiled, and with the same random numbers."""

from __future__ import annotations

from tests.support.diagnosed import fresh as fresh

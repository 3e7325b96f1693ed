"""Tests; `tests.support` has the models and the judge that the scripts of reports/ use too."""

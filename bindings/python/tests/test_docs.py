"""The examples of the guide."""

import doctest
import pathlib

import pytest

GUIDE = pathlib.Path(__file__).resolve().parents[3] / "docs/guide/python.md"


def test_examples_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(GUIDE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried > 20
    if failed:
        pytest.fail(f"{failed} of {tried} examples are not as the guide says: see above")

"""The check of a newer vLLM's interface: every difference that would break the connector is found and named."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import pytest

import kvcached_client.vllm
from kvcached_client.vllm import interface
from kvcached_client.vllm.interface import check_interface, hook_differences, missing_attributes


class Base(abc.ABC):
    """As vLLM's base class."""

    @property
    def is_needed(self) -> bool:
        return True

    @abc.abstractmethod
    def start(self, step: int, **options: int) -> None:
        """A hook that a connector must have."""

    def finish(self, request: str) -> str:
        return request

    @classmethod
    def make(cls, config: int) -> int:
        return config

    def newer(self) -> int:
        return 1


class Connector(Base):
    """A connector for just that."""

    @property
    def is_needed(self) -> bool:
        return False

    def start(self, step: int, **options: int) -> None:
        """It starts nothing."""

    def finish(self, request: str) -> str:
        return request

    @classmethod
    def make(cls, config: int) -> int:
        return config

    def _own(self) -> int:
        return 2


class Changed:
    """As the base class of another version."""

    def is_needed(self) -> bool:
        return True

    def start(self, step: int, **options: int) -> None:
        """As before."""

    def finish(self, request: str, blocks: list[int]) -> str:
        return f"{request} {blocks}"


class Unfinished(Base):
    """A connector without a hook that it must have."""


def test_the_same_interface_has_no_differences() -> None:
    """Further hooks of vLLM, and private methods of the connector, are no differences."""
    assert list(hook_differences(Connector, Base)) == []


def test_every_difference_is_named() -> None:
    """Hooks that are gone, have become something else, take other parameters, or must be provided, are named."""
    assert list(hook_differences(Unfinished, Base)) == ["the connector has no start, which vLLM needs"]
    assert list(hook_differences(Connector, Changed)) == [
        "finish has the parameters (self, request, blocks), not (self, request)",
        "is_needed is a function, not a property",
        "vLLM has no make, and does not call it",
    ]


def test_vllm_without_the_hooks_of_sleep_is_used() -> None:
    """They are needed only by a vLLM that sleeps, which is refused without them elsewhere."""

    class Sleeping(Connector):
        def unregister_kv_caches(self) -> None:
            """Before sleep."""

        def restore_kv_caches(self) -> None:
            """After it."""

    assert list(hook_differences(Sleeping, Base)) == []


def test_attributes_are_found_wherever_they_are_defined() -> None:
    """Attributes of a class, of its fields and of its constructor are found; others are named."""

    @dataclass
    class Fields:
        blocks: list[int]
        count: int = 0

    class Assigned:
        def __init__(self) -> None:
            self.blocks: list[int] = []

        @property
        def count(self) -> int:
            return 0

    for kind in (Fields, Assigned):
        assert list(missing_attributes(kind, frozenset({"blocks", "count"}))) == []
        assert list(missing_attributes(kind, frozenset({"gone", "blocks"}))) == [f"{kind.__name__} has no gone"]


def test_vllm_without_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are gone, and every difference, are in the refusal, with what to install."""
    monkeypatch.setattr(interface, "_BASE", "kvcached_client.vllm.no_such_module:Base")
    with pytest.raises(RuntimeError, match=r"(?s)vLLM 0\.99 is newer.*or an older vLLM\n- ModuleNotFoundError"):
        check_interface("0.99")
    here = __name__
    monkeypatch.setattr(interface, "_BASE", f"{here}:Base")
    monkeypatch.setattr(interface, "_CONNECTOR", f"{here}:Connector")
    monkeypatch.setattr(interface, "_PARTS", {f"{here}:Base": frozenset({"gone"})})
    with pytest.raises(RuntimeError, match="- Base has no gone"):
        check_interface("0.99")


def test_newer_vllm_with_the_interface_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer vLLM with the same interface is used, with one warning."""
    monkeypatch.setattr(interface, "check_interface", lambda _: None)
    for _ in range(2):
        kvcached_client.vllm._check_newer("0.99")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "newer than the versions" in caplog.text

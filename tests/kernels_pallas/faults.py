"""Faults in the source of kernels, which tests are to find."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# A module, what is in its source once, and what is to be there instead.
Fault = tuple[ModuleType, str, str]


def with_fault(fault: Fault) -> ModuleType:
    """Return a module again, with a fault in its source."""
    where, found, replacement = fault
    source = inspect.getsource(where)
    assert source.count(found) == 1, f"{found!r} is to be in the source once"
    faulty = ModuleType("faulty")
    exec(source.replace(found, replacement), faulty.__dict__)
    return faulty


def put_fault(fault: Fault, monkeypatch) -> None:
    """Have all kernels call what a module has with a fault in its source."""
    where, found, _ = fault
    faulty = with_fault(fault)
    users = [module for name, module in sys.modules.items() if name.startswith("kernels_pallas.")]
    for name, own in list(vars(where).items()):
        if getattr(own, "__module__", None) != where.__name__ or found not in inspect.getsource(own):
            continue
        if isinstance(own, type):
            # Its methods alone: others may ask for instances of the class. Those of a dataclass have no file.
            for method, function in list(vars(own).items()):
                is_written = inspect.isfunction(function) and _file_of(function) == where.__file__
                if is_written and found in inspect.getsource(function):
                    monkeypatch.setattr(own, method, vars(getattr(faulty, name))[method])
        else:
            for user in users:
                if getattr(user, name, None) is own:
                    monkeypatch.setattr(user, name, getattr(faulty, name))


def _file_of(function: Callable[..., Any]) -> str:
    """Return where a function is written, below what checks its types."""
    return inspect.unwrap(function).__code__.co_filename

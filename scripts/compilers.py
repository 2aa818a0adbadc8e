"""What scripts that compile for machines ask first; compiles nothing."""

from argparse import ArgumentParser
from collections.abc import Iterable

from jkv.targets import target


def check_compilers(parser: ArgumentParser, machines: Iterable[str]) -> None:
    """End a script in one sentence where a machine is unknown or its compiler is not installed.

    Compilers read their options from the environment here, when they are first loaded.
    """
    for machine in machines:
        try:
            target(machine)
        except (ModuleNotFoundError, ValueError) as error:
            parser.error(str(error))

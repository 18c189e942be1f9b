"""Why a run ends before its last stage, and its files, whose failing is one of the reasons."""

from __future__ import annotations

from collections.abc import Callable

from harness.errors import HarnessError, LocalFault
from harness.load.controller import Fleet
from harness.store import RunWriter


class Ending:
    """The first fault of a run, and how often it was interrupted. Both end its load in order."""

    def __init__(self) -> None:
        self.fault: HarnessError | None = None
        self.interrupts = 0
        #: that ends with the run; None before its load
        self.fleet: Fleet | None = None

    @property
    def over(self) -> bool:
        """No further stage may begin."""
        return self.fault is not None or self.interrupts > 0

    def give_up(self, fault: HarnessError) -> None:
        """End the run in order, for this reason unless there is one already."""
        self.fault = self.fault or fault
        if self.fleet is not None:
            self.fleet.abort()


class Files:
    """A run's folder, whose failing ends the run in order: it is written by listeners, where an exception would go unheard."""

    def __init__(self, writer: RunWriter, ending: Ending) -> None:
        self.writer = writer
        self._ending = ending
        self._cannot_write = False

    def append(self, write: Callable[[RunWriter], None]) -> None:
        """Write a line unless lines could not be written before."""
        if not self._cannot_write:
            self.write(write)

    def write(self, write: Callable[[RunWriter], None]) -> None:
        """Write a document."""
        try:
            write(self.writer)
        except LocalFault as fault:
            self._cannot_write = True
            self._ending.give_up(fault)

"""What this machine allows: open files. The only file that asks the operating system for its limits."""

from __future__ import annotations

import os

from harness.errors import UsageError

#: descriptors a process needs beside its streams: pipes, files, scrapes, the interpreter's own
SPARE_FILES = 64


def allow_open_files(streams: int) -> None:
    """Raise the soft limit on open files so that one process can hold ``streams`` connections; workers inherit it.

    Raises:
        UsageError: the hard limit is lower.
    """
    if os.name != "posix":
        return
    import resource

    needed = streams + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{streams} streams at once need {needed} open files, and this shell allows {hard} (ulimit -Hn)",
            f"raise the limit (ulimit -n {needed}, as an administrator) or ask for fewer users",
        )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{streams} streams at once need {needed} open files, this shell allows {soft} and refused more: {error}",
            f"ulimit -n {needed}",
        ) from error

"""``calibration.json`` on disk: read strictly, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from calibration.calibration_file import calibration_from_json, calibration_to_json
from calibration.errors import InputError
from harness.errors import LocalFault, UsageError

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration

NAME = "calibration.json"


def read_calibration(path: Path) -> Calibration:
    """The calibration of a file, or of a run's folder that holds one.

    Raises:
        UsageError: it is not there, cannot be read, is no JSON, or holds no calibration; names the file, the key and what
            was expected.
    """
    file = path / NAME if path.is_dir() else path
    try:
        content = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{file} is not there", "`vllm-harness calibrate` writes it") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{file} is no JSON: {error}", "expected what `vllm-harness calibrate` writes") from error
    try:
        return calibration_from_json(content)
    except InputError as error:
        raise UsageError(f"{file}: {error.message}", error.hint) from error


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file; what was there before stays until the new one is whole.

    Raises:
        LocalFault: it could not be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("wb") as stream:
            stream.write(
                orjson.dumps(calibration_to_json(calibration), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            )
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise LocalFault(f"{path} could not be written: {error.strerror or error}") from error

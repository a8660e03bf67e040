"""Files of workloads; what is wrong with them is said with file and line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_hcache.core.errors import ConfigError


def whole_characters(text: str) -> str:
    """``text``, in which half a character, such as of an emoji that was cut, is replaced: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Number, from 1, and value of each line that is not empty.

    Raises:
        ConfigError: the file cannot be read, or a line is not JSON.
    """
    try:
        # As bytes: a text may contain what Python takes for ends of lines and JSON does not.
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.removeprefix(codecs.BOM_UTF8).strip():
                    continue
                try:
                    yield number, json.loads(line)
                except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
                    raise ConfigError(f"--dataset: {file}, line {number}: not JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"--dataset: cannot read {file}: {error.strerror}") from None


def json_array(file: Path) -> list[tuple[int, Any]]:
    """Number, from 1, and value of each element of a file that holds one array.

    Raises:
        ConfigError: the file cannot be read, or is not such an array.
    """
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"--dataset: cannot read {file}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"--dataset: {file}, line {error.lineno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"--dataset: {file}: {error}") from None
    assert isinstance(values, list)
    return list(enumerate(values, start=1))

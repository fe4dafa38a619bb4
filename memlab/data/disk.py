"""JSON values kept in the user's cache folder; a folder that can't be used only means no cache."""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

log = logging.getLogger(__name__)


def cached_json(name: str, make: Callable[[], Any]) -> Any:
    """The JSON value in cache file `name`, else `make()`, written there for the next time.

    An unreadable or corrupt file is made anew. Written whole or not at all, so that two
    processes may do it at once.
    """
    path = Path(user_cache_dir("memlab")) / "data" / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = make()
    try:
        _write(path, json.dumps(value))
    except OSError as error:
        log.info("not cached: %s", error)
    return value


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise

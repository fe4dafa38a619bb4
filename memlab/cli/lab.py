"""memlab lab: JupyterLab on a copy of the lessons."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from memlab.cli.show import writing_to
from memlab.series import copy_series, find_lessons


def main(options: argparse.Namespace) -> int:
    with writing_to(options.folder):
        copied = copy_series(options.folder, solutions=options.solutions)
    if options.json:
        print(json.dumps({"folder": str(options.folder), **asdict(copied)}), flush=True)
    else:
        print(f"{options.folder}: {len(copied.written)} files written", file=sys.stderr)
        for name in copied.kept:
            print(f"{options.folder / name}: kept, as you changed it", file=sys.stderr)
    if options.copy_only:
        return 0
    try:
        return subprocess.run(
            jupyter_command(options.folder, browser=not options.no_browser),
            env={**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"},  # this environment's kernel first
            check=False,
        ).returncode
    except KeyboardInterrupt:
        return 0


def jupyter_command(folder: Path, *, browser: bool) -> list[str]:
    """JupyterLab on 127.0.0.1 only, opened at the first lesson."""
    first = next((lesson.path.name for lesson in find_lessons()), "")
    command = [
        *(sys.executable, "-m", "jupyterlab", str(folder), "--ServerApp.ip=127.0.0.1"),
        f"--LabApp.default_url=/lab/tree/{first}",
    ]
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # in a container there is often no other user
    return command

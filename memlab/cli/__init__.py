"""The command line: `memlab compare | estimate | doctor | run | lab`.

Each command's module is imported when it runs, so that `memlab --help` answers at once.
"""

import argparse
import errno
import re
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from memlab import __version__
from memlab.cli.leaving import leave
from memlab.errors import MemlabError

DEVICES = ("auto", "simulated", "cuda", "cpu")
EXAMPLES = """\
examples:
  memlab compare --model Qwen/Qwen3-1.7B --batch-size 4 --max-length 2048 \\
      --set loss_type=chunked_nll
  memlab estimate --model Qwen/Qwen3-8B --trainer dpo --batch-size 1
  memlab run 01 06            two lessons, and their rows of the table
  memlab lab ~/memory         JupyterLab on a copy of the lessons

exit status: 0 done, 1 a lesson failed, 2 it can't be done as asked (one line says what would work)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the returned exit status is 2 for an error that the user can act on."""
    options = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        status = import_module(f"memlab.cli.{options.command}").main(options)
        sys.stdout.flush()
        return status
    except (ValueError, TypeError, MemlabError) as error:
        return _refuse(str(error) or type(error).__name__)
    except OverflowError as error:
        return _refuse(f"a number is too large ({error}): give a smaller batch size or length")
    except BrokenPipeError:  # who read the output, such as `head`, has enough
        leave(128 + 13)
    except OSError as error:
        status = _refuse(_advice(error))
        try:
            sys.stdout.flush()
        except OSError:  # stdout itself is in trouble: a normal exit would tell it once more
            leave(status)
        return status
    except KeyboardInterrupt:
        print("memlab: stopped", file=sys.stderr)
        leave(130)


def _advice(error: OSError) -> str:
    """What the system said, of which path, and what would work."""
    reason = error.strerror or str(error) or type(error).__name__
    path = f"can't use {error.filename} ({reason})" if error.filename is not None else reason
    works = {
        errno.EISDIR: "it is a folder: move it away, or choose another folder to write into",
        errno.ENOSPC: "free space, or choose another folder",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENOMEM: "free memory, or give a smaller batch size or length",
    }
    return f"{path}: {works.get(error.errno or 0, 'choose another folder')}"


def _refuse(message: str) -> int:
    _say(message)
    return 2


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    _say(str(message))


def _say(message: str) -> None:
    print("memlab:", " ".join(message.split()), file=sys.stderr)  # exactly one line


class _Parser(argparse.ArgumentParser):
    """Refuses in one line what it can't read, with the nearest of the names that it knows."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but a command itself refuses the options that it doesn't know."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        known = [*self._option_string_actions, *self._commands()]
        words = re.findall(r"(?<![\w-])[\w-]+", message.partition("(choose from")[0])
        near = [
            name
            for word in words
            if word not in known
            for name in get_close_matches(word, known, n=1, cutoff=0.7)
        ]
        meant = f"; did you mean {' '.join(near)}?" if near else ""
        asked = self.prog if " " in self.prog else "memlab COMMAND"
        sys.exit(_refuse(f"{message}{meant} ({asked} --help tells more)"))

    def _commands(self) -> list[str]:
        kinds = (action for action in self._actions if action.dest == "command")
        return [name for action in kinds for name in action.choices or ()]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="memlab",
        description="Where the GPU memory of LLM post-training goes, what each technique saves:\n"
        "measured on a CUDA card, or on an exact simulation of one where there is none.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"memlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    compare = _command(commands, "compare", "the memory of a training step, before and after")
    _recipe_options(compare)
    compare.add_argument(
        "--before",
        choices=("off", "defaults"),
        default="off",
        help="what the switches are set upon: every technique off, or TRL's defaults (with "
        "checkpointing and the chunked loss); default: off. Without --set, off is compared with "
        "defaults",
    )

    estimate = _command(
        commands, "estimate", "the peak memory of a training step, and which cards fit"
    )
    _recipe_options(estimate)
    estimate.add_argument(
        "--base",
        choices=("off", "defaults"),
        default="defaults",
        help="what the switches are set upon; default: defaults, TRL's",
    )

    _command(commands, "doctor", "what is installed here, and what is in the way")

    run = _command(
        commands, "run", "execute the lessons, print the table of savings, write a report"
    )
    run.add_argument("lessons", nargs="*", metavar="LESSON", help='such as "06"; default: all')
    run.add_argument(
        "--output",
        type=Path,
        default=Path("memlab-report"),
        metavar="DIR",
        help="folder for the executed lessons and report.html; default: memlab-report",
    )
    _device_option(run)

    lab = _command(commands, "lab", "open JupyterLab on a copy of the lessons")
    lab.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("memlab-lessons"),
        metavar="FOLDER",
        help="where the copy goes, default: memlab-lessons; a file that you changed is never "
        "overwritten",
    )
    lab.add_argument(
        "--solutions",
        action="store_true",
        help="keep the outputs, the solutions and the instructors' notes",
    )
    lab.add_argument("--no-browser", action="store_true", help="print the address, open no browser")
    lab.add_argument("--copy-only", action="store_true", help="copy the lessons, start nothing")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, does: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=does, description=does[0].upper() + does[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    return parser


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help="a preset by its hub name; default: Qwen/Qwen3-0.6B"
    )
    parser.add_argument(
        "--trainer",
        metavar="NAME",
        help="sft (default), dpo, reward, kto, grpo, rloo, online_dpo or gkd",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="what a micro-batch holds, counted as in TRL: rows; pairs (dpo, reward), completions "
        "(grpo, rloo), prompts (online_dpo)",
    )
    parser.add_argument("--max-length", metavar="T", help="tokens in a row, or none: cut nothing")
    parser.add_argument(
        "--dataset",
        metavar="DATA",
        help="the rows: full (default), each of max-length tokens; prompt_completion or chat, of "
        "unequal length; with sft also docstrings and chat_like, which have no prompts",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="switches",
        metavar="SWITCH=VALUE",
        help="a switch under TRL's name, such as gradient_checkpointing=true; may be repeated",
    )
    _device_option(parser)


def _device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="default: a CUDA card, else simulated; cpu "
        "computes the steps here, for tiny models only",
    )

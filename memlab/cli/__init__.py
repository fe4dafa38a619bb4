"""The command line: `memlab compare | estimate | doctor | run | lab`.

Each command's module is imported when it runs, so that `memlab --help` answers at once.
"""

import argparse
import errno
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from memlab import __version__
from memlab.errors import MemlabError

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)
DEVICES = ("auto", "simulated", "cuda", "cpu")
EXAMPLES = """\
examples:
  memlab compare --model Qwen/Qwen3-1.7B --batch-size 4 --max-length 2048 \\
      --set loss_type=chunked_nll
  memlab estimate --model Qwen/Qwen3-8B --set per_device_train_batch_size=1
  memlab run 01 06            two lessons, and their rows of the table
  memlab lab ~/memory         JupyterLab on a copy of the lessons

exit status: 0 done, 1 a lesson failed, 2 it can't be done as asked (one line says what would work)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the returned exit status is 2 for an error that the user can act on."""
    options = _parser().parse_args(argv)
    try:
        return import_module(f"memlab.cli.{options.command}").main(options)
    except (ValueError, TypeError, MemlabError) as error:
        return _refuse(str(error) or type(error).__name__)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return _refuse(f"can't write {error.filename} ({error.strerror}): choose another folder")
    except KeyboardInterrupt:
        print("memlab: stopped", file=sys.stderr)
        return 130


def _refuse(message: str) -> int:
    print("memlab:", " ".join(message.split()), file=sys.stderr)  # exactly one line
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
    parser.add_argument("--batch-size", type=int, metavar="B", help="rows in a micro-batch")
    parser.add_argument("--max-length", type=int, metavar="T", help="tokens in a row")
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
        "--device", choices=DEVICES, default="auto", help="default: a CUDA card, else simulated"
    )

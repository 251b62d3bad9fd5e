"""The command line: `outsize train | report | generate | plan | probe | checkpoint`. `import outsize` leaves it out."""

import argparse
import io
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import outsize
from outsize.cli.terminal import leave, open_closed, terminals
from outsize.cli.wording import in_options

_EXTRA = {"accelerate", "transformers", "tokenizers", "safetensors", "rich", "matplotlib"}
"""What the extra `train` brings."""
_ROOMS = {
    "train": "options",
    "report": "reporting",
    "generate": "generating",
    "plan": "planning",
    "probe": "probe",
    "checkpoint": "checkpoints",
}
"""The module of each sub-command. They import torch, which takes seconds that Ctrl-C may end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; 0 when it went well, 1 where it found or left something broken, 2 after a mistake (one line
    on stderr), 130 after Ctrl-C, 143 after SIGTERM and 129 where the terminal closed, which end it in the same way. 141
    where nobody reads what it says any more, as `head` does not: without a word."""
    open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is no reason to fail; stderr is so already
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else list(argv)
    code = 130
    # Only the main thread may set a handler, and one that somebody has chosen stays, as that of nohup.
    main_thread = threading.current_thread() is threading.main_thread()
    handled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    handled, open_terminals = handled if main_thread else [], terminals()

    def end(number: int, frame: object) -> None:
        nonlocal code
        code = 128 + number
        if number == signal.SIGHUP:  # the kernel says it, and the shell once more
            signal.signal(number, signal.SIG_IGN)
            leave(open_terminals)
        else:
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        raise KeyboardInterrupt

    for each in handled:
        signal.signal(each, end)
    try:
        args = build_parser().parse_args(words)
        args.words = words[1:]
        status: int = _room(args.command).run(args)
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return _fail("interrupted", code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        return _fail(f"outsize {args.command} needs {package}: pip install {package}")
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except UnicodeEncodeError as error:  # a path: what is written replaces what its encoding lacks
        return _fail(f"{error.object!r} is not UTF-8, which files of a model need: give another path")
    except (ValueError, TypeError, OSError) as error:
        logging.getLogger("outsize").debug("outsize %s failed", words, exc_info=True)
        return _fail(str(error) or type(error).__name__)
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
        try:
            print(end="", flush=True)
        except OSError:  # told above; the interpreter would try once more
            leave([1])


def _room(command: str) -> Any:
    return import_module(f"outsize.cli.{_ROOMS[command]}")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="outsize", description="Train PyTorch models whose training state is larger than memory.")
    parser.add_argument("--version", action="version", version=f"outsize {outsize.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _ROOMS:
        room = _room(name)
        command = commands.add_parser(name, help=room.SUMMARY, description=room.DESCRIPTION, formatter_class=_Help)
        room.add_arguments(command)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        print(end="", flush=True)  # the help or the version: an error of it is told as every other
        super().exit(status, message)


class _Help(argparse.HelpFormatter):
    """Adds the default to the help of an option, where there is one and the text does not tell it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        told = "(default" in text or action.default in (None, (), argparse.SUPPRESS)
        return text if told else f"{text} (default: %(default)s)"


def _fail(message: str, code: int = 2) -> int:
    line = " ".join(in_options(message).split())
    print(f"outsize: {line}", file=sys.stderr)
    return code

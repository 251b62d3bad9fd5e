"""The library's messages speak of keywords of Python; here they come to speak of options of the command line."""

import re

_FIELDS = ("device", "device_memory", "host_memory", "disk", "disk_space", "stage", "ranks")
_CHOICES = ("params", "grads", "states", "activations", "state_format", "delayed_update")
_OPTIONS = {name: "--" + name.replace("_", "-") for name in (*_FIELDS, *_CHOICES)} | {"compute_dtype": "--dtype"}
_NAMES = "|".join(sorted(_OPTIONS, key=len, reverse=True))
_LONG = "|".join(name for name in _OPTIONS if "_" in name)  # no other word reads like these
_SENTENCES = (  # what the command line has another remedy for, or none
    (
        r"is of another model: .*?\. Load it into the model that was saved.*?(?=\. Nothing)",
        "is of another model; give the --model that it was saved with",
    ),
    (
        r"Build the optimizer as it was .*?outsize\.load\(path, model\)",
        "Give the options that it was saved with, or leave them out",
    ),
    (r"optimizer\.step\(\): ", ""),
    (r"Call zero_grad\(\) and go on with another batch, or lower the learning rate", "Lower the learning rate (--lr)"),
    (r"delayed_update=True", "--delayed-update"),
)


def in_options(message: str) -> str:
    """`message` with `host_memory=1.0 GiB` as `--host-memory 1.0 GiB`, and so on."""
    if message.startswith("cluster "):  # of a file, whose fields have names of their own
        return message
    for python, words in _SENTENCES:
        message = re.sub(python, words, message)
    message = re.sub(r"\blet (params|grads|states) be '(\w+)'", r"use --\1 \2", message)
    message = re.sub(rf"(?<![\w./-])({_NAMES})=(?:'([^']*)')?", _assignment, message)
    message = re.sub(rf"(?<![\w./-])({_LONG})(?![\w./-])", _name, message)
    return re.sub(rf"^({_NAMES})(?= is )", _name, message)


def _name(match: re.Match[str]) -> str:
    return _OPTIONS[match[1]]


def _assignment(match: re.Match[str]) -> str:
    quoted = match[2]
    return f"{_OPTIONS[match[1]]} {quoted or ''}" if quoted or match.end() < len(match.string) else _name(match)

"""The `jkv` command: finds the verb, and turns what goes wrong into one line and an exit code.

Each verb is a module that is imported when it runs, with `run(argv)` and a plain function that does the work.
"""

import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jkv import __version__
from jkv.config.errors import did_you_mean

VERBS = {
    "generate": "continue a prompt or answer a chat message",
    "score": "give the log-probability of a text",
    "inspect": "show a checkpoint's architecture, sizes and bytes",
    "bench": "measure prefill and decode",
    "calibrate": "measure the scales of the static codecs on a text",
    "tokenize": "show a text's tokens",
    "convert": "give a model fewer KV heads, or latents",
    "uptrain": "train a model, converted or not, on a text",
    "plan": "show what a cache costs and how many sequences fit",
    "check": "print a resolved configuration and what follows from it",
}
_LESS = "lower the batch, the tokens or --capacity, or store the cache smaller with --codec"
USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code: 0, 2 for what the user can mend, 130 interrupted.

    Args:
        argv: arguments after the program's name; None takes the process's.
    """
    verb, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if verb in ("-h", "--help"):
        print(_help())
        return 0
    if verb == "--version":
        print(f"jkv {__version__}")
        return 0
    if verb not in VERBS:
        known = did_you_mean(verb, VERBS) or f"; known: {', '.join(VERBS)}"
        return _fail(f"{verb!r} is not a verb{known}")
    _keep_programs()
    _give_threads()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a terminal cannot show is spelled out; the output would end there otherwise.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        importlib.import_module(f"jkv.cli.{verb}").run(rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone; Python would say so again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError as error:
        return _fail(f"the machine must have enough memory, got none for what is asked ({error}); {_LESS}")
    except RuntimeError as error:
        # JAX's own class would need JAX, which most verbs load late.
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        reason = str(error).removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]
        return _fail(f"the device must have enough memory, got: {reason.rstrip('.')}; {_LESS}")
    except UnicodeEncodeError:
        return _fail("text must be UTF-8, got other bytes in an argument")
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        return _fail(str(error))
    return 0


def _help() -> str:
    lines = [f"  {verb:10}{purpose}" for verb, purpose in VERBS.items()]
    return "\n".join(["usage: jkv VERB [OPTIONS]", "", *lines, "", "jkv VERB --help shows a verb's options."])


def _fail(message: str) -> int:
    print("\n".join(f"jkv: {line}" for line in message.splitlines()), file=sys.stderr)
    return USAGE_ERROR


def _give_threads() -> None:
    """Let CPU devices that XLA_FLAGS asks for have threads beside those in which they wait for each other.

    With one a device a large product of the last one waits forever for threads that wait for it.
    """
    asked = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if asked:
        os.environ.setdefault("NPROC", str(4 * int(asked[1])))


def _keep_programs() -> None:
    """Keep compiled programs between runs, in $JKV_CACHE; `off` keeps none. JAX reads this when it loads."""
    folder = os.environ.get("JKV_CACHE", str(Path.home() / ".cache" / "jkv" / "xla"))
    if folder == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"compiled programs cannot be kept in {folder} ({error.strerror})"
        _fail(f"{reason}; set JKV_CACHE to a folder that can be written, or to off")
    else:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

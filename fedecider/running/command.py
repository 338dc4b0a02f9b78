"""A command from its work to its exit code.

0: done. 1: the run diverged. 2: bad input, or work that did not fit into the memory, said in one line on stderr (what
was got, what was expected, what to do). 130: interrupted.
Set FEDECIDER_TRACEBACK=1 to see where an input error was raised.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from fedecider.bounds import Diverged, is_out_of_memory

INPUT_ERRORS = (ValueError, OSError, EOFError, ImportError, SafetensorError)
_PLACE = "expected a place that this user may read and write. Choose another one, or change its rights"
_ROOM = "expected room. Make some, and start again (a run that was begun: --resume true)"
ADVICE = {
    errno.ENOSPC: _ROOM,
    getattr(errno, "EDQUOT", errno.ENOSPC): _ROOM,
    errno.EACCES: _PLACE,
    errno.EPERM: _PLACE,
    errno.EROFS: "expected a place that may be written. Choose another one, or copy the folder to where it may be",
    errno.ENOTDIR: "expected a folder. Choose another place, or remove the file",
    errno.EEXIST: "expected a free place. Choose another one, or remove the file",
    errno.EISDIR: "expected a file. Choose another one",
    errno.ENOENT: "expected it to be there. Check the path",
    errno.EPIPE: "expected somebody to read the output",
}
"""What to do about an error of the system."""


def run(function: Callable[[], Any]) -> int:
    """Call ``function`` and turn input errors and a full memory into one line on stderr and an exit code."""
    _quiet_libraries()
    try:
        function()
    except (*INPUT_ERRORS, MemoryError, RuntimeError) as error:
        full = is_out_of_memory(error)
        if os.environ.get("FEDECIDER_TRACEBACK") == "1" or not (full or isinstance(error, INPUT_ERRORS)):
            raise
        if number := re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None:
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        text = _of_system(error) if isinstance(error, OSError) and error.errno else str(error) or type(error).__name__
        print(f"error: {_out_of_memory(text) if full else _one_line(text)}", file=sys.stderr)
        return 1 if isinstance(error, Diverged) else 2
    except KeyboardInterrupt as error:
        print(f"interrupted{f'; {error}' if str(error) else ''}", file=sys.stderr)
        return 130
    return 0


def _of_system(error: OSError) -> str:
    """``got a full disk``, in the system's words, with the file and what to do."""
    advice = ADVICE.get(error.errno or 0)
    if not advice or not error.strerror:
        return str(error)
    return f"got {error.strerror.lower()!r}{f' for {error.filename}' if error.filename else ''}, {advice}"


def _out_of_memory(text: str) -> str:
    return (
        f"out of memory ({_one_line(text, 200)}), expected work that fits. Take fewer items or users, or lower "
        "batch_size, embedding_size or memory_gb (cross-device: smaller blocks, large tables in files); of a language "
        "model also pretrain.train.batch_size, pretrain.samples.max_source_tokens, eval_batch_size or num_beams"
    )


def _one_line(text: str, length: int = 1000) -> str:
    text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in " ".join(text.split()))
    return text if len(text) <= length else f"{text[:length]} ..."


def _quiet_libraries() -> None:
    """No bars for loading files of a few megabytes, and no warning that only a library's authors can act on."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers when it is imported
    if "transformers" in sys.modules:  # importing it takes seconds, and the cross-device track does without
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)

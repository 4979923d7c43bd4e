"""How a loop was left, as its closing generator sees it: on purpose (``break``, ``return`` …), or perhaps by an error.

Inside of ``close()`` nothing in Python's API tells ``break`` from ``raise``. The instruction that the closing frame is
at does: an iterator that is let go by ``break`` is let go by another instruction than one that an exception unwinds.
Where that leaves a doubt, it is an error.
"""

from __future__ import annotations

import dis
import gc
import inspect
from types import FrameType, TracebackType

_LETS_GO = {  # of what it holds, and never raises
    "POP_TOP",  # break, and return in a loop
    "POP_ITER",
    "END_FOR",
    "STORE_FAST",  # another value for the variable
    "STORE_NAME",
    "STORE_GLOBAL",
    "STORE_DEREF",
    "DELETE_FAST",
    "DELETE_NAME",
    "DELETE_GLOBAL",
    "DELETE_DEREF",
    "RETURN_VALUE",
    "RETURN_CONST",
}
_ENDS = "FOR_ITER"  # of zip or islice, which were the first to end; or an error of another iterator in them
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "PRECALL")


def on_purpose(frame: FrameType | None) -> bool:
    """Whether a generator that is being closed is let go without any error, so that code after the loop goes on.

    Args:
        frame: What closes it.
    """
    while frame is not None and _is_closed(frame):
        frame = frame.f_back
    if frame is None:
        return False
    name, is_inside = _instruction(frame)
    if name in _CALLS:
        return is_inside  # a function of the script has returned, and what it held is let go
    return name in _LETS_GO or (name == _ENDS and not _raises(frame))


def _is_closed(frame: FrameType) -> bool:
    """Whether it is that of a generator around this one, which is being closed as well."""
    return bool(inspect.CO_GENERATOR & frame.f_code.co_flags) and _instruction(frame)[0] == "YIELD_VALUE"


def _instruction(frame: FrameType) -> tuple[str, bool]:
    """What a frame is at, and whether it is past its beginning: a function was called, and has returned."""
    found = ""
    for each in dis.get_instructions(frame.f_code, show_caches=True):
        if each.opname != "CACHE":
            found = each.opname
        if each.offset == frame.f_lasti:
            return found, each.opname == "CACHE"
    return "", False


def _raises(frame: FrameType) -> bool:
    """Whether an error is on its way through a frame: its traceback knows the frame then."""
    return any(type(each) is TracebackType for each in gc.get_referrers(frame))

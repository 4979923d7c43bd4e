"""How a training loop was left: on purpose, so that the script surely goes on after it, or in doubt, as by an error.

Inside of a generator's ``close()`` nothing in Python's API tells ``break`` from ``raise``. The instruction that the
closing frame is at does: an iterator that is let go by ``break`` is let go by another instruction than one that an
exception unwinds. The instructions are those of CPython 3.11 to 3.14; what another version does is in doubt.
"""

from __future__ import annotations

import dis
import gc
import inspect
from collections.abc import Sequence
from types import FrameType, TracebackType

_LETS_GO = {  # instructions that let go of an iterator, and never raise
    "POP_TOP",  # break, and return in a loop
    "POP_ITER",
    "END_FOR",
    "STORE_FAST",  # another value for the variable
    "STORE_FAST_STORE_FAST",
    "STORE_FAST_LOAD_FAST",
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
_REPLACES = {"STORE_ATTR": 2, "DELETE_ATTR": 1, "STORE_SUBSCR": 3, "DELETE_SUBSCR": 2}  # what may raise; its operands
_LOADS = {  # instructions that load what a variable or the code keeps; how many values
    "LOAD_CONST": 1,
    "LOAD_SMALL_INT": 1,
    "LOAD_FAST": 1,
    "LOAD_FAST_BORROW": 1,
    "LOAD_FAST_LOAD_FAST": 2,
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": 2,
    "STORE_FAST_LOAD_FAST": 1,
    "LOAD_NAME": 1,
    "LOAD_GLOBAL": 1,
    "LOAD_DEREF": 1,
}
_ENDS = "FOR_ITER"  # at the end of zip or islice, or at an error of another iterator in them
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "PRECALL")
_CLOSED = ("YIELD_VALUE", "CLEANUP_THROW")  # where a generator is while it is being closed


def on_purpose(frame: FrameType | None) -> bool:
    """Whether a generator that is being closed is let go without any error, so that code after the loop goes on.

    Where there is a doubt, it is an error. From CPython 3.13 on, a return from the function whose variable was the
    iterator is in doubt.

    Args:
        frame: The frame that closes the generator.
    """
    while frame is not None and _is_closed(frame):
        frame = frame.f_back
    if frame is None:
        return False
    found = _instructions(frame)
    name = found[-1].opname if found else ""
    if name in _CALLS:  # a function of the script has returned, and its variables are let go
        return frame.f_lasti > found[-1].offset  # at the caches of the call, as until CPython 3.12
    if name in _REPLACES:
        return _keeps_operands(found)
    return name in _LETS_GO or (name == _ENDS and not _raises(frame))


def _is_closed(frame: FrameType) -> bool:
    """Whether the frame belongs to a generator around this one, which is being closed as well."""
    is_generator = bool(inspect.CO_GENERATOR & frame.f_code.co_flags)
    return is_generator and any(each.opname in _CLOSED for each in _instructions(frame)[-1:])


def _instructions(frame: FrameType) -> list[dis.Instruction]:
    """The code of a frame, up to the instruction at which it is."""
    return [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]


def _keeps_operands(found: Sequence[dis.Instruction]) -> bool:
    """Whether variables or constants keep all that the last instruction has taken from the stack.

    If so, what is let go is what the instruction has replaced, and it has not raised. Otherwise it may be an operand of
    an instruction that has raised, which Python lets go of before any traceback knows of the error.
    """
    missing, is_joined = _REPLACES[found[-1].opname], False  # whether the code may have come here from elsewhere
    for before, each in zip(reversed(found[:-1]), reversed(found), strict=False):
        is_joined |= bool(each.is_jump_target)
        if before.opname != "EXTENDED_ARG":
            if is_joined or before.opname not in _LOADS:
                return False
            missing -= _LOADS[before.opname]
            if missing <= 0:
                return True
    return False


def _raises(frame: FrameType) -> bool:
    """Whether an error is on its way through a frame: its traceback knows the frame then."""
    return any(type(each) is TracebackType for each in gc.get_referrers(frame))

"""All checks of one machine, in a process of its own: prints its findings as JSON, and ends with its parent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from hocket.lab.doctor import leftover_check, machine_check, software_check
from hocket.lab.doctor.findings import Finding, wrong

_TORCH = 45.0  # seconds for its import, which a cold network disk makes slow


def look(folder: str, interface: str | None, is_here: bool) -> list[Finding]:
    """Look at everything; a check that fails itself is a finding too."""
    torch = software_check.TorchImport()  # takes a second or two, so it begins first
    families: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("software", software_check.packages),
        ("torch", lambda: software_check.judge_torch(torch.facts(_TORCH))),
        ("shared memory", machine_check.limits),
        ("cores", machine_check.cores),
        ("clock", lambda: [machine_check.clock(folder)]),
        ("host name", lambda: machine_check.network(interface)),
        ("leftovers", lambda: leftover_check.check(folder, is_here)),
    ]
    found: dict[str, list[Finding]] = {}
    # The exchange over shared memory forks, so it comes before threads; torch comes last, while others are looked at.
    for name in ("shared memory", "software", "cores", "clock", "leftovers", "host name", "torch"):
        try:
            found[name] = dict(families)[name]()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            found[name] = [wrong(name, f"could not be looked at: {reason}", "tell the authors of Hocket what it says")]
    return [finding for name, _ in families for finding in found[name]]


def main() -> None:
    """The arguments are the folder, the interface (or nothing), and whether records are written here."""
    folder, interface, is_here = sys.argv[1:]
    findings = look(folder, interface or None, is_here == "here")
    sys.stdout.write("\n" + json.dumps([finding.plain() for finding in findings]) + "\n")


if __name__ == "__main__":
    main()

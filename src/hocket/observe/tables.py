"""The tables of a run's record; ``docs/observe.md`` explains them to whoever reads them without Hocket."""

from __future__ import annotations

FILE = "run.sqlite"
VERSION = 2  # goes up when a table changes; kept in PRAGMA user_version

TABLES = {
    # One row each, the value as JSON. Sections: run, settings, versions, host, hosts, told (by the workers), began
    # (what each rank had waited when its training began), sent (bytes, by rank), servers (a summary), served (the last
    # that each server has told).
    "facts": "section TEXT, name TEXT, value TEXT, PRIMARY KEY (section, name)",
    # How far rank 0 was; what is a rate or a share is of the time since the row before, NULL in the first.
    "steps": (
        "time REAL, epoch INTEGER, step INTEGER, total INTEGER, seen INTEGER, "
        "seconds REAL, samples_per_second REAL, waiting REAL, communication REAL"
    ),
    # What the script has reported on rank 0, and the bytes that this rank had handed to exchanges by then; SQLite has
    # no NaN, so NULL stands for it.
    "metrics": "step INTEGER, samples INTEGER, time REAL, name TEXT, value REAL, sent INTEGER",
    # Details as JSON; rank NULL is the launcher, or the server that the details name.
    "events": "time REAL, rank INTEGER, name TEXT, details TEXT",
    # The last that each rank has told of itself, in seconds since it started.
    "ranks": "rank INTEGER PRIMARY KEY, time REAL, waited REAL, exchanging REAL",
    # At most one row; none while the run goes on, or if the launcher was killed.
    "exit": "time REAL, status INTEGER, reason TEXT, seconds REAL",
}

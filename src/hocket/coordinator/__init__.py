"""The coordinator of a job: knows who is alive, holds meetings, and deals out batches; without torch."""

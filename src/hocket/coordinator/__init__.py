"""Who is in the job: one ledger of the living, meetings, batches dealt out. No torch here."""

"""What stands beside training: tools that run jobs, look at hosts, and read records."""

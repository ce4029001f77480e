"""What the user of the load generator asked for and cannot have."""


class BenchError(ValueError):
    """Bad input: one line that names the value, the limit and what to do."""

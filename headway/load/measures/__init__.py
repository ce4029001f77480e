"""Makes numbers that can be defended from the records of requests."""

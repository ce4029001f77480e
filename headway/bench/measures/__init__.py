"""From records of requests to numbers that can be defended."""

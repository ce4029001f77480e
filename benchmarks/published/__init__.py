"""Measurements that others published, with their sources, and what the cost model says of the same deployments."""

"""The load generator: arrivals and workloads, the client, statistics, reports."""

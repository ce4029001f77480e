"""Sends a workload to an OpenAI-compatible server and notes when each token came."""

"""Measures the most that this machine can do, in a process of its own (`python -m headway.calibration`)."""

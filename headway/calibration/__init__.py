"""What this machine can do at most: measured, in a process of its own (`python -m headway.calibration`)."""

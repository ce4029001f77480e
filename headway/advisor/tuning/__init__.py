"""Tuning: candidates ranked by simulation, tried live in pairs, and kept where they are proven."""

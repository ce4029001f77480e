"""Writes a checkpoint with rounded matrices: `headway quantize`."""

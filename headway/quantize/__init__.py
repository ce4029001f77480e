"""From a checkpoint to one whose matrices are rounded: `headway quantize`."""

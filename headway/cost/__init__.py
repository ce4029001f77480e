"""What physics allows: from a model's shape to FLOPs, bytes, memory and the least time that they take."""

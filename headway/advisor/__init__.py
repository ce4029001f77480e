"""The advisor: what slows a running server down, what to change about it, and how to see that it helped."""

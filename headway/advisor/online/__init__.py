"""Online tuning: a server that changes its own settings, one at a time, as long as that is proven to help."""

"""What to expect of a model on hardware before either is there: `headway plan`."""

"""`python -m headway` is the same as `headway`."""

from headway.cli import main

main()

"""`python -m autoshard`: the command line."""

from autoshard.cli import main

main()

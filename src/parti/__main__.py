"""`python -m parti`."""

from parti.cli import main

main()

"""`python -m cedar` is the `cedar` command."""

from cedar.cli.main import main

main()

"""`python -m fixpoint`: the command line."""

from fixpoint.cli import main

if __name__ == "__main__":
    main()

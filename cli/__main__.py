"""`python -m staleflow.cli` is the `staleflow` command."""

from staleflow.cli.main import main

if __name__ == "__main__":
    main()

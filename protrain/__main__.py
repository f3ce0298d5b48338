"""`python -m protrain` is the command line."""

from protrain.cli.main import main

if __name__ == "__main__":
    main()

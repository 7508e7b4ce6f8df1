"""The command line as `python -m stratafl`."""

from stratafl.cli.main import main

if __name__ == "__main__":
    main()

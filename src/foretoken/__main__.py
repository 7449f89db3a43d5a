"""The command line, as `python -m foretoken`."""

from foretoken.cli.main import main

if __name__ == "__main__":
    main()

"""The command line: `foretoken`, and `python -m foretoken`."""

import sys


def main() -> None:
    """Run the command line of this process; an interrupt ends it with exit code 130, while it is imported as well."""
    if sys.flags.optimize > 1:
        print(
            "foretoken: Python's -OO drops the texts of --help: leave it out, or unset PYTHONOPTIMIZE.", file=sys.stderr
        )
        sys.exit(2)
    try:
        from foretoken.cli.main import main as run  # takes a part of a second

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would be printed and forgotten as Python ends


if __name__ == "__main__":
    try:
        main()
    finally:
        # After an interrupt within text that `exec` runs, as it does for dataclasses, `python -m` ends by the signal
        # and not with our exit code, even where the interrupt was caught; unless later text runs to its end.
        exec("")

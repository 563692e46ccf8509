"""`python -m kvlab`: the command behind the make targets."""

import argparse
import sys

from kvlab import doctor, params


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 1 where a part of the report failed, 2 for parameters that cannot be used, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="kvlab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("report", help="measure what a profile lacks and write its page")
    command.add_argument("--profile", default="cpu", help="name of a file in params/, or auto (default: %(default)s)")
    command.add_argument(
        "--set", action="append", default=[], metavar="name=value", help="override a parameter"
    )
    examined = commands.add_parser("doctor", help="say whether this machine can run a profile, and what it lacks")
    examined.add_argument("--profile", default="cpu", help="name of a file in params/ (default: %(default)s)")
    asked = parser.parse_args(arguments)
    if asked.command == "doctor":
        return doctor.doctor(asked.profile)
    try:
        from kvlab import report  # after the arguments: it loads the notebook machinery

        return report.report(doctor.chosen(asked.profile), asked.set)
    except (params.ParameterError, report.RunInProgress) as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    except (FileExistsError, NotADirectoryError, FileNotFoundError, PermissionError) as error:
        print(f"kvlab: cannot write results: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nkvlab: stopped; everything measured so far is recorded, the same command goes on",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())

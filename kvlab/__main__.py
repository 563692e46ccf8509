"""`python -m kvlab`: the command behind the make targets."""

import argparse
import sys

from kvlab import params


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 1 where a part of the report failed, 2 for parameters that cannot be used, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="kvlab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("report", help="measure what a profile lacks and write its page")
    command.add_argument("--profile", default="cpu", help="name of a file in params/ (default: %(default)s)")
    command.add_argument(
        "--set", action="append", default=[], metavar="name=value", help="override a parameter"
    )
    _add_predict(commands)
    asked = parser.parse_args(arguments)
    if asked.command == "predict":
        return _predict(asked)
    try:
        from kvlab import report  # after the arguments: it loads the notebook machinery

        return report.report(asked.profile, asked.set)
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


def _add_predict(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("predict", help="what a model would take on a machine, without measuring")
    command.add_argument("--model", required=True, help="a well-known model's name, or what a profile's `model` takes")
    command.add_argument("--machine", required=True, help="a card such as a10 or h200, or a profile that was measured")
    command.add_argument("--dtype", default="bfloat16", help="of weights and cache (default: %(default)s)")
    command.add_argument("--attention", default="sdpa", choices=("eager", "sdpa", "flash_attention_2"))
    for name, default in (("context", 1024), ("output", 128), ("concurrency", 1)):
        command.add_argument(f"--{name}", type=int, default=default, metavar="N", help="(default: %(default)s)")


def _predict(asked: argparse.Namespace) -> int:
    from kvlab import whatif

    size = (asked.context, asked.output, asked.concurrency)
    try:
        print("\n".join(whatif.lines(asked.model, asked.machine, asked.dtype, *size, asked.attention)))
    except (ValueError, OSError) as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvlab`: the command behind the make targets."""

import argparse
import ctypes
import errno
import os
import signal
import sys
import warnings

from kvlab import doctor, params

PR_SET_PDEATHSIG = 1
ASKED = {"dtype": "bfloat16", "attention": "sdpa", "context": 1024, "output": 128, "concurrency": 1}  # of predict


def end_with_parent(parent_pid: str) -> None:
    """Have Linux end this process when make is killed, so that none goes on that nobody started."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if parent_pid else None
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != parent_pid:  # it died before it could be watched
            sys.exit(128 + signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 1 where a part of the report failed, 2 for parameters that cannot be used, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="kvlab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("report", help="measure what a profile lacks and write its page")
    command.add_argument("--profile", default="cpu", help="name of a file in params/, or auto (default: %(default)s)")
    command.add_argument("--set", action="append", default=[], metavar="name=value", help="override a parameter")
    command = commands.add_parser("compare", help="set two profiles' runs side by side in a small page")
    command.add_argument("profiles", nargs=2, metavar="profile")
    command = commands.add_parser("race", help="write the recorded long generation, both arms, as an animated picture")
    command.add_argument("--profile", default="cpu", help="name of a file in params/ (default: %(default)s)")
    examined = commands.add_parser("doctor", help="say whether this machine can run a profile, and what it lacks")
    examined.add_argument("--profile", default="cpu", help="name of a file in params/ (default: %(default)s)")
    _add_predict(commands)
    asked = parser.parse_args(arguments)
    warnings.formatwarning = lambda message, *_, **__: f"kvlab: {message}\n"
    end_with_parent(os.environ.pop("KVLAB_PARENT", ""))
    if asked.command == "doctor":
        return doctor.doctor(asked.profile)
    if asked.command == "predict":
        return _predict(asked)
    try:
        from kvlab import report  # after the arguments: it loads the notebook machinery

        if asked.command == "compare":
            return report.compare(*asked.profiles)
        if asked.command == "race":
            return report.race(asked.profile)
        return report.report(doctor.chosen(asked.profile), asked.set)
    except (params.ParameterError, doctor.Finding, report.RunInProgress, report.NotComparable) as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        mend = "free some space, the same command goes on" if full else "make it writable or set KVLAB_OUTPUT"
        print(f"kvlab: cannot write results: {error.strerror}: {error.filename or 'a file'}; {mend}", file=sys.stderr)
        return 1 if full else 2
    except KeyboardInterrupt:
        print("\nkvlab: stopped; everything measured so far is recorded, the same command goes on", file=sys.stderr)
        return 130


def _add_predict(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("predict", help="what a model would take on a machine, without measuring")
    command.add_argument("--profile", help="instead of all that follows: how long measuring this profile takes")
    command.add_argument("--set", action="append", default=[], metavar="name=value", help="with other parameters")
    command.add_argument("--model", help="a well-known model's name, or what a profile's `model` takes")
    command.add_argument("--machine", help="a card such as a10 or h200, or a profile that was measured")
    command.add_argument("--dtype", help="of weights and cache (default: {dtype})".format(**ASKED))
    command.add_argument("--attention", choices=("eager", "sdpa", "flash_attention_2"))
    for name in ("context", "output", "concurrency"):
        command.add_argument(f"--{name}", type=int, metavar="N", help=f"(default: {ASKED[name]})")


def _predict(asked: argparse.Namespace) -> int:
    from kvlab import whatif

    case = {name: value for name in ("model", "machine", *ASKED) if (value := getattr(asked, name)) is not None}
    try:
        if bool(asked.profile) == bool(case) or bool(case) != bool(asked.model and asked.machine) or case and asked.set:
            raise ValueError("predict needs either --model and --machine, or --profile with nothing but --set")
        if asked.profile:
            print("\n".join(whatif.duration_lines(doctor.chosen(asked.profile), asked.set)))
            return 0
        print("\n".join(whatif.lines(**ASKED | case)))
    except (ValueError, OSError, doctor.Finding) as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
